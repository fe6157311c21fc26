"""What engines answer, and how far two answers are apart. Plain data, no vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from typing import Any

LogProbs = Mapping[int, float]
"""Natural log-probabilities by token id, of a position's most likely tokens."""

_LEAST = 1e-12  # of the probability of all other tokens together


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: generated. logprobs: of each of their positions. cached, computed, reused: tokens.

    cached: as vLLM tells its clients, so that reused tokens are in it; computed and reused are
    of kvcmas's record, and `None` without one. preemptions: how often it lost its blocks.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[LogProbs, ...] = ()
    cached: int = 0
    computed: int | None = None
    reused: int | None = None
    preemptions: int = 0

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "tokens": list(self.tokens),
            "logprobs": [{str(key): value for key, value in row.items()} for row in self.logprobs],
            "cached": self.cached,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Answer:
        """What `to_json` gave."""
        rows = tuple({int(key): value for key, value in row.items()} for row in data["logprobs"])
        return cls(tuple(data["tokens"]), rows, data["cached"])


def largest_difference(one: Answer, other: Answer) -> float:
    """Largest difference of log-probabilities over the tokens that both list.

    Infinite where the answers differ in a token, or list none in common: what follows cannot be
    compared then.
    """
    if one.tokens != other.tokens or len(one.logprobs) != len(other.logprobs):
        return inf
    return max(map(_row_difference, one.logprobs, other.logprobs), default=0.0)


def _row_difference(one: LogProbs, other: LogProbs) -> float:
    common = one.keys() & other.keys()
    return max((abs(one[token] - other[token]) for token in common), default=inf)


def top_kl(exact: LogProbs, approx: LogProbs, most: int) -> float:
    """KL(exact || approx) in nats over buckets: the exact run's `most` likeliest tokens, and the
    rest together.

    Tokens that `approx` does not list count to the rest. Never more than the whole KL.
    """
    ranked = sorted(exact, key=lambda token: (-exact[token], token))[:most]
    named = [token for token in ranked if token in approx]
    total = sum(exp(exact[token]) * (exact[token] - approx[token]) for token in named)
    rest, other = (
        max(_LEAST, 1 - sum(exp(row[token]) for token in named)) for row in (exact, approx)
    )
    return total + rest * log(rest / other)


def top_one(row: LogProbs) -> int:
    """The likeliest token; of equal ones the first."""
    return min(row, key=lambda token: (-row[token], token))


def mean_kl(exact: Sequence[LogProbs], approx: Sequence[LogProbs], most: int) -> float:
    """Mean of `top_kl` over positions."""
    values = [top_kl(one, other, most) for one, other in zip(exact, approx, strict=True)]
    return sum(values) / len(values)


def top_one_share(exact: Iterable[LogProbs], approx: Iterable[LogProbs]) -> float:
    """Share of positions at which both rank the same token first."""
    same = [top_one(one) == top_one(other) for one, other in zip(exact, approx, strict=True)]
    return sum(same) / len(same)
