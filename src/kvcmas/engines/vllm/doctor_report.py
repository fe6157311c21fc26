"""What the doctor found in a vLLM engine, as plain data."""

from __future__ import annotations

from math import isfinite
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

REPORT_VERSION: Literal[1] = 1

Verdict = Literal["supported", "unsupported", "wrong"]
CheckName = Literal[
    "scheduler",
    "self-test",
    "KV layout",
    "one hole",
    "three holes",
    "wrong donor",
    "plain again",
]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class VllmCheck(_Model):
    """One thing that kvcmas relies on in vLLM.

    name: what is examined
        scheduler: vLLM's scheduler is the one that kvcmas extends;
        self-test: it executes a plan with holes, position by position;
        KV layout: KV that is written to the engine's blocks is read back the same;
        one hole, three holes: a prompt that takes parts of its own KV back, against the plain one;
        wrong donor: the same with KV of another text, which must show;
        plain again: the plain prompt behind all that, against the plain one before.
    error: largest difference of a log-probability (of a number, for the layout); `None` where
        there is nothing to measure, and where it is no finite number.
    tolerance: most (for the wrong donor: least) that is right; `None` where nothing is measured.
    detail: in words, what else is to be known.
    """

    name: CheckName
    passed: bool
    error: float | None = None
    tolerance: float | None = None
    detail: str = ""

    @classmethod
    def of(
        cls,
        name: CheckName,
        error: float,
        tolerance: float,
        detail: str = "",
        *,
        shows: bool = False,
    ) -> Self:
        """Judge an error. shows: it has to be larger than the tolerance."""
        return cls(
            name=name,
            passed=error > tolerance if shows else error <= tolerance,
            error=error if isfinite(error) else None,
            tolerance=tolerance,
            detail=detail,
        )

    def sentence(self) -> str:
        """The check in words."""
        parts = [self.detail] if self.detail else []
        if self.tolerance is not None:
            error = "not a finite number" if self.error is None else f"{self.error:.1e}"
            parts.insert(0, f"error {error} (tolerance {self.tolerance:.0e})")
        return f"{self.name}: {'; '.join(parts) or ('ok' if self.passed else 'failed')}"


class VllmReport(_Model):
    """Whether kvcmas works in this vLLM with this model, and how well.

    verdict: `"supported"`; `"unsupported"`, for the given `reasons`; or `"wrong"`: a check failed.
    vllm, torch, kvcmas: versions. tested: the project's tests were run with this vLLM.
    ranks: workers of the engine; layers, kv_heads, head_dim: of one of them.
    cache_tokens: tokens that vLLM's KV cache has room for.
    donor_bytes: most bytes of donors beside the cache; free_bytes: what is free there, if known.
    noise: difference of log-probabilities that vLLM alone shows, with and without its prefix cache.
    notes: what the checks leave open, and what is unusual, in words.
    """

    version: Literal[1] = REPORT_VERSION
    model: str
    verdict: Verdict
    vllm: str = ""
    torch: str = ""
    kvcmas: str = ""
    tested: bool = False
    architecture: str = ""
    model_type: str = ""
    dtype: str = ""
    device: str = ""
    scheduler: str = ""
    ranks: int = 1
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    block_size: int = 0
    window: int = 0
    cache_tokens: int = 0
    donor_bytes: int = 0
    free_bytes: int | None = None
    noise: float | None = None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    checks: tuple[VllmCheck, ...] = ()

    @property
    def failed(self) -> tuple[VllmCheck, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)
