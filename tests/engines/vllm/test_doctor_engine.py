"""`kvcmas doctor --vllm` on the demo's model, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvcmas.engines.vllm.doctor_report import VllmReport

from .engine import ENVIRONMENT

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("vllm")
    return subprocess.run(
        (sys.executable, "-m", "kvcmas", "doctor", "--vllm", *arguments),
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_demo_is_supported() -> None:
    done = doctor("demo", "--json", "--seed", "1", "--", "--max-model-len", "1024")
    assert done.returncode == 0, done.stderr
    report = VllmReport.model_validate_json(done.stdout)
    assert report.verdict == "supported"
    assert (report.model, report.device, report.dtype) == ("demo", "cpu", "float32")
    assert (report.layers, report.kv_heads, report.head_dim, report.window) == (30, 3, 64, 1024)
    assert report.scheduler == "KvcmasScheduler"
    assert [check.name for check in report.checks] == [
        *("scheduler", "self-test", "KV layout"),
        *("one hole", "three holes", "wrong donor", "plain again"),
    ]
    errors = {check.name: check.error for check in report.checks}
    assert errors["KV layout"] == errors["plain again"] == 0.0
    wrong = errors["wrong donor"]
    assert wrong is not None and wrong > 0.1
    assert "three holes" in done.stderr.splitlines()


def test_flags_that_do_not_fit_are_told() -> None:
    done = doctor("demo", "--json", "--", "--max-model-len", "4000000")
    assert done.returncode == 1
    assert "vLLM could not be examined" in json.loads(done.stdout)["error"]["message"]
