"""All parts, one after the other, each process by itself; what one loses the others keep."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from kvcmas.bench.environment import environment
from kvcmas.bench.steps import Report, silent
from kvcmas.bench.vllm.figures import figures
from kvcmas.bench.vllm.job import SETTINGS, Job, read_report
from kvcmas.bench.vllm.plain import REFERENCE
from kvcmas.bench.vllm.settings import PARTS, PartName, Settings
from kvcmas.bench.vllm.variables import engine_variables
from kvcmas.engines.vllm.command import installed_vllm
from kvcmas.errors import KvcmasError

_PROCESSES: dict[PartName, tuple[str, ...]] = {"plain": (REFERENCE, "plain")}
_TAIL_LINES = 40
_END_S = 60.0


Note = Callable[[str], None]
Process = Callable[[str, Path, str, Report], None]
"""Runs a process of a part: its name, the folder, the model, and whom it tells."""


class PartError(KvcmasError):
    """A part ended without a result."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """figures: `None` for what was not measured. record: all of it. failures: why, by part."""

    figures: dict[str, Any]
    record: dict[str, Any]
    failures: dict[str, str]

    def check(self) -> None:
        """Nothing, if every part has a result.

        Raises:
            PartError: names those that have none, with the end of their output.
        """
        if self.failures:
            raise PartError(
                f"no result of {', '.join(self.failures)}; all other parts were measured\n\n"
                + "\n\n".join(self.failures.values())
            )


def run_vllm(
    settings: Settings,
    parts: Sequence[PartName] = PARTS,
    report: Report = silent,
    note: Note | None = None,
) -> Outcome:
    """Run parts; one that fails does not keep the others from being run.

    note: told of every part how long it took.

    Raises:
        MissingDependencyError: there is no vLLM.
    """
    vllm = installed_vllm()
    outcome = run_parts(settings, parts, report, note)
    versions = {**environment(), vllm.distribution: vllm.version}
    return replace(outcome, record={"environment": versions, **outcome.record})


def run_parts(
    settings: Settings,
    parts: Sequence[PartName],
    report: Report = silent,
    note: Note | None = None,
    process: Process | None = None,
) -> Outcome:
    """The same, without a look at vLLM first.

    process: runs a part's process, in place of `run_process`.
    """
    began = perf_counter()
    work = run_process if process is None else process
    results: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="kvcmas-bench-") as place:
        folder = Path(place)
        (folder / SETTINGS).write_text(settings.model_dump_json(), encoding="utf-8")
        for part in parts:
            started = perf_counter()
            try:
                for name in _PROCESSES.get(part, (part,)):
                    work(name, folder, settings.model, report)
                results[part] = Job.open(folder).load(part)
            except PartError as error:
                failures[part] = str(error)
            seconds[part] = round(perf_counter() - started, 1)
            if note is not None:
                end = "failed after" if part in failures else "took"
                note(f"the part {part} {end} {seconds[part]:.0f} s")
    found = figures(results, failures) | {f"{part}_s": spent for part, spent in seconds.items()}
    found["total_s"] = round(perf_counter() - began, 1)
    record = {
        "settings": settings.model_dump(mode="json"),
        "figures": found,
        "failures": failures,
        "parts": {part: results.get(part) for part in parts},
    }
    return Outcome(found, record, failures)


def run_process(name: str, folder: Path, model: str, report: Report) -> None:
    """One process of a part; its result lies in the folder.

    Raises:
        PartError: it failed.
    """
    log = folder / f"{name}.log"
    read, write = os.pipe()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvcmas.bench.vllm.child", name, str(folder), str(write)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=engine_variables(model),
            pass_fds=(write,),
        )
    os.close(write)
    report(f"{name}: starting", 0, 1)
    with _ended(process), os.fdopen(read, encoding="utf-8") as lines:
        for line in lines:
            report(*read_report(line))
        status = process.wait()
    if status != 0:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        raise PartError(
            f"the part {name} failed with status {status}; the end of its output:\n"
            + "\n".join(tail)
        )


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever happens, the process does not stay behind."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
