"""All parts, one after the other, each process by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
_TAIL_LINES = 20
_END_S = 60.0


class PartError(KvcmasError):
    """A part ended without a result."""


def run_vllm(
    settings: Settings, parts: Sequence[PartName] = PARTS, report: Report = silent
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run parts.

    Returns:
        the figures, `None` for what was not measured; and the whole record.

    Raises:
        PartError: a part failed; with the end of its output.
        MissingDependencyError: there is no vLLM.
    """
    vllm = installed_vllm()
    began = perf_counter()
    results: dict[str, dict[str, Any]] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="kvcmas-bench-") as place:
        folder = Path(place)
        (folder / SETTINGS).write_text(settings.model_dump_json(), encoding="utf-8")
        for part in parts:
            started = perf_counter()
            for name in _PROCESSES.get(part, (part,)):
                run_process(name, folder, settings.model, report)
            results[part] = Job.open(folder).load(part)
            seconds[part] = round(perf_counter() - started, 1)
    found = figures(results) | {f"{part}_s": spent for part, spent in seconds.items()}
    found["total_s"] = round(perf_counter() - began, 1)
    record = {
        "environment": {**environment(), vllm.distribution: vllm.version},
        "settings": settings.model_dump(mode="json"),
        "figures": found,
        "parts": results,
    }
    return found, record


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
