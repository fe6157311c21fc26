"""One run for all donors that hold nearly the same tokens.

Prompts differ behind a shared text, and now and then two of them go on with the same word:

    reader     | shared text ............... | Write | your criticism.
    donor A    | shared text ............... | Write | the plan.
    donor B    | shared text ............... | Give  | your analysis.

The longest run is one token longer than the shared text, and only A holds all of it. Given up at
the edge are those few tokens, so that the choice between A and B is left to the method.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcmas.workflow.matching import Match, Source
from kvcmas.workflow.prompt import TokenIds

EDGE = 8
"""Most tokens given up at either end of a run."""

LONG = 8 * EDGE
"""Shorter runs keep their edges."""


def core_of(match: Match, prompt: TokenIds) -> TokenIds:
    """The run's tokens without its edges."""
    return prompt[match.start + EDGE : match.stop - EDGE]


def gather(match: Match, prompt: TokenIds, holders: Sequence[tuple[Source, TokenIds]]) -> Match:
    """The longest run with the match's core that all holders have.

    holders: segments that contain the core, at their source's offset, and their tokens.
    """
    before = prompt[match.start : match.start + EDGE]
    behind = prompt[match.stop - EDGE : match.stop]
    core = len(match) - 2 * EDGE
    left = right = EDGE
    for source, ids in holders:
        stop = source.offset + core
        left = min(
            left, _same(before[::-1], ids[max(0, source.offset - EDGE) : source.offset][::-1])
        )
        right = min(right, _same(behind, ids[stop : stop + EDGE]))
    return Match(
        match.start + EDGE - left,
        match.stop - EDGE + right,
        tuple(Source(source.segment, source.offset - left) for source, _ in holders),
    )


def _same(one: TokenIds, other: TokenIds) -> int:
    """Length of the common beginning."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if differ.size else length
