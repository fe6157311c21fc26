"""A prompt drawn as a bar: from left to right, what happened to its tokens.

Single tokens computed inside a reused run (landmarks) are too small to be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from rich.text import Text

from kvcmas.engines.transformers import SpanRecord
from kvcmas.workflow.plan import Compute, Plan

Kind = Literal["computed", "reused", "prefix"]
KINDS: Final[tuple[Kind, ...]] = ("computed", "reused", "prefix")
# Told apart by shape as well as by colour.
GLYPHS: Final[dict[Kind, str]] = {"computed": "█", "reused": "▒", "prefix": "·"}
STYLES: Final[dict[Kind, str]] = {"computed": "red", "reused": "green", "prefix": "cyan"}
LABELS: Final[dict[Kind, str]] = {
    "computed": "computed",
    "reused": "reused",
    "prefix": "own exact prefix",
}


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens `[start, stop)` of a prompt share one fate."""

    start: int
    stop: int
    kind: Kind


def runs_of_plan(plan: Plan) -> list[Run]:
    """What a plan intends, each head at its first length."""
    runs: list[Run] = []
    for span in plan.spans:
        if isinstance(span, Compute):
            runs.append(Run(span.start, span.stop, "computed"))
        else:
            runs += _reuse(span.start, span.stop, span.head.length, span.exact)
    return runs


def runs_of_record(spans: Iterable[SpanRecord]) -> list[Run]:
    """What was done in the end."""
    runs: list[Run] = []
    for span in spans:
        if span.kind == "compute":
            runs.append(Run(span.start, span.stop, "computed"))
        else:
            runs += _reuse(span.start, span.stop, span.head, span.exact)
    return runs


def _reuse(start: int, stop: int, head: int, exact: bool) -> list[Run]:
    runs = [Run(start, start + head, "computed")] if head else []
    if start + head < stop:
        runs.append(Run(start + head, stop, "prefix" if exact else "reused"))
    return runs


def cells(runs: Sequence[Run], width: int) -> list[Kind]:
    """The fate of most tokens in each of `width` equal parts of a prompt.

    Of equally many, the one listed first in `KINDS`. A prompt shorter than `width` has parts of
    less than a token, which take the fate of the token that they lie in.
    """
    length = max((run.stop for run in runs), default=0)
    if not length or width < 1:
        return []
    fates = np.zeros(length, dtype=np.int64)
    for run in runs:
        fates[run.start : run.stop] = KINDS.index(run.kind)
    drawn: list[Kind] = []
    for cell in range(width):
        start = cell * length // width
        stop = max(start + 1, (cell + 1) * length // width)
        drawn.append(KINDS[int(np.bincount(fates[start:stop]).argmax())])
    return drawn


def bar(runs: Sequence[Run], width: int) -> Text:
    """The prompt as coloured blocks."""
    text = Text(no_wrap=True)
    for kind in cells(runs, width):
        text.append(GLYPHS[kind], STYLES[kind])
    return text


def legend() -> Text:
    """What the blocks mean."""
    text = Text()
    for kind in KINDS:
        text.append(f"{GLYPHS[kind] * 2} ", STYLES[kind]).append(f"{LABELS[kind]}   ")
    return text
