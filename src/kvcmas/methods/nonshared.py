"""Prefill without sharing: only an exact prefix is reused, as every serving engine does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcmas.core.model_info import ModelInfo
from kvcmas.methods.description import MethodDescription
from kvcmas.methods.donors import Found
from kvcmas.methods.kv_library import KVLibrary
from kvcmas.methods.library_method import LibraryMethod
from kvcmas.methods.options import check_int
from kvcmas.methods.pinning import reuse_prefix
from kvcmas.workflow.plan import Reuse
from kvcmas.workflow.prompt import Prompt


@dataclass(frozen=True, slots=True)
class NonSharedConfig:
    """Options of `nonshared`.

    budget_bytes: most bytes of KV that are kept.
    min_prefix: shortest prefix in tokens that is kept and reused.
    """

    budget_bytes: int = 2 << 30
    min_prefix: int = 16

    def __post_init__(self) -> None:
        check_int("budget_bytes", self.budget_bytes, 0)
        check_int("min_prefix", self.min_prefix, 1)


class NonShared(LibraryMethod):
    """Keeps the KV of prompts with their answers, and reuses the longest exact beginning.

    What it serves is what a full prefill gives. The baseline that sharing is compared with.
    """

    name: ClassVar[str] = "nonshared"

    def __init__(self, info: ModelInfo, config: NonSharedConfig | None = None) -> None:
        self.config = config or NonSharedConfig()
        least = self.config.min_prefix
        super().__init__(
            KVLibrary(info, self.config.budget_bytes, least, min_prefix=least, runs=False)
        )

    def reuse(self, prompt: Prompt, found: Found) -> tuple[list[Reuse], list[str]]:
        """The prefix alone."""
        notes: list[str] = []
        return reuse_prefix(self.library, prompt, found, notes), notes


DESCRIPTION = MethodDescription(
    name=NonShared.name,
    summary="Full prefill; reuses only an exact prefix, as every serving engine does.",
    config=NonSharedConfig,
    build=NonShared,
    paper="Efficient Memory Management for Large Language Model Serving with PagedAttention",
    link="https://arxiv.org/abs/2309.06180",
)
