"""What the scheduler side keeps of each request, from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvcmas.engines.vllm.hints import Hints
from kvcmas.engines.vllm.messages import Source
from kvcmas.engines.vllm.progress import Progress, Step
from kvcmas.methods.kvcmas.planner import Planned
from kvcmas.workflow.plan import Reuse
from kvcmas.workflow.prompt import Prompt


@dataclass(slots=True, eq=False)
class Tracked:
    """One request.

    refused: why nothing is reused, `None` when it may be.
    keeps_nothing: its KV does not become a donor.
    planned: the plan as made, and every run with its donor; `None` before it is made.
    progress: how far the plan is; `None` where nothing is reused, and vLLM does it all.
    sources: by start of a reused span, where its KV comes from and what is added.
    allowance: tokens and rows that the request may use beside its own row in this step.
    pending: the step that is about to be scheduled; back: where a running request stood before.
    blocked: it waits for the measurement of a head.
    ahead: its tail may be computed in the same step as its heads; again: it was, and taken back.
    holding: its blocks hold something of its plan.
    cached: tokens that vLLM's own prefix cache holds.
    variant: its blocks have a hash chain of their own; first: its first approximate position.
    captured, taught: the prompt became a donor, and was learned from.
    """

    request: Any
    prompt: Prompt
    hints: Hints
    refused: str | None
    keeps_nothing: bool = False
    planned: Planned | None = None
    progress: Progress | None = None
    sources: dict[int, Source] = field(default_factory=dict)
    allowance: tuple[int, int] = (0, 0)
    pending: Step | None = None
    back: int | None = None
    blocked: bool = False
    ahead: bool = False
    again: bool = False
    holding: bool = False
    cached: int = 0
    variant: bool = False
    first: int = 0
    captured: bool = False
    taught: bool = False
    waiting_since: float | None = None
    waited_s: float = 0.0
    steps: int = 0
    match_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    def source(self, span: Reuse, start: int, stop: int) -> Source:
        """Donor KV for positions of a reused span."""
        return self.sources[span.start].part(start, stop)
