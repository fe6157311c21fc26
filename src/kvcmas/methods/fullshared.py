"""Blind reuse: whatever another agent computed is taken, keys moved, nothing corrected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcmas.core.model_info import ModelInfo
from kvcmas.methods.description import MethodDescription
from kvcmas.methods.donors import Donor, Found, Run
from kvcmas.methods.kv_library import KVLibrary
from kvcmas.methods.library_method import LibraryMethod
from kvcmas.methods.options import check_int
from kvcmas.methods.pinning import pin, reuse_prefix
from kvcmas.workflow.plan import Reuse
from kvcmas.workflow.prompt import Prompt

EXACT_DIAL = "exact"


@dataclass(frozen=True, slots=True)
class FullSharedConfig:
    """Options of `fullshared`.

    budget_bytes: most bytes of KV that are kept.
    min_length: shortest run in tokens that is kept and reused.
    min_prefix: shortest exact prefix in tokens that is reused.
    """

    budget_bytes: int = 2 << 30
    min_length: int = 32
    min_prefix: int = 16

    def __post_init__(self) -> None:
        check_int("budget_bytes", self.budget_bytes, 0)
        check_int("min_length", self.min_length, 1)
        check_int("min_prefix", self.min_prefix, 1)


class FullShared(LibraryMethod):
    """Reuses the exact prefix, then every stored run; computes the rest.

    A prompt with the dial `"exact"` reuses the prefix alone; other dials change nothing.
    """

    name: ClassVar[str] = "fullshared"

    def __init__(self, info: ModelInfo, config: FullSharedConfig | None = None) -> None:
        self.config = config or FullSharedConfig()
        super().__init__(
            KVLibrary(
                info,
                self.config.budget_bytes,
                self.config.min_length,
                min_prefix=self.config.min_prefix,
            )
        )

    def reuse(self, prompt: Prompt, found: Found) -> tuple[list[Reuse], list[str]]:
        """The prefix, and each run from its best donor that is still here."""
        notes: list[str] = []
        spans = reuse_prefix(self.library, prompt, found, notes)
        if prompt.dial == EXACT_DIAL:
            if found.runs:
                notes.append("the dial is exact: stored runs are computed")
            return spans, notes
        for run in found.runs:
            donor = self._pinned(prompt, run, notes)
            if donor is not None:
                spans.append(self.span(run, donor, notes))
        return spans, notes

    def span(self, run: Run, donor: Donor, notes: list[str]) -> Reuse:
        """How a run is reused; methods that compute some of it begin here."""
        return Reuse(run.start, run.stop, donor.segment, donor.offset, exact=donor.exact)

    def _pinned(self, prompt: Prompt, run: Run, notes: list[str]) -> Donor | None:
        # Newest first among those that are equally good.
        best = sorted(run.sources, key=lambda donor: (not donor.own, not donor.info.exact))
        return next(
            (donor for donor in best if pin(self.library, prompt, donor.segment, notes)), None
        )


DESCRIPTION = MethodDescription(
    name=FullShared.name,
    summary="Blind reuse: every stored run is taken with moved keys, and nothing is corrected.",
    config=FullSharedConfig,
    build=FullShared,
    paper="Prompt Cache: Modular Attention Reuse for Low-Latency Inference",
    link="https://arxiv.org/abs/2311.04934",
)
