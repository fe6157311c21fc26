"""`kvcmas bench` on tiny models, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcmas.cli.main import app

from ..bench.small_team import context, model_folder

ROLES = """
roles:
- {name: planner, system: You plan what the others do., task: Write the plan.}
- {name: critic, system: You look for what is wrong., task: Write a criticism.}
- {name: judge, system: "You settle it, in short.", task: Judge.}
"""
SMALL = ("own_dim=8", "window_dim=8", "rank=4", "hidden=0", "basis_tokens=300", "fit_tokens=300")
FREE = ("cold_tokens=0", "audit_limit=100", "tolerance=100")
HEADLINE = [
    *("kl_ratio", "kl_ratio_two_exact", "top1", "computed_share", "map_gain", "ttft_ratio"),
    *("overhead_share", "state_mb", "state_mb_8b", "exact_logits_error"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("files")
    contexts, roles = path / "texts.txt", path / "roles.yaml"
    contexts.write_text("\n---\n".join(context(number).text for number in range(8)))
    roles.write_text(ROLES)
    return contexts, roles


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_fidelity(folder: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    contexts, roles = files
    out = tmp_path / "out.json"
    options = [f"{arm}.{text}" for arm in ("kvcmas", "bare") for text in (*SMALL, *FREE)]
    code, stdout, stderr = run(
        *("fidelity", "--model", folder, "--contexts", contexts, "--roles", roles),
        *("--methods", "fullshared,kvcmas,bare:kvcmas", "--learn", 5, "--test", 2, "--tokens", 4),
        *(word for option in options for word in ("--option", option)),
        *("--option", "bare.correct=false", "--device", "cpu", "--json", out),
    )
    assert code == 0, stderr
    record = json.loads(out.read_text())
    assert (record["learn"], record["test"], record["tokens"]) == (5, 2, 4)
    assert record["roles"] == ["planner", "critic", "judge"]
    assert [arm["label"] for arm in record["arms"]] == ["fullshared", "kvcmas", "bare"]
    assert record["arms"][0]["kl_ratio"] == 1
    assert record["arms"][2]["options"]["correct"] is False
    assert len(record["rows"]) == 2 * 2 * 3
    assert {row["context"] for row in record["rows"]} == {"texts.txt:6", "texts.txt:7"}
    assert "fullshared" in stdout and "learning: 15 of 15" in stderr
    assert "measuring: 6 of 6" in stderr


def test_fidelity_prints_json_alone(folder: Path, files: tuple[Path, Path]) -> None:
    contexts, roles = files
    code, stdout, _ = run(
        *("fidelity", "--model", folder, "--contexts", contexts, "--roles", roles),
        *("--methods", "fullshared", "--baseline", "none", "--learn", 1, "--test", 1),
        *("--tokens", 2, "--device", "cpu", "--json", "-", "--plain"),
    )
    assert code == 0
    record = json.loads(stdout)
    assert record["baseline"] == "" and record["arms"][0]["kl_ratio"] is None


def test_core(folder: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    contexts, roles = files
    out = tmp_path / "core.json"
    code, stdout, stderr = run(
        *("core", "--model", folder, "--contexts", contexts, "--roles", roles),
        *("--learn", 6, "--test", 2, "--tokens", 4, "--json", out),
    )
    assert code == 0, stderr
    figures = json.loads(stdout.splitlines()[-1])
    assert list(figures)[: len(HEADLINE)] == HEADLINE
    assert figures["exact_logits_error"] < 1e-4 and figures["exact_tokens_equal"]
    assert 0 < figures["state_mb_8b"] <= 16
    record = json.loads(out.read_text())
    assert record["figures"] == figures
    labels = [arm["label"] for arm in record["fidelity"]["arms"]]
    assert labels == ["fullshared", "kvcmas", "head alone", "two exact"]


def test_gpu_tiny(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    code, stdout, stderr = run(
        *("gpu", "--device", "cpu", "--tiny", "--contexts", "200,400", "--learn", 1),
        *("--repeats", 1, "--json", out),
    )
    assert code == 0, stderr
    record = json.loads(out.read_text())
    assert [(row["context"], row["method"]) for row in record["rows"]][:3] == [
        (200, "nonshared"),
        (200, "fullshared"),
        (200, "kvcmas"),
    ]
    assert record["device"] == "CPU" and record["environment"]["torch"]
    assert "nonshared" in stdout


BAD_RUNS = [
    (("fidelity", "--contexts", "none.txt"), "contexts none.txt: cannot be read"),
    (("fidelity", "--contexts", "a.csv"), "no file of a known format"),
    (("fidelity", "--contexts", "a.txt", "--roles", "none.yaml"), "roles none.yaml: cannot be"),
    (("fidelity", "--contexts", "a.txt"), "20 contexts to learn from"),
    (("fidelity", "--contexts", "a.txt", "--methods", "kvcms"), "did you mean 'kvcmas'"),
    (("fidelity", "--contexts", "a.txt", "-o", "correct=false"), "LABEL.NAME=VALUE"),
    (("core", "--contexts", "a.txt", "--json", "-"), "give a file"),
    (("core", "--contexts", "a.txt", "--json", "no/such.json"), "there is no folder"),
    (("gpu", "--device", "cpu"), "cpu with --tiny"),
    (("gpu", "--device", "tpu", "--tiny"), "expected cuda"),
    (("gpu", "--device", "cpu", "--tiny", "--contexts", "x"), "whole numbers"),
    (("gpu", "--device", "cpu", "--tiny", "--contexts", "0"), "at least 1 token"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_RUNS)
def test_bad_input(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("One\n---\nTwo")
    code, stdout, stderr = run(*arguments)
    told = [line for line in stderr.splitlines() if line.startswith("kvcmas: ")]
    assert code == 1 and stdout == "" and len(told) == 1
    assert message in told[0]


def test_missing_xquad_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcmas.bench import xquad

    monkeypatch.setattr(xquad, "NAMES", ("no-such-file.json",))
    monkeypatch.chdir(tmp_path)
    code, _, stderr = run("core")
    assert code == 1 and "google-deepmind/xquad" in stderr


def test_xquad_is_found_above_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcmas.bench.xquad import find_xquad

    file = tmp_path / "data" / "xquad.en.json"
    file.parent.mkdir()
    file.write_text("{}")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "er")
    assert find_xquad() == file


def test_vllm_refuses_unknown_parts() -> None:
    code, _, stderr = run("vllm", "--part", "hole")
    assert code == 1
    assert "holes, plain, quality, serving, soak" in stderr
