"""What the fidelity benchmark measures: plain data, JSON both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvcmas.engines.transformers import RequestRecord

RECORD_VERSION: Literal[1] = 1


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(_Model):
    """One reader's request under one arm, beside the exact run.

    kl: mean over the answer's tokens of KL(exact || arm), nats.
    top1: share of these tokens for which both runs rank the same token first.
    tokens: of the exact run's answer.
    shared: tokens of the context that the prompt shares with the first agent's.
    shared_computed: those of them that went through the model, and what the method had encoded by
    itself (so that it may exceed `shared`).
    exact_ttft_s: of the exact run of the same prompt. plain_ttft_s: of a plain prompt of as many
    tokens as were computed, where that was measured.
    """

    arm: str
    context: str
    agent: str
    tokens: int
    kl: float
    top1: float
    shared: int
    shared_computed: int
    exact_ttft_s: float
    plain_ttft_s: float | None = None
    record: RequestRecord


class ArmResult(_Model):
    """An arm over all its readers.

    kl, top1: means over requests. computed_share: of the shared tokens, over all requests.
    ttft_s: median. ttft_ratio: median TTFT over the exact runs' median.
    overhead_share: median share of the TTFT for match, move, correction and scatter;
    other_share: for checks, buffers and sampling.
    kl_ratio: the arm's KL over the baseline's on the same requests, with the bootstrap 95%
    interval over contexts; `None` without a baseline.
    """

    label: str
    method: str
    options: Mapping[str, Any]
    readers: tuple[str, ...]
    requests: int
    kl: float
    top1: float
    computed_share: float
    ttft_s: float
    ttft_ratio: float
    overhead_share: float
    other_share: float
    kl_ratio: float | None = None
    kl_ratio_interval: tuple[float, float] | None = None


class Learned(_Model):
    """The learning phase. `tokens`: prompt tokens of all agents. `pairs`: held by a teacher."""

    contexts: int
    tokens: int
    seconds: float
    pairs: tuple[str, ...] = ()


class FidelityResult(_Model):
    """One run. baseline: the label that KL ratios refer to, or empty."""

    version: Literal[1] = RECORD_VERSION
    environment: Mapping[str, Any]
    model: Mapping[str, Any]
    learn: int
    test: int
    tokens: int
    roles: tuple[str, ...]
    baseline: str
    learned: Learned
    arms: tuple[ArmResult, ...]
    rows: tuple[Row, ...]
    total_s: float
