"""Segment matching: token runs that were seen before, found at any offset of a new prompt.

    index = SegmentIndex(window=16)
    index.add("report", report_ids)
    index.match(prompt_ids, min_length=32)   ->  [Match(58, 826, (Source("report", 0),))]

Works on ids only: no separators, no markup, no tokenizer. The prompt's ids are never changed,
and tokens at the seams of a segment that came out differently are simply not part of the match.
The technique is that of rsync (Tridgell, 1999): stored text is cut into windows at fixed
places, the new text is hashed at every place, and every hit is compared token by token.

Guarantee. Let `run` be tokens that the prompt shares with a stored segment, at least
`2 * window - 1` of them. Then at least one stored window lies inside it and is found, whatever
the offsets. As long as no window inside the run is crowded, the whole run is found. A window is
crowded when more than 32 different stored texts hold it, or one text holds it more than 4 times
at multiples of the window; then the newest texts and the first places are tried, so that
periodic text costs linear time. The same holds when a prompt shares runs with so many places
that comparing them all would take longer than linear time (`RunFinder`). Neither makes a match
wrong, only shorter: the windows of the run are then matched by other texts. Identical texts
count once.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcmas.errors import ConfigError, InputError, KvcmasError
from kvcmas.workflow.prompt import TokenIds
from kvcmas.workflow.rolling_hash import TokenSequence, as_token_ids
from kvcmas.workflow.runs import Bucket, Run, RunFinder, candidates, rarest_block, tile
from kvcmas.workflow.window_table import WindowTable, bucket_sizes

MAX_SOURCES: Final = 8
"""Most sources that a match lists."""
# Bounds for one match: places looked up, and places compared (newest text first).
_MAX_PLACES: Final = 256
_MAX_COMPARED: Final = 64
_SEED_BITS: Final = 64


@dataclass(frozen=True, slots=True)
class Source:
    """The match equals the segment's tokens from `offset` on."""

    segment: str
    offset: int


@dataclass(frozen=True, slots=True)
class Match:
    """`prompt[start:stop]` occurs in every one of `sources` as a whole.

    sources: at least one and at most 8 segments, most recently added first; each once, at the
        first of its places.
    """

    start: int
    stop: int
    sources: tuple[Source, ...]

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class _Text:
    """One distinct content; `segments` maps each name that has it to its order of adding."""

    token_ids: TokenIds
    segments: dict[str, int]


class SegmentIndex:
    """Token ids of stored segments, searchable for shared runs. Safe to use from many threads.

    Knows no tenants: whoever serves several keeps an index for each.

    Args:
        window: tokens in a hashed window; shared runs of fewer tokens are never found.
        seed: of the hashes; drawn at random by default, so that nobody can prepare collisions.
            It does not affect what is found.

    Raises:
        ConfigError: `window` is below 1.
    """

    def __init__(self, window: int = 16, seed: int | None = None) -> None:
        self._table = WindowTable(window, secrets.randbits(_SEED_BITS) if seed is None else seed)
        self.window = window
        self._texts: dict[int, _Text] = {}
        self._ids: dict[int, TokenIds] = {}
        self._by_content: dict[bytes, int] = {}
        self._by_segment: dict[str, int] = {}
        self._clock = 0
        self._lock = threading.Lock()

    @property
    def guaranteed_length(self) -> int:
        """Length from which on every shared run is found (see the module docstring)."""
        return 2 * self.window - 1

    def __len__(self) -> int:
        return len(self._by_segment)

    def __contains__(self, segment_id: str) -> bool:
        return segment_id in self._by_segment

    def add(self, segment_id: str, token_ids: TokenSequence) -> None:
        """Index a segment. One of fewer than `window` tokens is kept, but never matches.

        Raises:
            InputError: the name is in use, or the ids are not a sequence of integers.
        """
        ids = as_token_ids(token_ids).copy()
        ids.flags.writeable = False
        content = ids.tobytes()
        with self._lock:
            if segment_id in self._by_segment:
                raise InputError(
                    f"segment {segment_id!r} is already indexed; remove it first, or choose "
                    "another name"
                )
            self._clock += 1
            number = self._by_content.get(content)
            if number is None:
                number = self._clock
                self._by_content[content] = number
                self._texts[number] = _Text(ids, {})
                self._ids[number] = ids
                self._table.add(number, ids)
            self._by_segment[segment_id] = number
            self._texts[number].segments[segment_id] = self._clock

    def remove(self, segment_id: str) -> bool:
        """Forget a segment; return whether it was indexed."""
        with self._lock:
            number = self._by_segment.pop(segment_id, None)
            if number is None:
                return False
            text = self._texts[number]
            del text.segments[segment_id]
            if not text.segments:
                self._table.remove(number, text.token_ids)
                del self._texts[number], self._ids[number]
                del self._by_content[text.token_ids.tobytes()]
            return True

    def match(self, token_ids: TokenSequence, min_length: int) -> list[Match]:
        """Shared runs of at least `min_length` tokens, not overlapping, by position.

        The longest run is taken first (the leftmost of equal ones); what it overlaps of shorter
        runs is cut off them. Time is linear in the prompt.

        Args:
            token_ids: the prompt, `[tokens]`.
            min_length: at least 1; below `guaranteed_length` short runs may be missed.

        Raises:
            ConfigError: `min_length` is below 1.
            InputError: the ids are not a sequence of integers.
        """
        if min_length < 1:
            raise ConfigError(f"min_length must be at least 1 token, got {min_length}")
        prompt = as_token_ids(token_ids)
        with self._lock:
            hits = list(self._table.look_up(prompt))
            if not hits:
                return []
            finder = RunFinder(prompt, self._ids, self.window, min_length)
            for position, bucket in hits:
                finder.visit(position, bucket)
            runs = tile(finder.runs, min_length)
            buckets = dict(hits)
            sizes = bucket_sizes(hits, prompt.shape[0] - self.window + 1)
            return [
                Match(run.start, run.stop, self._sources(prompt, run, buckets, sizes))
                for run in runs
            ]

    def _sources(
        self, prompt: TokenIds, run: Run, buckets: dict[int, Bucket], sizes: NDArray[np.int64]
    ) -> tuple[Source, ...]:
        """Segments that contain the whole run, newest first.

        Each of them has a stored window at one of any `window` neighbouring positions of the
        run, so the neighbourhood that the fewest texts share names them all.
        """
        first, last = run.start, run.stop - self.window + 1
        if last > first:
            first += rarest_block(sizes[first:last], self.window)
            last = min(last, first + self.window)
        places = {(run.text, run.offset)}
        for position in range(first, last):
            if len(places) > _MAX_PLACES:
                break
            for text, offset in candidates(buckets.get(position, {})):
                places.add((text, offset - (position - run.start)))
        wanted = prompt[run.start : run.stop]
        verified: dict[int, int] = {}
        ordered = sorted(places, key=lambda place: (-self._newest(place[0]), place[1]))
        for text, offset in ordered[:_MAX_COMPARED]:
            stored = self._ids[text][max(0, offset) : offset + len(run)]
            if text not in verified and offset >= 0 and np.array_equal(stored, wanted):
                verified[text] = offset
        verified.setdefault(run.text, run.offset)
        found = [
            (order, Source(name, offset))
            for text, offset in verified.items()
            for name, order in islice(reversed(self._texts[text].segments.items()), MAX_SOURCES)
        ]
        found.sort(key=lambda entry: entry[0], reverse=True)
        return tuple(source for _, source in found[:MAX_SOURCES])

    def _newest(self, text: int) -> int:
        return next(reversed(self._texts[text].segments.values()))

    def check_integrity(self) -> None:
        """Raises KvcmasError when the index contradicts itself."""
        with self._lock:
            names = {name: key for key, text in self._texts.items() for name in text.segments}
            contents = {text.token_ids.tobytes(): key for key, text in self._texts.items()}
            if names != self._by_segment or contents != self._by_content:
                raise KvcmasError("segment names, texts and contents of the index do not agree")
            if self._ids.keys() != self._texts.keys():
                raise KvcmasError("the index holds ids of texts that have no name")
            self._table.check_integrity(self._ids)
