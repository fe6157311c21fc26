"""How the next token is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvcmas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What to generate.

    max_tokens: most tokens to generate. 0 prefills the prompt and lets the method capture it,
        and generates nothing: it warms the store.
    temperature: 0 is greedy; above, tokens are sampled.
    top_p: sample from the smallest set of tokens that holds this much probability.
    top_k: sample from this many tokens; 0 is no limit.
    seed: makes sampling repeatable; `None` takes a random one.
    stop: generation ends as soon as the text holds one of these; the text ends before it.
    ignore_eos: go on behind the model's end tokens.

    A model's generation config gives its end tokens and nothing else.

    Raises:
        ConfigError: a value is out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise ConfigError(f"stop must be a tuple of strings, got the string {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))
        if self.max_tokens < 0:
            raise ConfigError(f"max_tokens must be >= 0, got {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be >= 0 and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be >= 0 (0 is no limit), got {self.top_k}")
        if "" in self.stop:
            raise ConfigError("a stop string must not be empty; leave it out")


class Sampler:
    """Chooses the tokens of one request.

    Args:
        params: how to choose.
        device: where the logits are.
    """

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self._warpers = LogitsProcessorList()
        self._generator: torch.Generator | None = None
        if params.temperature == 0:
            return
        if params.temperature != 1:
            self._warpers.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_k:
            self._warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            self._warpers.append(TopPLogitsWarper(params.top_p))
        self._generator = torch.Generator(device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def __call__(self, token_ids: Tensor, logits: Tensor) -> int:
        """The next token.

        Args:
            token_ids: `[tokens]` int64, all tokens so far.
            logits: `[vocab]` float32.
        """
        if self._generator is None:
            return int(logits.argmax())
        # The warpers are annotated with legacy tensor types.
        scores: Tensor = self._warpers(
            cast(torch.LongTensor, token_ids[None]), cast(torch.FloatTensor, logits[None])
        )
        probabilities = scores.softmax(dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))
