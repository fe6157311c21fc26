"""KVCMAS as published: position-indexed deviations of earlier texts, as low-rank factors.

The first agent is exact. Every later one starts from the newest KV of the text, which is the
previous agent's, corrected or exact, and adds what stored texts deviated on the same hop, token
index by token index. So corrections chain along a workflow, and a full prefill ends a chain.

Source: "KVCMAS: Efficient KV cache Correction for Shared Context in Multi-Agent Systems",
https://arxiv.org/abs/2609.34060.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvcmas.core.model_info import ModelInfo
from kvcmas.methods.anchors.config import AnchorConfig
from kvcmas.methods.anchors.known import Known, Placeholder, Staged
from kvcmas.methods.anchors.method import AnchorMethod
from kvcmas.methods.anchors.states import Factored, State
from kvcmas.methods.description import MethodDescription
from kvcmas.methods.donors import Donor, Run
from kvcmas.methods.options import check_int
from kvcmas.methods.pinning import pin
from kvcmas.workflow.plan import Reuse
from kvcmas.workflow.prompt import Prompt


@dataclass(frozen=True)
class KvcmasAnchorsConfig(AnchorConfig):
    """Options of `kvcmas-anchors`; the others are those of `AnchorConfig`.

    gamma: published per task: GSM8K 0.32, MMLU 0.29, HumanEval 0.34, MathVista 0.5, Video-MME 0.6.
    rank: of the factors of keys and of values, in every layer.
    """

    gamma: float = 0.32
    rank: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("rank", self.rank, 1)


class KvcmasAnchors(AnchorMethod):
    """See the module docstring."""

    name: ClassVar[str] = "kvcmas-anchors"
    copies: ClassVar[bool] = True

    def __init__(self, info: ModelInfo, config: KvcmasAnchorsConfig | None = None) -> None:
        chosen = config or KvcmasAnchorsConfig()
        super().__init__(info, chosen)
        self._rank = chosen.rank

    def edge(self, donor: Donor, prompt: Prompt) -> str:
        """A hop: from the agent whose KV it is to the reader."""
        return f"{donor.info.agent}>{prompt.agent}"

    def set_base(self, prompt: Prompt, staged: Staged, placeholder: Placeholder, run: Donor) -> str:
        """The donor's KV, pinned."""
        if not pin(self.library, prompt, run.segment, []):
            return f"segment {run.segment} left the store after it was found"
        placeholder.source = self.library.kv(run.segment)
        placeholder.segment, placeholder.offset = run.segment, run.offset
        return ""

    def base_state(self, channels: Tensor) -> State:
        """Factors, like the deviations."""
        return Factored.of(channels, self.key_channels, self._rank)

    def delta_state(self, channels: Tensor) -> State:
        """Factors of keys and of values."""
        return Factored.of(channels, self.key_channels, self._rank)

    def more_spans(
        self, prompt: Prompt, known: Known, staged: Staged, fixed: list[Run], notes: list[str]
    ) -> list[Reuse]:
        """Text that the reader's own prompts repeat: moved, not corrected."""
        return [
            Reuse(run.start, run.stop, donor.segment, donor.offset)
            for run in fixed
            if pin(self.library, prompt, (donor := run.sources[0]).segment, notes)
        ]


DESCRIPTION = MethodDescription(
    name=KvcmasAnchors.name,
    summary="The estimator of the KVCMAS paper: deviations of stored texts as low-rank factors, "
    "weighted token by token and chained.",
    config=KvcmasAnchorsConfig,
    build=KvcmasAnchors,
    paper="KVCMAS: Efficient KV cache Correction for Shared Context in Multi-Agent Systems",
    link="https://arxiv.org/abs/2609.34060",
)
