"""The process in which the doctor examines a vLLM engine; see `doctor` for what it writes.

python -m kvcmas.engines.vllm.doctor_engine SEED --model MODEL ENGINE_FLAGS
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvcmas import __version__
from kvcmas.engines.vllm.doctor_report import VllmReport
from kvcmas.errors import UnsupportedError

Progress = Callable[[str], None]


def examine(arguments: Sequence[str], seed: int, progress: Progress) -> VllmReport:
    """Start an engine in this process and examine it.

    arguments: of vLLM's engine, as on its command line.
    """
    from kvcmas.engines.vllm.compat import TESTED, check_version, vllm_version
    from kvcmas.engines.vllm.compat_checks import make_engine
    from kvcmas.engines.vllm.doctor_checks import Examination

    report = VllmReport(
        model="",
        verdict="unsupported",
        vllm=str(vllm_version),
        torch=torch.__version__,
        kvcmas=__version__,
        tested=vllm_version in TESTED,
    )
    try:
        check_version()
        progress("vLLM starts")
        engine = make_engine(arguments)
        return Examination(engine, seed, progress).run(report)
    except UnsupportedError as error:
        return report.model_copy(update={"reasons": (str(error),)})


def main() -> None:
    """Examine what the command line says and write the report."""
    # vLLM and its libraries print on stdout; from here on that is stderr.
    sys.stdout.flush()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(word: dict[str, Any]) -> None:
        channel.write(json.dumps(word) + "\n")
        channel.flush()

    seed, *arguments = sys.argv[1:]
    try:
        report = examine(arguments, int(seed), lambda message: tell({"progress": message}))
    except Exception as error:  # told to the process that waits for it, and shown there
        traceback.print_exc()
        tell({"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error
    tell({"report": report.model_dump(mode="json")})


if __name__ == "__main__":
    main()
