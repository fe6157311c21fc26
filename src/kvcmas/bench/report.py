"""Rows to a record, and to a table."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvcmas.bench.environment import environment, model_facts
from kvcmas.bench.fidelity import FidelityBench
from kvcmas.bench.results import ArmResult, FidelityResult, Learned, Row
from kvcmas.bench.summary import summarise


def result_of(
    bench: FidelityBench, learned: Learned, rows: Sequence[Row], baseline: str
) -> FidelityResult:
    """The record of a run; `baseline` is empty or the label of an arm."""
    return FidelityResult(
        environment=environment(),
        model=model_facts(bench.loaded),
        learn=len(bench.learning),
        test=len(bench.testing),
        tokens=bench.tokens,
        roles=tuple(role.name for role in bench.roles),
        baseline=baseline,
        learned=learned,
        arms=tuple(summarise(arm, rows, baseline) for arm in bench.arms),
        rows=tuple(rows),
        total_s=perf_counter() - bench.began,
    )


def arms_table(result: FidelityResult) -> Table:
    """One line an arm."""
    against = f"KL / {result.baseline}" if result.baseline else "KL ratio"
    table = Table(
        *("arm", "KL", against, "top-1", "computed", "TTFT ms", "ratio"),
        box=SIMPLE_HEAD,
        caption="means over readers' requests; computed: of the shared tokens; TTFT: median, and "
        "its ratio to the exact runs'",
    )
    table.columns[0].no_wrap = True
    for arm in result.arms:
        table.add_row(
            arm.label,
            f"{arm.kl:.5f}",
            _ratio(arm),
            f"{arm.top1:.3f}",
            f"{arm.computed_share:.1%}",
            f"{1000 * arm.ttft_s:.0f}",
            f"{arm.ttft_ratio:.3f}",
        )
    return table


def _ratio(arm: ArmResult) -> str:
    if arm.kl_ratio is None or arm.kl_ratio_interval is None:
        return "-"
    low, high = arm.kl_ratio_interval
    return f"{arm.kl_ratio:.3f} ({low:.2f}-{high:.2f})"
