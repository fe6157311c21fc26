"""The package as a whole: its version, its public names, and what importing it costs."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys
from importlib import resources

import pytest
from typer.testing import CliRunner

import kvcmas
from kvcmas import errors
from kvcmas.cli import main as cli

HEAVY = ("torch", "transformers", "vllm", "matplotlib", "datasets", "fastapi", "uvicorn", "rich")


def test_version_is_the_installed_one() -> None:
    try:
        installed = importlib.metadata.version("kvcmas")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("kvcmas is on the path but not installed")
    assert kvcmas.__version__ == installed


def test_every_error_is_public() -> None:
    defined = {
        name
        for name, item in vars(errors).items()
        if inspect.isclass(item) and item.__module__ == errors.__name__
    }
    assert defined <= set(kvcmas.__all__)
    assert all(issubclass(getattr(errors, name), kvcmas.KvcmasError) for name in defined)


def test_public_names_exist() -> None:
    assert list(kvcmas.__all__) == sorted(set(kvcmas.__all__))
    assert all(hasattr(kvcmas, name) for name in kvcmas.__all__)


def test_package_is_typed() -> None:
    assert resources.files("kvcmas").joinpath("py.typed").is_file()


def test_import_loads_nothing_heavy() -> None:
    code = f"import kvcmas, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_command_line_starts_without_an_engine() -> None:
    code = (
        "import kvcmas.cli.main, sys; "
        "print([m for m in ('transformers', 'vllm', 'matplotlib', 'datasets') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_version_option() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"kvcmas {kvcmas.__version__}\n"


def test_python_dash_m_is_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "kvcmas", "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout == f"kvcmas {kvcmas.__version__}\n"


def test_an_error_becomes_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise kvcmas.ConfigError("rank must be >= 1, got 0")

    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    assert capsys.readouterr().err == "kvcmas: rank must be >= 1, got 0\n"
