"""Any continuation of a prompt, judged on the KV that a finished request had.

Scoring on the engine that shares would be one more request to its method: it would match,
capture and learn, and change what later turns find. So the prompt's KV is copied as the request
leaves it, and the continuation runs on the copy, on an engine that knows nothing else:

    Recorder   the real method, and a copy of the KV of its last request
    Replay     hands that copy back; only the prompt's last token is computed again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers import TransformersEngine
from kvcmas.errors import PlanError
from kvcmas.methods.base import Method, Outcome
from kvcmas.workflow.plan import Compute, Plan, Reuse
from kvcmas.workflow.prompt import Prompt


class Recorder(Method):
    """Passes everything on to a method, and copies the KV of each request's prompt.

    Args:
        method: the method that decides.
        on_plan: told of each plan before it is executed.
    """

    name: ClassVar[str] = "recorder"

    def __init__(self, method: Method, on_plan: Callable[[Plan], None] | None = None) -> None:
        self.method = method
        self._on_plan = on_plan
        self._last: SegmentKV | None = None

    def plan(self, prompt: Prompt) -> Plan:
        plan = self.method.plan(prompt)
        if self._on_plan is not None:
            self._on_plan(plan)
        return plan

    def fill(self, prompt: Prompt, span: Reuse, start: int, stop: int, out: SegmentKV) -> None:
        self.method.fill(prompt, span, start, stop, out)

    def finish(self, prompt: Prompt, outcome: Outcome | None) -> None:
        self._last = None if outcome is None else outcome.kv.slice(0, len(prompt)).clone()
        self.method.finish(prompt, outcome)

    def take(self) -> SegmentKV:
        """KV of the last request's prompt, which is then forgotten here.

        Raises:
            PlanError: no request has finished since the last call.
        """
        if self._last is None:
            raise PlanError("no request has left its KV; run one before it is replayed")
        last, self._last = self._last, None
        return last


class Replay(Method):
    """Reuses given KV as it is, for one prompt.

    Args:
        kv: of the whole prompt, or of all but its last token.
    """

    name: ClassVar[str] = "replay"

    def __init__(self, kv: SegmentKV) -> None:
        self._kv = kv

    def plan(self, prompt: Prompt) -> Plan:
        last = len(prompt) - 1
        if last == 0:
            return Plan.dense(1)
        return Plan(len(prompt), (Reuse(0, last, "replay", 0), Compute(last, last + 1)))

    def fill(self, prompt: Prompt, span: Reuse, start: int, stop: int, out: SegmentKV) -> None:
        source = self._kv.slice(start, stop)
        out.keys.copy_(source.keys)
        out.values.copy_(source.values)

    def finish(self, prompt: Prompt, outcome: Outcome | None) -> None:
        """Nothing is learned."""


def replay(
    model: PreTrainedModel, prompt: Prompt, kv: SegmentKV, continuation: Sequence[int]
) -> Tensor:
    """Logits for a continuation behind a prompt with this KV, `[continuation, vocab]` float32.

    Raises:
        InputError: `kv` is shorter than the prompt without its last token.
    """
    return TransformersEngine(model, None, Replay(kv)).score(prompt, continuation).logits
