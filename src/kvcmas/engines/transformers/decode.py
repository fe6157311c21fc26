"""Token by token behind the prefill."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from kvcmas.engines.transformers.cancel import Cancellation
from kvcmas.engines.transformers.request import Request
from kvcmas.engines.transformers.results import FinishReason
from kvcmas.engines.transformers.sampling import Sampler, SamplingParams
from kvcmas.engines.transformers.text import TextStream


@dataclass(frozen=True, slots=True)
class Answer:
    """Sampled tokens, and why there are no more."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason


def decode(
    request: Request,
    params: SamplingParams,
    text: TextStream,
    eos_ids: frozenset[int],
    cancel: Cancellation,
) -> Generator[tuple[int, str], None, Answer]:
    """Yield each token with the text that became certain with it.

    Raises:
        CancelledError: the request was cancelled between two tokens.
    """
    if params.max_tokens == 0:
        return Answer((), "length")
    state, logits = request.state, request.prefill.logits
    sampler = Sampler(params, logits.device)
    token_ids: list[int] = []
    while True:
        cancel.check()
        token = sampler(state.token_ids[: state.filled], logits)
        token_ids.append(token)
        request.generated = len(token_ids)
        request.answer_s = request.clock.elapsed()
        if request.generated == 1:
            request.ttft_s = request.answer_s
        reason: FinishReason | None = None
        piece = ""
        if token in eos_ids and not params.ignore_eos:
            reason = "eos"
        else:
            piece = text.push(token)
            if text.stopped:
                reason = "stop"
            elif request.generated == params.max_tokens:
                reason = "length"
        if reason is not None:
            piece += text.end()
            # Text that was held back may complete a stop string only now.
            reason = "stop" if text.stopped else reason
            yield token, piece
            return Answer(tuple(token_ids), reason)
        yield token, piece
        logits = state.append(torch.tensor([token]))[0]
