"""The figures of all parts as one object: the headline first, cases and rows left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

HEADLINE = (
    *("holes_max_dlogprob", "plain_identical", "idle_overhead", "kl_gap_to_transformers"),
    *("reader_ttft_ratio", "bound_ratio", "leaked_blocks", "cross_tenant_reuse"),
)
FURTHER = (
    *("idle_overhead_low", "idle_overhead_high"),
    *("reader_ttft_ratio_p25", "reader_ttft_ratio_p75", "reader_exact_requests"),
    *("chat_cached_share_kvcmas", "chat_cached_share_vllm"),
    *("chat_first_turn_cached_share_kvcmas", "chat_first_turn_cached_share_vllm"),
)
"""Figures that are always there as well: `None` where they were not measured."""


def figures(results: Mapping[str, Mapping[str, Any]], failed: Iterable[str] = ()) -> dict[str, Any]:
    """Every number of the parts' results; what was not measured is `None`.

    failed: parts without a result, to be named.
    """
    found: dict[str, Any] = dict.fromkeys((*HEADLINE, *FURTHER))
    for result in results.values():
        found |= {name: value for name, value in result.items() if not isinstance(value, list)}
    found["failed_parts"] = list(failed)
    return found
