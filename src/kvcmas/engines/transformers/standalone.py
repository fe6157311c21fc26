"""Runs of tokens encoded by themselves, for methods that ask for them (`methods.encoding`)."""

from __future__ import annotations

import torch

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers.cancel import Cancellation
from kvcmas.engines.transformers.clock import Clock
from kvcmas.engines.transformers.forward import ModelRunner
from kvcmas.engines.transformers.state import RequestState
from kvcmas.methods.base import Method
from kvcmas.methods.encoding import WantsEncodings
from kvcmas.workflow.prompt import Prompt, TokenIds


def encode_wanted(
    runner: ModelRunner, method: Method, prompt: Prompt, clock: Clock, cancel: Cancellation
) -> int:
    """Encode what a method wants before it plans a prompt; returns the number of tokens.

    Methods that want nothing cost nothing. The time is a lap of its own, `encode`.

    Raises:
        CancelledError: the request was cancelled between two encodings.
    """
    if not isinstance(method, WantsEncodings):
        return 0
    tokens = 0
    with clock.lap("encode"):
        while wanted := method.wants(prompt):
            for ids in wanted:
                cancel.check()
                method.encoded(prompt, ids, encode_alone(runner, ids))
                tokens += len(ids)
    return tokens


def encode_alone(runner: ModelRunner, token_ids: TokenIds) -> SegmentKV:
    """KV of tokens without anything before them, the first one at position 0."""
    state = RequestState(runner, Prompt(token_ids, "", ""), 0)
    state.compute(torch.arange(len(token_ids)))
    return state.segment(0, len(token_ids))
