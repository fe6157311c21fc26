"""The demo as a live picture: who computes, who reuses what, and what is being written.

The view only notes what it is told; a thread of rich draws it four times a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvcmas.bench.demo.bars import Run, bar, legend, runs_of_plan, runs_of_record
from kvcmas.bench.demo.results import DemoTurn, Learning
from kvcmas.engines.runner import Event, TokenGenerated, TurnStarted
from kvcmas.workflow.plan import Plan

_DRAWS_A_SECOND: Final = 4
_AROUND: Final = 11  # lines that are not turns: title, legend, headings, answer
_OTHER_COLUMNS: Final = 46
_SHORTEST_BAR: Final = 8
_ANSWER_LINES: Final = 4


@dataclass(slots=True)
class _Current:
    """The turn in progress."""

    round: int
    agent: str
    prompt: int
    runs: list[Run] = field(default_factory=list)
    text: str = ""


class LiveView:
    """Draws on a terminal; see `Watcher` for the methods.

    Args:
        console: a terminal.
        title: the first line.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._status = ""
        self._turns: tuple[DemoTurn, ...] = ()
        self._current: _Current | None = None
        self._live = Live(
            console=console, get_renderable=self.picture, refresh_per_second=_DRAWS_A_SECOND
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def status(self, text: str) -> None:
        self._status = text

    def learning(self, text: int, texts: int, agent: str, tokens: int) -> None:
        self._status = (
            f"learning from earlier traffic: text {text} of {texts}, {agent} reads {tokens} "
            "tokens exactly"
        )

    def learned(self, learning: Learning) -> None:
        self._status = f"learned from {learning.tokens} tokens in {learning.seconds:.0f} s"

    def event(self, event: Event) -> None:
        current = self._current
        if isinstance(event, TurnStarted):
            self._current = _Current(event.round, event.agent, event.prompt_tokens)
            self._status = ""
        elif isinstance(event, TokenGenerated) and current is not None:
            current.text += event.piece
            self._status = f"{event.agent} writes"

    def planned(self, plan: Plan) -> None:
        if self._current is not None:
            self._current.runs = runs_of_plan(plan)
            self._status = f"{self._current.agent} reads: {plan.computed} tokens to compute"

    def comparing(self) -> None:
        if self._current is not None:
            self._status = f"the exact run, without sharing, answers {self._current.agent}'s prompt"

    def turn(self, turn: DemoTurn) -> None:
        self._turns = (*self._turns, turn)
        self._current = None

    def picture(self) -> RenderableType:
        """What is on the screen now."""
        current = self._current
        parts: list[RenderableType] = [Text(self._title, style="bold"), legend(), self._rows()]
        if current is not None and current.text:
            lines = Text(" ".join(current.text.split())).wrap(
                self._console, max(1, self._console.width - 4)
            )
            title = Text(f"{current.agent}, round {current.round}")
            parts.append(Panel(Group(*lines[-_ANSWER_LINES:]), title=title, title_align="left"))
        parts.append(Text(self._status, style="italic"))
        return Group(*parts)

    def _rows(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
        table.add_column("")
        table.add_column("agent")
        table.add_column("prompt")
        for heading in ("computed", "TTFT", "alone", "equal"):
            table.add_column(heading, justify="right")
        width = max(_SHORTEST_BAR, self._console.width - _OTHER_COLUMNS)
        shown = self._turns[-max(1, self._console.height - _AROUND) :]
        current = self._current
        longest = max(
            [turn.sharing.prompt for turn in shown] + ([current.prompt] if current else []),
            default=1,
        )
        for turn in shown:
            record = turn.sharing
            table.add_row(
                str(turn.round),
                turn.agent,
                bar(runs_of_record(record.spans), _scaled(record.prompt, longest, width)),
                f"{record.computed}/{record.prompt}",
                f"{record.ttft_s:.2f} s",
                f"{turn.nonshared.ttft_s:.2f} s",
                "exact" if record.exact else f"{turn.same}/{turn.compared}",
            )
        if current is not None:
            drawn = bar(current.runs, _scaled(current.prompt, longest, width))
            table.add_row(
                str(current.round),
                current.agent,
                drawn,
                str(current.prompt),
                "",
                "",
                "",
                style="bold",
            )
        return table


def _scaled(length: int, longest: int, width: int) -> int:
    return max(1, round(width * length / longest))
