"""Token runs that a prompt shares with stored texts: verified, extended, tiled longest first.

    stored    . . [window] . . [window] . .        indexed every `window` tokens
    prompt        . . . [window] . . .             looked up at every token
                  <-----| verified |----->         extended both ways, token by token

Texts are known by number here; `matching.py` gives them their names.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcmas.workflow.prompt import TokenIds

Bucket = dict[int, list[int]]
"""Where one window occurs: text -> offsets, newest text last."""

MAX_TEXTS: Final = 32
"""Texts of a bucket that are looked at, newest first."""
MAX_OFFSETS: Final = 4
"""Places of one window in one text that are looked at, first ones first."""

# A comparison costs about as much as this many compared tokens; effort is counted in tokens.
_CALL_COST: Final = 4096
_EFFORT_PER_TOKEN: Final = 512
_BASE_EFFORT: Final = 1 << 20
_FIRST_CHUNK: Final = 64


@dataclass(frozen=True, slots=True)
class Run:
    """`prompt[start:stop]` equals `text[offset : offset + stop - start]`."""

    start: int
    stop: int
    text: int
    offset: int

    def __len__(self) -> int:
        return self.stop - self.start

    def clip(self, start: int, stop: int) -> Run:
        """The part of this run inside `[start, stop)`."""
        first, last = max(start, self.start), min(stop, self.stop)
        return Run(first, max(first, last), self.text, self.offset + first - self.start)


def is_crowded(bucket: Bucket) -> bool:
    """Whether some places of this window are left out of account."""
    return len(bucket) > MAX_TEXTS or any(len(places) > MAX_OFFSETS for places in bucket.values())


def candidates(
    bucket: Bucket, texts: int = MAX_TEXTS, offsets: int = MAX_OFFSETS
) -> Iterable[tuple[int, int]]:
    """At most `texts * offsets` pairs (text, offset) of a bucket, newest text first."""
    for text in islice(reversed(bucket), texts):
        for offset in bucket[text][:offsets]:
            yield text, offset


def common_prefix(first: TokenIds, second: TokenIds) -> int:
    """Number of equal tokens at the beginning of two sequences."""
    length: int = min(first.shape[0], second.shape[0])
    position, chunk = 0, _FIRST_CHUNK
    while position < length:
        stop = min(position + chunk, length)
        unequal = first[position:stop] != second[position:stop]
        where = int(unequal.argmax())
        if unequal[where]:
            return position + where
        position, chunk = stop, 4 * chunk
    return length


class RunFinder:
    """Finds the maximal runs that one prompt shares with stored texts.

    Time: a crowded window (see `is_crowded`) that lies inside a run already found is passed
    over. Comparisons are charged to an effort proportional to the prompt (enough for about 256
    runs and one more for every 8 tokens); when it is spent, every window inside a found run is
    passed over, one candidate of any other is tried, and nothing already covered is compared
    again. So the time stays linear for any input.
    """

    def __init__(
        self, prompt: TokenIds, texts: dict[int, TokenIds], window: int, min_length: int
    ) -> None:
        self._prompt = prompt
        self._texts = texts
        self._window = window
        self._min_length = min_length
        self._effort = _BASE_EFFORT + _EFFORT_PER_TOKEN * prompt.shape[0]
        self._known: dict[tuple[int, int], int] = {}  # (text, offset - position) -> stop
        self._covered = 0  # largest stop of the runs of at least min_length
        self._touched = 0  # largest stop of all runs
        self.runs: list[Run] = []

    def visit(self, position: int, bucket: Bucket) -> None:
        """Look at the stored places of the window at `position`; positions must ascend."""
        thrifty = self._effort <= 0
        stop = position + self._window
        if thrifty:
            if stop <= self._touched:
                return
            pairs = candidates(bucket, 1, 1)
        else:
            if stop <= self._covered and is_crowded(bucket):
                return
            pairs = candidates(bucket)
        for text, offset in pairs:
            if position < self._known.get((text, offset - position), 0):
                continue  # inside a run that is known
            self._extend(position, text, offset, self._touched if thrifty else 0)

    def _extend(self, position: int, text: int, offset: int, floor: int) -> None:
        stored = self._texts[text]
        right = common_prefix(self._prompt[position:], stored[offset:])
        self._effort -= _CALL_COST + right
        if right < self._window:
            return  # a collision of hashes
        floor = min(floor, position)
        left = common_prefix(self._prompt[floor:position][::-1], stored[:offset][::-1])
        self._effort -= left
        run = Run(position - left, position + right, text, offset - left)
        self.runs.append(run)
        self._known[text, offset - position] = run.stop
        self._touched = max(self._touched, run.stop)
        if len(run) >= self._min_length:
            self._covered = max(self._covered, run.stop)


def tile(runs: Sequence[Run], min_length: int) -> list[Run]:
    """Non-overlapping runs in order of position, taken longest first, then leftmost.

    What a longer run takes away from a shorter one is cut off; pieces below `min_length` are
    dropped.
    """
    pieces = _undominated(runs)
    heap = [(-len(run), run.start, index) for index, run in enumerate(pieces)]
    heapq.heapify(heap)
    starts: list[int] = []
    taken: list[Run] = []
    while heap:
        size, _, index = heapq.heappop(heap)
        run = pieces[index]
        if -size < min_length:
            break
        # All taken runs are at least as long as this one, so they overlap it only at its ends.
        place = bisect_right(starts, run.start)
        low = taken[place - 1].stop if place else 0
        high = taken[place].start if place < len(taken) else run.stop
        piece = run.clip(low, high)
        if len(piece) == len(run):
            starts.insert(place, run.start)
            taken.insert(place, run)
        elif len(piece) >= min_length:
            pieces[index] = piece
            heapq.heappush(heap, (-len(piece), piece.start, index))
    return taken


def _undominated(runs: Sequence[Run]) -> list[Run]:
    """Without the runs that lie inside another; these add nothing to a tiling."""
    kept: list[Run] = []
    stop = 0
    for run in sorted(runs, key=lambda run: (run.start, -run.stop, run.text, run.offset)):
        if run.stop > stop:
            kept.append(run)
            stop = run.stop
    return kept


def rarest_block(sizes: NDArray[np.int64], width: int) -> int:
    """First index of the `width` neighbouring entries of `sizes` with the smallest sum."""
    if sizes.shape[0] <= width:
        return 0
    sums = np.concatenate(([0], np.cumsum(sizes)))
    return int(np.argmin(sums[width:] - sums[:-width]))
