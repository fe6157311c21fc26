"""What the demo found, as plain data: JSON both ways."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from kvcmas.engines.runner import head_tokens, landmark_tokens
from kvcmas.engines.transformers import RequestRecord

DEMO_VERSION: Literal[1] = 1


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DemoTurn(_Model):
    """One agent's turn, with sharing and without.

    text: the sharing run's answer; the conversation goes on with it.
    exact_text: what the exact run answered to the same prompt.
    sharing, nonshared: what the two requests computed and how long they took.
    compared: tokens of the exact answer; same: those for which the sharing run, behind the same
        words, picks the same token; kl: its mean divergence over them, in nats.
    """

    round: int
    agent: str
    text: str
    exact_text: str
    sharing: RequestRecord
    nonshared: RequestRecord
    compared: int
    same: int
    kl: float


class Sums(_Model):
    """Sums over turns, lengths in tokens; times in seconds are medians, which noise moves less.

    prompt: all prompt tokens = computed + reused + prefix.
    computed: went through the model, heads of reused spans included.
    reused: taken from another prompt's KV, moved and perhaps corrected.
    prefix: taken, exact, from the agent's own earlier prompt, as every engine does.
    head, landmarks: computed tokens at the front of reused spans, and single ones inside them.
    exact_turns: turns in which nothing approximate was used.
    kl: mean over the compared tokens, in nats.
    """

    turns: int = 0
    prompt: int = 0
    computed: int = 0
    reused: int = 0
    prefix: int = 0
    head: int = 0
    landmarks: int = 0
    exact_turns: int = 0
    ttft_s: float = 0.0
    nonshared_computed: int = 0
    nonshared_ttft_s: float = 0.0
    compared: int = 0
    same: int = 0
    kl: float = 0.0

    @classmethod
    def of(cls, turns: Sequence[DemoTurn]) -> Self:
        """Add up turns."""
        compared = sum(turn.compared for turn in turns)
        return cls(
            turns=len(turns),
            prompt=sum(turn.sharing.prompt for turn in turns),
            computed=sum(turn.sharing.computed for turn in turns),
            reused=sum(reused_tokens(turn.sharing) for turn in turns),
            prefix=sum(prefix_tokens(turn.sharing) for turn in turns),
            head=sum(head_tokens(turn.sharing) for turn in turns),
            landmarks=sum(landmark_tokens(turn.sharing) for turn in turns),
            exact_turns=sum(turn.sharing.exact for turn in turns),
            ttft_s=_median([turn.sharing.ttft_s for turn in turns]),
            nonshared_computed=sum(turn.nonshared.computed for turn in turns),
            nonshared_ttft_s=_median([turn.nonshared.ttft_s for turn in turns]),
            compared=compared,
            same=sum(turn.same for turn in turns),
            kl=sum(turn.kl * turn.compared for turn in turns) / compared if compared else 0.0,
        )

    @property
    def ttft_ratio(self) -> float:
        """Median TTFT with sharing over that without; NaN without turns."""
        return self.ttft_s / self.nonshared_ttft_s if self.nonshared_ttft_s else float("nan")


class AgentSums(Sums):
    """The sums of one agent."""

    agent: str

    @classmethod
    def of_agent(cls, agent: str, turns: Sequence[DemoTurn]) -> AgentSums:
        """Add up the turns of `agent`."""
        own = Sums.of([turn for turn in turns if turn.agent == agent])
        return cls(agent=agent, **own.model_dump())


class Learning(_Model):
    """The exact reading of earlier texts.

    tokens: prompt tokens of all agents. seconds: all of it; finish_s: the part of it in which the
        method captured and learned.
    """

    texts: int
    requests: int
    tokens: int
    seconds: float
    finish_s: float


class DemoResult(_Model):
    """One run of the demo.

    agents: in the order in which they speak.
    readers: the sums of all agents but the first one.
    summary: the run in one line; verdict: what is to be said plainly, empty if nothing is.
    """

    version: Literal[1] = DEMO_VERSION
    kvcmas: str
    torch: str
    threads: int
    model: str
    fingerprint: str
    method: str
    options: dict[str, Any]
    rounds: int
    max_tokens: int
    learning: Learning
    turns: tuple[DemoTurn, ...]
    agents: tuple[AgentSums, ...]
    readers: Sums
    summary: str
    verdict: str
    total_s: float
    notes: tuple[str, ...] = ()


def prefix_tokens(record: RequestRecord) -> int:
    """Tokens taken, exact, from the agent's own earlier prompt."""
    return sum(span.reused for span in record.spans if span.exact)


def reused_tokens(record: RequestRecord) -> int:
    """Tokens taken from another prompt's KV."""
    return sum(span.reused for span in record.spans if not span.exact)


def _median(seconds: Sequence[float]) -> float:
    return median(seconds) if seconds else 0.0
