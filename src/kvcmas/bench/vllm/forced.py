"""Have vLLM generate given tokens: its raw log-probabilities are those behind these tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

FORCED = "kvcmas_bench_forced"
"""Key of the tokens in `extra_args`."""


class ForcedTokens(AdapterLogitsProcessor):  # type: ignore[misc]
    """A request that names tokens generates them, one behind the other."""

    def is_argmax_invariant(self) -> bool:
        """False: it decides what is sampled."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], Tensor], Tensor] | None:
        """One for a request that names tokens."""
        tokens = (params.extra_args or {}).get(FORCED)
        return None if tokens is None else _forcing(tuple(tokens))


def _forcing(tokens: Sequence[int]) -> Callable[[list[int], Tensor], Tensor]:
    def force(generated: list[int], logits: Tensor) -> Tensor:
        if len(generated) < len(tokens):
            wanted = tokens[len(generated)]
            kept = logits[wanted].clone()
            logits.fill_(-torch.inf)
            logits[wanted] = kept
        return logits

    return force
