"""The doctor's engine runs in a process of its own: started here, and asked for its report.

The process writes one JSON object a line to its stdout: `{"progress": text}` any number of times,
then `{"report": {...}}` or `{"error": text}`. What vLLM prints goes to its stderr, which is shown
when there is no report.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from kvcmas.engines.vllm.command import ServerCommand, doctor_command, installed_vllm
from kvcmas.engines.vllm.doctor_report import VllmReport
from kvcmas.engines.vllm.options import VllmOptions
from kvcmas.errors import UnsupportedEngineError

_TAIL = 15  # lines of vLLM's log that are shown when it does not start

Progress = Callable[[str], None]


def diagnose_vllm(
    source: str,
    flags: Sequence[str] = (),
    *,
    name: str | None = None,
    options: VllmOptions | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    environment: Mapping[str, str] | None = None,
) -> VllmReport:
    """Start vLLM with kvcmas and a model, and examine it.

    Args:
        source: what vLLM reads the model from, a folder or a hub id.
        flags: of vLLM's engine, such as `("--gpu-memory-utilization", "0.5")`.
        name: of the model in the report.
        seed: of the random prompts.
        progress: called with a line of text whenever a step begins.
        environment: in place of this process's.

    Raises:
        MissingDependencyError: vLLM is not installed.
        ConfigError: `flags` hold something that kvcmas sets itself.
        UnsupportedEngineError: vLLM did not start; the message has the end of its log.
    """
    before = dict(os.environ if environment is None else environment)
    command = doctor_command(
        source, options or VllmOptions(), flags, installed_vllm(), seed=seed, environment=before
    )
    report = run_examination(command, progress or (lambda message: None), before)
    return report.model_copy(update={"model": name or source})


def run_examination(
    command: ServerCommand, progress: Progress, environment: Mapping[str, str]
) -> VllmReport:
    """Run the process and follow what it tells.

    Raises:
        UnsupportedEngineError: it ended without a report.
    """
    variables = {**environment, **command.variables}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(
            command.arguments,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            env=variables,
        ) as process,
    ):
        try:
            last = _follow(process, progress)
        except BaseException:
            process.kill()
            raise
        if "report" in last:
            return VllmReport.model_validate(last["report"])
        status = process.wait()
        why = last.get("error", f"its process ended with status {status}")
        raise UnsupportedEngineError(
            f"vLLM could not be examined with this model and these flags: {why}\n"
            f"The end of its log:\n{_tail(log)}"
        )


def _follow(process: subprocess.Popen[str], progress: Progress) -> dict[str, Any]:
    """Pass progress on; returns the last word, empty if there was none."""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            told = json.loads(line)
        except json.JSONDecodeError:
            continue  # a library that prints where it should not
        if isinstance(told, dict) and "progress" in told:
            progress(told["progress"])
        elif isinstance(told, dict) and told.keys() & {"report", "error"}:
            return told
    return {}


def _tail(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.rstrip() for line in log if line.strip()]
    return "\n".join(f"    {line}" for line in lines[-_TAIL:])
