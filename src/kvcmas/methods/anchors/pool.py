"""Anchors: texts that were computed exactly, with the deviations that their readers had."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcmas.methods.anchors.states import State, Stretch
from kvcmas.workflow.prompt import TokenIds

_OLDEST = 5  # of these the least used one leaves


@dataclass(frozen=True, slots=True, eq=False)
class Following:
    """The deviation of the text behind an anchor. token_ids: `[tokens]` int64."""

    token_ids: TokenIds
    delta: State


@dataclass(eq=False)
class Anchor:
    """One text.

    base: its KV from which deviations are taken, all layers.
    deltas: deviations by edge, all layers but the first (which does not deviate).
    following: deviations of the text behind it, by edge.
    used: how many predictions it has been a part of.
    """

    base: Stretch
    deltas: dict[str, Stretch] = field(default_factory=dict)
    following: dict[str, Following] = field(default_factory=dict)
    used: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all its states."""
        states = [self.base.state, *(delta.state for delta in self.deltas.values())]
        states += [text.delta for text in self.following.values()]
        return sum(state.nbytes for state in states)


class Pool:
    """Anchors of one tenant, oldest first.

    As published, an anchor leaves when there are already more than `size`, so that `size + 1`
    are held: the least used of the five oldest, of equals the oldest.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.anchors: tuple[Anchor, ...] = ()

    def __len__(self) -> int:
        return len(self.anchors)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(anchor.nbytes for anchor in self.anchors)

    def add(self, anchor: Anchor) -> Anchor | None:
        """Add an anchor; returns the one that left for it."""
        gone = None
        if len(self.anchors) > self.size:
            gone = min(self.anchors[:_OLDEST], key=lambda old: old.used)
        self.anchors = (*(old for old in self.anchors if old is not gone), anchor)
        return gone

    def reaching(self, stop: int) -> list[Anchor]:
        """Anchors whose text is at least that long."""
        return [anchor for anchor in self.anchors if anchor.base.stop >= stop]

    def of_edge(self, edge: str) -> list[Anchor]:
        """Anchors that know how this edge deviates."""
        return [anchor for anchor in self.anchors if edge in anchor.deltas]
