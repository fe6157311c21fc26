"""Figures of timed requests at two servers. Plain data, no server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvcmas.bench.stats import median, ratio
from kvcmas.bench.vllm.client import Timed
from kvcmas.bench.vllm.spread import median_interval, quartiles

Workflow = Literal["context", "chain"]

REUSING = 0.5
"""Share of its prompt that a reader that reuses is spared at least."""


@dataclass(frozen=True, slots=True)
class ReaderRow:
    """One reader's request at both servers.

    bound: a plain request, right behind the reader's at the same server, of as many tokens as that
        had computed; `None` where none was asked.
    """

    workflow: Workflow
    context: int
    agent: str
    kvcmas: Timed
    vllm: Timed
    bound: Timed | None

    @property
    def bounded(self) -> Timed | None:
        """The plain request, if it really computed as many tokens as the reader's."""
        same = self.bound is not None and self.bound.computed == self.kvcmas.computed
        return self.bound if same else None


def reused(served: Timed) -> bool:
    """Whether most of a prompt was spared."""
    return served.cached > REUSING * served.prompt


def overhead_figures(ours: Sequence[float], plain: Sequence[float]) -> dict[str, Any]:
    """The median over pairs of the ratio of TTFTs, less 1, with its 95% interval; both medians."""
    ratios = [ratio(one, other) for one, other in zip(ours, plain, strict=True)]
    low, high = median_interval(ratios)
    return {
        "idle_overhead": median(ratios) - 1,
        "idle_overhead_low": low - 1,
        "idle_overhead_high": high - 1,
        "idle_overhead_of_medians": ratio(median(ours), median(plain)) - 1,
        "idle_ttft_s": median(ours),
        "idle_ttft_s_vllm": median(plain),
        "idle_pairs": len(ratios),
    }


def reader_figures(rows: Sequence[ReaderRow], prefix: str) -> dict[str, Any]:
    """Medians over readers' requests, and which share of their prompts went through the model.

    All requests count, also those that were served exactly (audited, or refused).
    """
    ours, plain = (median(getattr(row, name).ttft_s for row in rows) for name in ("kvcmas", "vllm"))
    low, high = quartiles([ratio(row.kvcmas.ttft_s, row.vllm.ttft_s) for row in rows])
    shares = {
        name: ratio(
            sum(getattr(row, name).computed for row in rows),
            sum(getattr(row, name).prompt for row in rows),
        )
        for name in ("kvcmas", "vllm")
    }
    return {
        f"{prefix}_ttft_ratio": ratio(ours, plain),
        f"{prefix}_ttft_ratio_p25": low,
        f"{prefix}_ttft_ratio_p75": high,
        f"{prefix}_ttft_s": ours,
        f"{prefix}_ttft_s_vllm": plain,
        f"{prefix}_computed_share": shares["kvcmas"],
        f"{prefix}_computed_share_vllm": shares["vllm"],
        f"{prefix}_requests": len(rows),
        f"{prefix}_exact_requests": sum(not reused(row.kvcmas) for row in rows),
    }


def bound_figures(rows: Sequence[ReaderRow]) -> dict[str, Any]:
    """Median TTFT of readers over that of plain requests of exactly their computed length."""
    pairs = [(row.kvcmas.ttft_s, row.bounded.ttft_s) for row in rows if row.bounded is not None]
    readers, plain = (median(pair[place] for pair in pairs) for place in (0, 1))
    return {
        "bound_ratio": ratio(readers, plain),
        "bound_ttft_s": plain,
        "bound_requests": len(pairs),
        "bound_requests_of_other_length": sum(
            row.bound is not None and row.bounded is None for row in rows
        ),
    }
