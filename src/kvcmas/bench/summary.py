"""From rows to figures."""

from __future__ import annotations

from collections.abc import Sequence

from kvcmas.bench.arms import Arm
from kvcmas.bench.results import ArmResult, Row
from kvcmas.bench.stats import mean, median, ratio, ratio_interval


def summarise(arm: Arm, rows: Sequence[Row], baseline: str) -> ArmResult:
    """An arm's figures, compared with `baseline` on the same contexts and agents."""
    own = [row for row in rows if row.arm == arm.label]
    compared = kl_ratio(rows, arm.label, baseline)
    exact_ttft = median(row.exact_ttft_s for row in own)
    ttft = median(row.record.ttft_s for row in own)
    return ArmResult(
        label=arm.label,
        method=arm.method,
        options=dict(arm.options),
        readers=tuple(dict.fromkeys(row.agent for row in own)),
        requests=len(own),
        kl=mean(row.kl for row in own),
        top1=mean(row.top1 for row in own),
        computed_share=ratio(sum(row.shared_computed for row in own), sum(r.shared for r in own)),
        ttft_s=ttft,
        ttft_ratio=ratio(ttft, exact_ttft),
        overhead_share=median(overhead(row) for row in own),
        other_share=median(ratio(row.record.other_s, row.record.ttft_s) for row in own),
        kl_ratio=None if compared is None else compared[0],
        kl_ratio_interval=None if compared is None else compared[1],
    )


def overhead(row: Row) -> float:
    """Share of the TTFT for match, move, correction, scatter and measurement."""
    return ratio(row.record.match_s + row.record.correct_s, row.record.ttft_s)


def kl_ratio(
    rows: Sequence[Row], label: str, baseline: str
) -> tuple[float, tuple[float, float]] | None:
    """Mean KL of one arm over another's, with its interval; over requests that both served.

    `None` when there are none.
    """
    own = {(row.context, row.agent): row.kl for row in rows if row.arm == label}
    other = {(row.context, row.agent): row.kl for row in rows if row.arm == baseline}
    both = [key for key in own if key in other]
    contexts = list(dict.fromkeys(context for context, _ in both))
    above = [sum(own[key] for key in both if key[0] == context) for context in contexts]
    below = [sum(other[key] for key in both if key[0] == context) for context in contexts]
    if not both:
        return None
    return ratio(sum(above), sum(below)), ratio_interval(above, below)
