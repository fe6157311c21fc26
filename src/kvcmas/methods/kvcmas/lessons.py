"""What a finished request leaves: runs to learn from, and ranges to keep as segments.

exact request         |  exact prefix  |        run        |      run      |
approximate request   |  exact prefix  | head |   reused   |     reused    |
learned from                           [------)                              heads of first runs
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcmas.methods.captures import Capture, Ranges, captures, exact_end
from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.config import KvcmasConfig
from kvcmas.methods.kvcmas.trust import learnable
from kvcmas.workflow.plan import Plan


@dataclass(frozen=True, slots=True)
class Lesson:
    """The reader's KV of a run is exact from the run's start to `stop`: it teaches its pair."""

    chosen: Chosen
    stop: int

    @property
    def start(self) -> int:
        """Where the run starts."""
        return self.chosen.run.start

    @property
    def whole(self) -> bool:
        """These are all the tokens that could have been reused, not the first ones alone."""
        return self.stop == self.chosen.run.stop


def lessons_of(
    plan: Plan, chosen: Iterable[Chosen], computed: Ranges, exact: bool, config: KvcmasConfig
) -> list[Lesson]:
    """The learnable runs, in the order of `chosen`, as far as they were computed exactly.

    Args:
        chosen: the request's runs with their donors.
        computed: positions that went through the model.
        exact: each of them attended to exact KV only.
    """
    end = exact_end(plan, computed)
    lessons = (
        Lesson(one, one.run.stop if exact else min(one.run.stop, end))
        for one in chosen
        if learnable(one, config)
    )
    return [lesson for lesson in lessons if lesson.stop > lesson.start]


def kept_of(
    plan: Plan, chosen: Iterable[Chosen], computed: Ranges, exact: bool, config: KvcmasConfig
) -> list[Capture]:
    """Ranges that become segments, in this order; with `copies` where the base is `previous`.

    With that base every reader's corrected KV is kept as well, for the next one.
    """
    kept = captures(plan, computed, exact, config.min_length)
    if config.base == "previous" and not exact:
        kept += [Capture(one.run.start, one.run.stop, False) for one in chosen if not one.donor.own]
    return kept
