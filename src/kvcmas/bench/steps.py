"""How long work tells what it is doing."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str, int, int], None]
"""Called as `report(phase, done, total)`; a phase begins with `done == 0`."""


def silent(phase: str, done: int, total: int) -> None:
    """Tells nobody."""
