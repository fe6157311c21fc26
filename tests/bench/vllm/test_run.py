"""Settings, reports, figures and commands: what joins the parts."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcmas.bench.steps import Report
from kvcmas.bench.vllm.chats import converse
from kvcmas.bench.vllm.figures import FURTHER, HEADLINE, figures
from kvcmas.bench.vllm.job import SETTINGS, Job, read_report, reporter
from kvcmas.bench.vllm.latencies import overhead_figures, reader_figures
from kvcmas.bench.vllm.plain import REFERENCE
from kvcmas.bench.vllm.run import Outcome, PartError, Process, run_parts, run_process
from kvcmas.bench.vllm.servers import Server, free_ports
from kvcmas.bench.vllm.settings import PARTS, Settings
from kvcmas.bench.vllm.variables import engine_variables, server_variables
from kvcmas.cli.main import app
from kvcmas.errors import UnsupportedError

SETTING = Settings(model="somewhere", contexts=Path("texts.json"))


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


def test_figures_that_are_always_there_have_these_names() -> None:
    known = {
        *overhead_figures([], []),
        *reader_figures([], "reader"),
        *converse({"kvcmas": lambda text: [], "vllm": lambda text: []}, []),
    }
    assert known >= {*FURTHER}


def test_headline_first_and_rows_left_out() -> None:
    found = figures({"soak": {"leaked_blocks": 0, "soak_rows": [1]}, "holes": {"more": 1.5}})
    assert tuple(found)[: len(HEADLINE)] == HEADLINE
    assert found["leaked_blocks"] == 0
    assert found["holes_max_dlogprob"] is None
    assert found["more"] == 1.5
    assert "soak_rows" not in found


def failing(*names: str) -> Process:
    """Parts that save one number, but for those that end without a result."""

    def run(name: str, folder: Path, model: str, report: Report) -> None:
        if name in names:
            raise PartError(f"the part {name} failed: out of luck")
        Job.open(folder).save(name, {f"{name}_number": 1.5, "rows": [1, 2]})

    return run


def test_a_failed_part_leaves_the_others() -> None:
    notes: list[str] = []
    outcome = run_parts(SETTING, PARTS, note=notes.append, process=failing("serving", REFERENCE))
    found = outcome.figures
    assert found["failed_parts"] == ["plain", "serving"]
    assert [found[f"{part}_number"] for part in ("holes", "quality", "soak")] == [1.5] * 3
    assert "plain_number" not in found
    names = ("plain_identical", "bound_ratio", "idle_overhead_low", "chat_cached_share_kvcmas")
    assert [found[name] for name in names] == [None] * 4
    assert all(found[f"{part}_s"] >= 0 for part in PARTS)
    assert found["total_s"] >= 0
    record = outcome.record
    assert record["parts"]["serving"] is None
    assert record["parts"]["soak"] == {"soak_number": 1.5, "rows": [1, 2]}
    assert set(record["failures"]) == {"plain", "serving"}
    assert record["figures"] == found
    assert [note.split()[2:4] for note in notes] == [
        [part, "failed" if part in ("plain", "serving") else "took"] for part in PARTS
    ]
    with pytest.raises(PartError, match="no result of plain, serving;") as raised:
        outcome.check()
    assert str(raised.value).count("out of luck") == 2


def test_without_a_failure_there_is_nothing_to_say() -> None:
    outcome = run_parts(SETTING, ("soak",), process=failing())
    assert outcome.failures == {}
    assert outcome.figures["failed_parts"] == []
    outcome.check()


def test_a_real_part_that_fails_is_named(tmp_path: Path) -> None:
    def run(name: str, folder: Path, model: str, report: Report) -> None:
        run_process("no_such_part", folder, model, report)

    outcome = run_parts(SETTING, ("soak",), process=run)
    assert "No module named 'kvcmas.bench.vllm.no_such_part'" in outcome.failures["soak"]


@pytest.mark.parametrize("failed", [False, True])
def test_the_command_prints_and_writes_before_it_fails(
    failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_vllm(settings: Settings, *_: object) -> Outcome:
        return run_parts(settings, ("soak",), process=failing("soak" if failed else ""))

    monkeypatch.setattr("kvcmas.bench.vllm.run.run_vllm", run_vllm)
    monkeypatch.setattr("kvcmas.bench.vllm.model.model_of", lambda name, progress: name)
    written, texts = tmp_path / "record.json", tmp_path / "texts.txt"
    texts.write_text("A text.")
    given = ["bench", "vllm", "--contexts", str(texts), "--json", str(written)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == int(failed)
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed["failed_parts"] == (["soak"] if failed else [])
    assert printed == json.loads(written.read_text())["figures"]
    assert ("no result of soak" in result.stderr) == failed
    assert ("out of luck" in result.stderr) == failed


def test_a_server_that_had_ended_is_told_with_the_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no memory left')"]
    server = Server("kvcmas", command, 1, tmp_path / "log", os.environ)
    with pytest.raises(ConnectionError) as raised, server:
        with pytest.raises(UnsupportedError, match="no memory left"):
            server.ready()
        raise ConnectionError("refused")
    assert "kvcmas had ended by then; its output:\nno memory left" in raised.value.__notes__


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
