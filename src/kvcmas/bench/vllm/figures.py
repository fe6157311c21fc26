"""The figures of all parts as one object: the headline first, cases and rows left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADLINE = (
    *("holes_max_dlogprob", "plain_identical", "idle_overhead", "kl_gap_to_transformers"),
    *("reader_ttft_ratio", "bound_ratio", "leaked_blocks", "cross_tenant_reuse"),
)


def figures(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Every number of the parts' results; what was not measured is `None`."""
    found: dict[str, Any] = dict.fromkeys(HEADLINE)
    for result in results.values():
        found |= {name: value for name, value in result.items() if not isinstance(value, list)}
    return found
