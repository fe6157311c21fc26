"""Settings, reports, figures and commands: what joins the parts."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from kvcmas.bench.vllm.client import Timed
from kvcmas.bench.vllm.figures import HEADLINE, figures
from kvcmas.bench.vllm.job import SETTINGS, Job, read_report, reporter
from kvcmas.bench.vllm.run import PartError, run_process
from kvcmas.bench.vllm.servers import free_ports
from kvcmas.bench.vllm.serving import ReaderRow, bound_ratio, overhead_figures, reader_figures
from kvcmas.bench.vllm.settings import PARTS, Settings
from kvcmas.bench.vllm.texts import padded_chat
from kvcmas.bench.vllm.variables import engine_variables, server_variables

SETTING = Settings(model="somewhere", contexts=Path("texts.json"))


def row(ours: float, plain: float, bound: float | None, computed: int = 20) -> ReaderRow:
    return ReaderRow(
        "context",
        1,
        "critic",
        Timed("", ours, 100, 100 - computed),
        Timed("", plain, 100, 32),
        bound,
    )


def test_jobs_cross_processes(tmp_path: Path) -> None:
    (tmp_path / SETTINGS).write_text(SETTING.model_dump_json())
    job = Job.open(tmp_path)
    assert job.settings == SETTING
    job.save("holes", {"worst": 0.0, "rows": [1, 2]})
    assert job.load("holes") == {"worst": 0.0, "rows": [1, 2]}


def test_reports_cross_processes() -> None:
    stream = io.StringIO()
    report = reporter(stream)
    report("reading, chain", 3, 8)
    assert read_report(stream.getvalue()) == ("reading, chain", 3, 8)


def test_headline_first_and_rows_left_out() -> None:
    found = figures({"soak": {"leaked_blocks": 0, "soak_rows": [1]}, "holes": {"more": 1.5}})
    assert tuple(found)[: len(HEADLINE)] == HEADLINE
    assert found["leaked_blocks"] == 0
    assert found["holes_max_dlogprob"] is None
    assert found["more"] == 1.5
    assert "soak_rows" not in found


def test_overhead_is_the_median_of_pairs() -> None:
    found = overhead_figures([1.0, 2.2, 30.0], [1.0, 2.0, 10.0])
    assert found["idle_overhead"] == pytest.approx(0.1)
    assert found["idle_overhead_of_medians"] == pytest.approx(0.1)
    assert found["idle_pairs"] == 3


def test_reader_figures() -> None:
    rows = [row(0.5, 2.0, 0.4), row(1.0, 2.0, None), row(0.7, 4.0, 0.5)]
    found = reader_figures(rows, "reader")
    assert found["reader_ttft_ratio"] == pytest.approx(0.35)
    assert found["reader_computed_share"] == pytest.approx(0.2)
    assert found["reader_computed_share_vllm"] == pytest.approx(0.68)
    assert bound_ratio(rows) == pytest.approx(0.6 / 0.45)


def test_a_chat_of_plain_words() -> None:
    system, user = padded_chat(" one two three four")
    assert (system["content"], user["content"]) == ("one two three", "four")


def test_what_is_set_already_stays() -> None:
    found = engine_variables("hub/name", {"OMP_NUM_THREADS": "7"})
    assert found["OMP_NUM_THREADS"] == "7"
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "HF_HUB_OFFLINE" not in found
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in server_variables("hub/name", {})


def test_ports_differ() -> None:
    assert len(set(free_ports(3))) == 3


def test_a_failed_part_says_why(tmp_path: Path) -> None:
    (tmp_path / SETTINGS).write_text(SETTING.model_dump_json())
    with pytest.raises(PartError, match="no_such_part"):
        run_process("no_such_part", tmp_path, "somewhere", lambda *_: None)


def test_quick_is_less() -> None:
    quick = SETTING.quick()
    assert quick.model == SETTING.model
    assert quick.soak_requests < SETTING.soak_requests


def test_vllm_is_not_loaded() -> None:
    modules = ", ".join(f"kvcmas.bench.vllm.{name}" for name in (*PARTS, "run"))
    code = f"import sys, {modules}; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
