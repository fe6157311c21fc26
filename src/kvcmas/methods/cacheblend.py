"""CacheBlend: the tokens whose early KV deviates most are computed in all layers.

All tokens of a reused run go through the first layers. Those whose KV there differs most from the
reused KV tend to be those that differ most in all layers, and go on; the others keep their KV.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar

from kvcmas.core.model_info import ModelInfo
from kvcmas.errors import ConfigError
from kvcmas.methods.description import MethodDescription
from kvcmas.methods.donors import Donor, Run
from kvcmas.methods.fullshared import FullShared, FullSharedConfig
from kvcmas.methods.options import check_int
from kvcmas.workflow.partial import Selected
from kvcmas.workflow.plan import Reuse


@dataclass(frozen=True, slots=True)
class CacheBlendConfig(FullSharedConfig):
    """Options of `cacheblend`, next to those of `fullshared`.

    ratio: share of every run's tokens that is computed in all layers (arXiv 2405.16444: 0.15).
    layers: first layers, computed for all tokens; the last of them is compared. Layer 0 knows
        nothing of other tokens and cannot deviate, so it takes 2 (the authors' code compares
        layer 1 as well).
    """

    ratio: float = 0.15
    layers: int = 2

    def __post_init__(self) -> None:
        FullSharedConfig.__post_init__(self)
        check_int("layers", self.layers, 1)
        ratio = self.ratio
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise ConfigError(f"ratio must be a number from 0 to 1, got {ratio!r}")


class CacheBlend(FullShared):
    """Reuses the exact prefix and every stored run but for its most deviating tokens.

    The selection is made once, as in the authors' code; the paper's gradual filtering (a somewhat
    larger selection that shrinks layer by layer) is left out.

    Source: Yao et al., CacheBlend, https://arxiv.org/abs/2405.16444.

    Raises:
        ConfigError: more early layers than the model has.
    """

    name: ClassVar[str] = "cacheblend"

    def __init__(self, info: ModelInfo, config: CacheBlendConfig | None = None) -> None:
        config = config or CacheBlendConfig()
        if config.layers > info.layers:
            raise ConfigError(
                f"layers is {config.layers}, and the model has {info.layers}; take fewer"
            )
        self.ratio, self.layers = config.ratio, config.layers
        super().__init__(info, config)

    def span(self, run: Run, donor: Donor, notes: list[str]) -> Reuse:
        """The run with its most deviating tokens, unless its KV is the reader's own."""
        span = super().span(run, donor, notes)
        if donor.own:
            return span
        return replace(span, partial=Selected(self.layers, ceil(self.ratio * len(run))))


DESCRIPTION = MethodDescription(
    name=CacheBlend.name,
    summary="Of every reused run, the tokens that deviate most in an early layer are computed.",
    config=CacheBlendConfig,
    build=CacheBlend,
    paper="CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion",
    link="https://arxiv.org/abs/2405.16444",
)
