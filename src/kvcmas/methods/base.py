"""The contract between methods and engines.

A method decides what each token of a prompt does (`plan`), supplies the KV of reused spans
(`fill`) and learns from what the engine computed (`finish`). An engine executes plans. For one
request an engine calls, in this order:

    plan(prompt)              once; the plan's donors stay pinned until `finish`
    fill(...)                 any number of times, for any part of the plan's reused spans
    finish(prompt, outcome)   exactly once, also after an error or a cancellation

All three may be called from several threads for different requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from kvcmas.core.segment import SegmentKV
from kvcmas.workflow.plan import Plan, Reuse
from kvcmas.workflow.prompt import Prompt


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an engine did with a plan.

    kv: KV of the prompt and of what was generated (the last sampled token has none). Views on
        the engine's buffers: a method copies what it keeps.
    computed: sorted, disjoint ranges `[start, stop)` of positions that went through the model.
    exact: true when every computed token attended only to exact KV, so that what was computed
        is what a full prefill would have computed.
    """

    kv: SegmentKV
    computed: tuple[tuple[int, int], ...]
    exact: bool


class Method(ABC):
    """Decides what to reuse; see the module docstring for the order of calls."""

    name: ClassVar[str]

    @abstractmethod
    def plan(self, prompt: Prompt) -> Plan:
        """Return a plan that covers the prompt. Cheap: linear in the prompt, no model call."""

    @abstractmethod
    def fill(self, prompt: Prompt, span: Reuse, start: int, stop: int, out: SegmentKV) -> None:
        """Write the KV of positions `[start, stop)` of `span`, moved and corrected.

        out: `stop - start` tokens of the engine's buffers; `out.keys` and `out.values` are
            written in place, `out.token_ids` and `out.positions` already hold the prompt's.

        Raises:
            PlanError: the span names a segment that this method does not hold.
        """

    @abstractmethod
    def finish(self, prompt: Prompt, outcome: Outcome | None) -> None:
        """Release the plan's donors; with an outcome, also capture and learn from it.

        `None` means that the request failed or was cancelled: nothing of it becomes visible.
        """
