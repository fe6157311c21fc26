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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from kvcmas.core.segment import SegmentKV
from kvcmas.errors import PlanError
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
    hidden: for each of the method's `boundaries` the hidden states that entered that layer,
        `[prompt tokens, width]`; only the computed positions hold any.
    """

    kv: SegmentKV
    computed: tuple[tuple[int, int], ...]
    exact: bool
    hidden: Mapping[int, Tensor] = field(default_factory=dict)


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

    @property
    def boundaries(self) -> frozenset[int]:
        """Layers whose input the engine records for `finish`; none, unless a method says so."""
        return frozenset()

    def fill_hidden(self, prompt: Prompt, span: Reuse, out: Tensor) -> None:
        """Write the hidden states that enter the first computed layer of a partial span.

        Called only for spans with `Layers(start, stop)` and `start > 0`.

        out: `[len(span), width]`, of the model's dtype, written in place.

        Raises:
            PlanError: the method holds no hidden states.
        """
        raise PlanError(
            f"method {self.name!r} holds no hidden states, and its plan wants them for "
            f"[{span.start}, {span.stop}); let the computed layers begin at 0"
        )

    @abstractmethod
    def finish(self, prompt: Prompt, outcome: Outcome | None) -> None:
        """Release the plan's donors; with an outcome, also capture and learn from it.

        `None` means that the request failed or was cancelled: nothing of it becomes visible.
        """
