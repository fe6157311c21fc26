"""The indexes of one tenant: where the tokens of its segments are found."""

from __future__ import annotations

from kvcmas.errors import KvcmasError
from kvcmas.workflow.matching import Match, SegmentIndex, Source
from kvcmas.workflow.prefix_index import PrefixIndex
from kvcmas.workflow.prompt import TokenIds

_WINDOW = 16


class Shelf:
    """Names of segments by their tokens: from position 0, and at any offset.

    Args:
        min_length: shortest run that is to be found.
        runs: also find runs at any offset; otherwise beginnings only.
    """

    def __init__(self, min_length: int, runs: bool) -> None:
        self.names: set[str] = set()
        self.prefixes = PrefixIndex()
        self._min_length = min_length
        # Runs of `2 * window - 1` tokens are found for certain.
        window = min(_WINDOW, (min_length + 1) // 2)
        self._segments = SegmentIndex(window) if runs else None

    def __len__(self) -> int:
        return len(self.names)

    def add(self, name: str, token_ids: TokenIds, is_prefix: bool) -> None:
        """Make a segment findable."""
        self.names.add(name)
        if is_prefix:
            self.prefixes.add(name, token_ids)
        if self._segments is not None:
            self._segments.add(name, token_ids)

    def remove(self, name: str) -> None:
        """Forget a segment."""
        self.names.discard(name)
        self.prefixes.remove(name)
        if self._segments is not None:
            self._segments.remove(name)

    def runs(self, token_ids: TokenIds) -> list[Match]:
        """Runs shared with stored segments, by position."""
        if self._segments is None or token_ids.shape[0] < self._min_length:
            return []
        return self._segments.match(token_ids, self._min_length)

    def holders(self, token_ids: TokenIds) -> tuple[str, ...]:
        """Segments that contain all of these tokens in a row."""
        return tuple(source.segment for source in self.sources(token_ids))

    def sources(self, token_ids: TokenIds) -> tuple[Source, ...]:
        """The same, and where in them."""
        length = token_ids.shape[0]
        if self._segments is None or length == 0:
            return ()
        matches = self._segments.match(token_ids, length)
        return tuple(source for match in matches for source in match.sources)

    def check_integrity(self) -> None:
        """Raises KvcmasError when the indexes contradict each other."""
        self.prefixes.check_integrity()
        indexed = len(self.prefixes)
        if self._segments is not None:
            self._segments.check_integrity()
            indexed = len(self._segments)
            if any(name not in self._segments for name in self.names):
                raise KvcmasError("a segment of the shelf is missing from its index")
        if indexed != len(self.names):
            raise KvcmasError(f"the shelf names {len(self.names)} segments, {indexed} are indexed")
