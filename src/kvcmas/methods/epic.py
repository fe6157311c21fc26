"""EPIC: the first tokens of every reused chunk are computed (LegoLink).

The first tokens of a chunk that was computed on its own draw attention as the first tokens of a
prompt do; computed anew behind the reader's own text, they no longer do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvcmas.core.model_info import ModelInfo
from kvcmas.methods.description import MethodDescription
from kvcmas.methods.donors import Donor, Run
from kvcmas.methods.fullshared import FullShared, FullSharedConfig
from kvcmas.methods.options import check_int
from kvcmas.workflow.plan import Head, Reuse


@dataclass(frozen=True, slots=True)
class EpicConfig(FullSharedConfig):
    """Options of `epic`, next to those of `fullshared`.

    k: tokens computed at the front of every reused run (LegoLink-k of arXiv 2410.15332, which
        takes 2 to 32; its latency figures are for 16).
    """

    k: int = 16

    def __post_init__(self) -> None:
        FullSharedConfig.__post_init__(self)
        check_int("k", self.k, 0)


class Epic(FullShared):
    """Reuses the exact prefix and every stored run behind its first `k` tokens.

    Source: Hu et al., EPIC, https://arxiv.org/abs/2410.15332.
    """

    name: ClassVar[str] = "epic"

    def __init__(self, info: ModelInfo, config: EpicConfig | None = None) -> None:
        self.k = (config or EpicConfig()).k
        super().__init__(info, config or EpicConfig())

    def span(self, run: Run, donor: Donor, notes: list[str]) -> Reuse:
        """The run with a head of `k` tokens, unless its KV is the reader's own."""
        span = super().span(run, donor, notes)
        return span if donor.own else replace(span, head=Head(min(self.k, len(run))))


DESCRIPTION = MethodDescription(
    name=Epic.name,
    summary="The first tokens of every reused run are computed; the rest is taken as it is.",
    config=EpicConfig,
    build=Epic,
    paper="EPIC: Efficient Position-Independent Caching for Serving Large Language Models",
    link="https://arxiv.org/abs/2410.15332",
)
