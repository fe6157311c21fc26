"""`python -m kvcmas.bench.vllm.child NAME FOLDER DESCRIPTOR`: one part in a process of its own.

DESCRIPTOR: of the pipe that takes the reports.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import FrameType

from kvcmas.bench.vllm.job import Job, reporter


def main(name: str, folder: Path, descriptor: int) -> None:
    """Run a part and save its result."""
    signal.signal(signal.SIGTERM, _leave)  # so that a part's servers end with it
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        job = Job.open(folder, reporter(stream))
        job.save(name, import_module(f"kvcmas.bench.vllm.{name}").run(job))


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
