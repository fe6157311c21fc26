"""What the engine hands back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers.record import RequestRecord

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True)
class Result:
    """An answer.

    token_ids: all sampled tokens; the end token is the last one when `finish_reason` is `"eos"`.
    text: their text without special tokens, cut before a stop string.
    finish_reason: an end token, a stop string, or `max_tokens` reached.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    record: RequestRecord


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """A prompt, and a continuation that was given rather than sampled.

    logits: `[continuation tokens, vocab]` float32; row `i` predicts continuation token `i`, so
        row 0 follows the prompt. One row for an empty continuation.
    kv: KV of the prompt and of the continuation but for its last token, on buffers that nothing
        else uses.
    """

    logits: Tensor
    kv: SegmentKV
    record: RequestRecord
