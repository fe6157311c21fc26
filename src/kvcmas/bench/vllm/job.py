"""What a part gets: settings, a folder with the results of the parts before it, a way to tell."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kvcmas.bench.steps import Report, silent
from kvcmas.bench.vllm.settings import Settings

SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True)
class Job:
    """One part in its process."""

    settings: Settings
    folder: Path
    report: Report = silent

    @classmethod
    def open(cls, folder: Path, report: Report = silent) -> Job:
        """The job of a folder that `run.py` has made."""
        text = (folder / SETTINGS).read_text(encoding="utf-8")
        return cls(Settings.model_validate_json(text), folder, report)

    def save(self, name: str, result: dict[str, Any]) -> None:
        """Keep a result for other processes."""
        (self.folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")

    def load(self, name: str) -> dict[str, Any]:
        """What `save` kept."""
        text = (self.folder / f"{name}.json").read_text(encoding="utf-8")
        result: dict[str, Any] = json.loads(text)
        return result


def reporter(stream: TextIO) -> Report:
    """Tells another process, one line each; `read_report` understands it."""

    def report(phase: str, done: int, total: int) -> None:
        print(f"{done}\t{total}\t{phase}", file=stream, flush=True)

    return report


def read_report(line: str) -> tuple[str, int, int]:
    """Phase, done and total of a reporter's line."""
    done, total, phase = line.rstrip("\n").split("\t", 2)
    return phase, int(done), int(total)
