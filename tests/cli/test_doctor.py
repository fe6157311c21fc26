"""`kvcmas doctor`: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import GPT2Config
from typer.testing import CliRunner

from kvcmas.cli.main import app
from kvcmas.core.rope import Rope
from kvcmas.engines.transformers.doctor_report import DoctorReport

from ..engines.small_files import save_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("model"))


def doctor(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": "100"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_supported(folder: Path) -> None:
    code, stdout, stderr = doctor(folder, "--lengths", "24,60", "--shifts", "1,5")
    assert code == 0
    assert stdout.splitlines()[-1] == f"{folder}: supported"
    assert stdout.startswith("LlamaForCausalLM (llama), 2 layers with 2 KV heads of 8")
    assert stdout.count(" ok ") == 2 * 3 + 4 + 2
    assert "60 tokens: computed 5 positions further on" in stderr
    assert "Error of each layer" not in stdout


def test_layers(folder: Path) -> None:
    code, stdout, _ = doctor(folder, "--lengths", "24", "--shifts", "1", "--layers")
    assert code == 0
    assert "Error of each layer" in stdout


def test_json(folder: Path) -> None:
    code, stdout, _ = doctor(folder, "--lengths", "24,3000", "--json", "--seed", "2")
    assert code == 0
    report = DoctorReport.model_validate_json(stdout)
    assert report.verdict == "supported"
    assert [note for note in report.notes if "shortened" in note]
    assert all(check["passed"] for check in json.loads(stdout)["checks"])


def test_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Rope.from_config

    def tampered(config: object, *, model_type: str | None = None) -> Rope:
        rope = right(config, model_type=model_type)
        table = rope.tables[0]
        halved = tuple(frequency / 2 for frequency in table.frequencies)
        return Rope((type(table)(halved, table.axes, table.layout),), rope.layers)

    monkeypatch.setattr(Rope, "from_config", tampered)
    code, stdout, _ = doctor(folder, "--lengths", "24", "--shifts", "1")
    assert code == 1
    assert "Failed: moved keys at length 24, shift 1: error " in stdout
    assert "2 of 2 layers fail, the first is layer 0" in stdout
    assert stdout.splitlines()[-1] == f"{folder}: wrong"


def test_unsupported(tmp_path: Path) -> None:
    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    code, stdout, _ = doctor(tmp_path)
    assert code == 2
    assert "no rotary positions" in stdout
    assert stdout.splitlines()[-1] == f"{tmp_path}: unsupported"
    code, stdout, _ = doctor(tmp_path, "--json")
    assert code == 2
    assert json.loads(stdout)["verdict"] == "unsupported"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("./no/model",), "no such file or folder"),
        (("FOLDER", "--lengths", "x"), "--lengths 'x'"),
        (("FOLDER", "--lengths", "4"), "lengths must be at least 16"),
        (("FOLDER", "--shifts", "0"), "shifts must be at least 1"),
        (("FOLDER", "--device", "abacus"), "abacus"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str, folder: Path) -> None:
    named = [str(folder) if text == "FOLDER" else text for text in arguments]
    code, stdout, stderr = doctor(*named)
    assert code == 1 and stdout == ""
    assert message in stderr
    assert stderr.endswith("Try 'kvcmas doctor --help' for all options.\n")
    code, stdout, _ = doctor(*named, "--json")
    assert code == 1
    assert message in json.loads(stdout)["error"]["message"]
