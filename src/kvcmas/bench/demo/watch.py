"""What a view of the demo is told, in this order for each turn:

TurnStarted, planned, TokenGenerated ..., turn        (of the sharing run)
comparing                                             (when the exact run begins)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from kvcmas.bench.demo.results import DemoTurn, Learning
from kvcmas.engines.runner import Event
from kvcmas.workflow.plan import Plan


class Watcher(AbstractContextManager["Watcher"], Protocol):
    """A view; entered before the first event. Its methods return at once: they are timed too."""

    def status(self, text: str) -> None:
        """Something that takes time begins."""

    def learning(self, text: int, texts: int, agent: str, tokens: int) -> None:
        """`agent` reads earlier text number `text` (from 1) in a prompt of `tokens` tokens."""

    def learned(self, learning: Learning) -> None:
        """All earlier texts are read."""

    def event(self, event: Event) -> None:
        """The workflow runner's own events."""

    def planned(self, plan: Plan) -> None:
        """What the prompt of the current turn will compute and reuse."""

    def comparing(self) -> None:
        """The current turn's prompt goes to the exact run."""

    def turn(self, turn: DemoTurn) -> None:
        """Both runs of a turn are done and compared."""
