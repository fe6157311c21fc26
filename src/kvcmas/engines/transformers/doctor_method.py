"""The doctor's method: a prompt takes parts of its own exact KV back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from kvcmas.core.segment import SegmentKV
from kvcmas.methods.base import Method, Outcome
from kvcmas.workflow.plan import Compute, Plan, Reuse, Span
from kvcmas.workflow.prompt import Prompt

_SEGMENT = "own"


class OwnKV(Method):
    """Computes everything, or everything but two parts whose KV it was given.

    For one request at a time; nothing is kept behind a request.
    """

    name: ClassVar[str] = "doctor"

    def __init__(self) -> None:
        self._kv: SegmentKV | None = None

    @contextmanager
    def holding(self, kv: SegmentKV) -> Iterator[None]:
        """Inside the block, prompts of this very length and these tokens take from `kv`."""
        self._kv = kv
        try:
            yield
        finally:
            self._kv = None

    def plan(self, prompt: Prompt) -> Plan:
        """Of eight parts of the prompt, the first, the fifth and the last are computed."""
        length = len(prompt)
        if self._kv is None:
            return Plan.dense(length)
        cuts = (length // 8, length // 2, length * 5 // 8, length * 7 // 8)
        spans: tuple[Span, ...] = (
            Compute(0, cuts[0]),
            Reuse(cuts[0], cuts[1], _SEGMENT, cuts[0], exact=True),
            Compute(cuts[1], cuts[2]),
            Reuse(cuts[2], cuts[3], _SEGMENT, cuts[2], exact=True),
            Compute(cuts[3], length),
        )
        return Plan(length, spans)

    def fill(self, prompt: Prompt, span: Reuse, start: int, stop: int, out: SegmentKV) -> None:
        """Copy the KV as it is."""
        if self._kv is None:
            raise LookupError("fill was called without KV to take from")
        source = self._kv.slice(start, stop)
        out.keys.copy_(source.keys)
        out.values.copy_(source.values)

    def finish(self, prompt: Prompt, outcome: Outcome | None) -> None:
        """Nothing is kept."""
