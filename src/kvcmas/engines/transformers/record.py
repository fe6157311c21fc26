"""What an engine says about one request: plain data, JSON both ways."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from kvcmas.engines.record import SpanRecord

__all__ = ["RECORD_VERSION", "RequestRecord", "SpanRecord"]

RECORD_VERSION: Literal[1] = 1


class RequestRecord(BaseModel):
    """One request; lengths in tokens, times in seconds.

    computed: prompt tokens that went through the model, each counted once; of spans that were
        computed in part their share (see `SpanRecord.token_layers`).
    reused: prompt tokens that did not.
    generated: tokens sampled, the end token included.
    passes: forward passes of the prefill; one, unless a head did not agree.
    exact: every computed token attended only to exact KV.
    encoded: tokens that went through the model besides, in encodings of runs by themselves.
    notes: the plan's notes: why something was not reused.
    ttft_s: from the call to the first token sampled (to the end of the prefill when no token was
        asked for). It is the sum of
        match_s: the method's plan;
        correct_s: move, correction and scatter of reused KV, and the measurement of the heads;
        forward_s: the forward passes;
        encode_s: encodings that the method asked for before it planned (0 without any);
        other_s: all the rest (checks, buffers, sampling).
    decode_s: from the first token to the last.
    finish_s: the method's capture and learning behind the answer.
    total_s: all of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = RECORD_VERSION
    request_id: str
    agent: str
    method: str
    prompt: int
    computed: int
    reused: int
    generated: int
    passes: int
    exact: bool
    spans: tuple[SpanRecord, ...]
    notes: tuple[str, ...]
    ttft_s: float
    match_s: float
    correct_s: float
    forward_s: float
    other_s: float
    decode_s: float
    finish_s: float
    total_s: float
    encoded: int = 0
    encode_s: float = 0.0
