"""The rounds of plain requests: the same for vLLM with kvcmas and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PLAIN_HINTS: tuple[Mapping[str, Any] | None, ...] = ({"reuse": False}, {"dial": "exact"}, None)
"""How a request says that it wants nothing; the last one says nothing, and finds nothing."""


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a round. plain: its answer is compared; the others reuse, where they can."""

    ids: Sequence[int]
    hints: Mapping[str, Any] | None
    plain: bool = True


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that are handed in at once.

    same: both engines compute the same rows in the same steps, so the bits must be equal.
    """

    name: str
    lines: tuple[Line, ...]
    same: bool


def rounds(
    plain: Sequence[Sequence[int]], donor: Sequence[int], readers: Sequence[Sequence[int]]
) -> list[Round]:
    """Before, beside and behind requests that reuse.

    plain: prompts that share nothing. donor, readers: prompts over one text; the readers' are
    asked for plainly as well, behind what they were served approximately.
    """
    asked = [Line(ids, PLAIN_HINTS[index % len(PLAIN_HINTS)]) for index, ids in enumerate(plain)]
    first, last = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    reusing = [Line(ids, None, plain=False) for ids in readers]
    again = [Line(line.ids, {"reuse": False}) for line in reusing]
    return [
        *(Round(f"before {index}", (line,), True) for index, line in enumerate(first, 1)),
        Round("before, cached", tuple(first), True),
        Round("donor", (Line(donor, None, plain=False),), False),
        Round("beside", (last[0], *reusing, *last[1:]), False),
        *(Round(f"behind {index}", (line,), False) for index, line in enumerate(again, 1)),
        Round("behind, all", (*first, *last, *again), False),
    ]
