"""The table at the end: a line for each agent, and one for all readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.table import Table

from kvcmas.bench.demo.results import AgentSums, DemoTurn, Sums

_HEADINGS: Final = (
    "prompt", "computed", "head", "reused", "prefix", "TTFT", "alone", "ratio", "equal", "KL",
)  # fmt: skip


def row(sums: Sums) -> tuple[str, ...]:
    """The cells of one line, in the order of the table's headings."""
    equal = f"{100 * sums.same / sums.compared:.1f}%" if sums.compared else "n/a"
    return (
        str(sums.prompt),
        str(sums.computed),
        f"{sums.head}+{sums.landmarks}",
        str(sums.reused),
        str(sums.prefix),
        f"{sums.ttft_s:.2f}",
        f"{sums.nonshared_ttft_s:.2f}",
        f"{sums.ttft_ratio:.2f}",
        equal,
        f"{sums.kl:.4f}",
    )


def agents_table(agents: Sequence[AgentSums], readers: Sums) -> Table:
    """Sums of tokens over all rounds, and median seconds until the first token."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        title="All rounds: sums of tokens, median seconds to the first token",
        caption=(
            "computed: went through the model; head: the part of it at the front of reused runs, "
            "+ single tokens inside them; reused: KV of another prompt, moved and corrected; "
            "prefix: the agent's own, exact; alone: without sharing; equal: tokens of the exact "
            "answer on which both runs agree"
        ),
    )
    table.add_column("agent")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for agent in agents:
        table.add_row(agent.agent, *row(agent))
    table.add_section()
    table.add_row("readers", *row(readers))
    return table


def exact_note(turns: Sequence[DemoTurn]) -> str:
    """Which turns used nothing approximate; by construction, the very first is one of them."""
    exact = [f"{turn.agent} in round {turn.round}" for turn in turns if turn.sharing.exact]
    if not exact:
        return "No turn was exact."
    return f"Exact (nothing approximate was used): {', '.join(exact)}."
