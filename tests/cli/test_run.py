"""`kvcmas run` on a tiny model, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcmas.cli.main import app
from kvcmas.engines.runner import WorkflowRun

from ..engines.small_files import chat_tokenizer, save_folder, small_model

WORKFLOW = """
name: pair
topology: chain
rounds: 2
agents:
  - {name: planner, role: Plan., task: Go., max_tokens: 3}
  - {name: judge, role: Judge., task: Say.}
"""
TEXT = "hell hello, the text of all"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = small_model()
    model.config.max_position_embeddings = 1024
    model.save_pretrained(path)
    chat_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    file = tmp_path / "pair.yaml"
    file.write_text(WORKFLOW)
    return file


@pytest.fixture
def context(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def run(*arguments: object, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["run", *map(str, arguments)], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_run(workflow: Path, context: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, stdout, stderr = run(
        *(workflow, "--context", context, "--model", folder, "--method", "fullshared"),
        *("--max-tokens", 4, "--seed", 3, "-o", "min_length=16", "--json", out),
    )
    assert code == 0
    record = json.loads(out.read_text())
    assert record["method"] == {"name": "fullshared", "options": {"min_length": 16}, "dial": None}
    assert record["model"]["source"] == str(folder)
    assert record["params"]["seed"] == 3
    done = WorkflowRun.model_validate(record["run"])
    assert [(turn.round, turn.agent) for turn in done.turns] == [
        (1, "planner"),
        (1, "judge"),
        (2, "planner"),
        (2, "judge"),
    ]
    assert all(1 <= turn.record.generated <= 4 for turn in done.turns)
    assert done.turns[1].record.reused > 16
    for number, turn in enumerate(done.turns, start=1):
        assert f"{turn.agent} (round {turn.round}):\n" in stdout
        reused = f"{turn.record.prompt} tokens read, {turn.record.reused} of them reused"
        assert f"turn {number} of 4, {turn.agent}: {reused}" in stderr
    assert "Computed" in stdout and "all turns" in stdout
    assert f"loading {folder}" in stderr


def test_json_on_stdout_is_all_there_is(workflow: Path, folder: Path) -> None:
    code, stdout, stderr = run(
        *(workflow, "--context", "-", "--model", folder, "--method", "nonshared"),
        *("--rounds", 1, "--max-tokens", 1, "--json", "-", "--plain", "--dial", "exact"),
        stdin=TEXT,
    )
    assert code == 0
    record = json.loads(stdout)
    assert len(record["run"]["turns"]) == 2
    assert record["method"]["dial"] == "exact"
    assert "Computed" in stderr


def test_an_example_by_name_without_context(folder: Path) -> None:
    code, stdout, stderr = run(
        *("debate", "--model", folder, "--method", "nonshared"),
        *("--rounds", 1, "--max-tokens", 1),
    )
    assert code == 0
    assert "moderator (round 1):" in stdout
    assert "Note: the workflow has no context" in stderr


BAD_RUNS = [
    (("none.yaml",), "WorkflowError", "no such file"),
    (("debat",), "WorkflowError", "did you mean 'debate'?"),
    (("FILE:agents: [",), "WorkflowError", "correct the YAML"),
    (("FILE:agents: [{name: a, reads: [b]}, {name: b, reads: [a]}]",), "WorkflowError", "cycle"),
    (("FILE:agents: [{name: a, reads: [c]}, {name: b}]",), "WorkflowError", "is no agent"),
    (("FILE:agents: [{name: a}]",), "WorkflowError", "is empty"),
    (("debate", "--method", "fulshared"), "ConfigError", "did you mean 'fullshared'?"),
    (
        ("debate", "--method", "fullshared", "-o", "min_lenght=3"),
        "ConfigError",
        "did you mean 'min_length'?",
    ),
    (("debate", "--method", "fullshared", "-o", "min_length=0"), "ConfigError", ">= 1, got 0"),
    (("debate", "--method", "fullshared", "-o", "min_length"), "ConfigError", "name=value"),
    (
        ("debate", "--method", "fullshared", "--model", "./no/model"),
        "ConfigError",
        "no such file or folder",
    ),
    (("debate", "--method", "fullshared", "--dtype", "float31"), "ConfigError", "float31"),
    (("debate", "--method", "fullshared", "--temperature", "-1"), "ConfigError", "temperature"),
    (("debate", "--context", "none.txt"), "ConfigError", "--context none.txt: cannot be read"),
    (("debate", "--context", "-"), "ConfigError", "standard input is empty"),
    (("debate", "--max-tokens", "0"), "WorkflowError", "max_tokens is 0"),
    (("debate", "--rounds", "0"), "WorkflowError", "rounds is 0"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD_RUNS)
def test_bad_input(
    arguments: tuple[str, ...],
    kind: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = arguments
    if name.startswith("FILE:"):
        Path("bad.yaml").write_text(name.removeprefix("FILE:"))
        name = "bad.yaml"
    code, stdout, stderr = run(name, *options)
    lines = stderr.splitlines()
    told = [i for i, line in enumerate(lines) if line.startswith("kvcmas: ")]
    assert code == 1 and len(told) == 1 and stdout == ""
    assert message in lines[told[0]]
    assert lines[told[0] + 1 :] == ["Try 'kvcmas run --help' for all options."]
    code, stdout, stderr = run(name, *options, "--json", "-")
    assert code == 1
    error = json.loads(stdout)["error"]
    assert error["type"] == kind and message in error["message"]


def test_too_long_a_prompt_names_the_turn(workflow: Path, context: Path, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model")
    context.write_text(TEXT * 10)
    code, _, stderr = run(
        workflow, "--context", context, "--model", folder, "--method", "nonshared"
    )
    assert code == 1
    assert "kvcmas: agent 'planner' in round 1: " in stderr
    assert "the model's window is 128" in stderr


def test_a_usage_error_exits_with_two(folder: Path) -> None:
    assert run()[0] == 2
    assert run("debate", "--nonsense")[0] == 2
