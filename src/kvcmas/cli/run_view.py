"""What `kvcmas run` shows while it works, and at the end."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.table import Table

from kvcmas.engines.runner import (
    Event,
    Totals,
    TurnFinished,
    TurnStarted,
    WorkflowRun,
    head_tokens,
    landmark_tokens,
)
from kvcmas.engines.transformers import RequestRecord
from kvcmas.workflow.workflow import Workflow


class RunView:
    """A line of status and a line for each turn on `progress`; the answers on `results`."""

    def __init__(self, progress: Console, results: Console, workflow: Workflow) -> None:
        self._progress, self._results = progress, results
        self._status = progress.status("starting")
        self._total = workflow.rounds * len(workflow.agents)
        self._turn, self._tokens, self._doing = 0, 0, ""

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._status.stop()

    def status(self, message: str) -> None:
        """Say what is going on."""
        self._status.update(message)
        if not self._progress.is_terminal:
            self._say(self._progress, message)

    def note(self, text: str) -> None:
        """Say what the user should know."""
        self._say(self._progress, f"Note: {text}")

    def on_event(self, event: Event) -> None:
        """Follow the run."""
        if isinstance(event, TurnStarted):
            self._turn += 1
            self._tokens = 0
            self._doing = f"turn {self._turn} of {self._total}, {event.agent}"
            self._status.update(f"{self._doing}: {event.prompt_tokens} tokens to read")
        elif isinstance(event, TurnFinished):
            self._say(self._progress, f"{self._doing}: {_line(event.record)}")
            self._say(self._results, f"\n{event.agent} (round {event.round}):\n{event.text}\n")
        else:
            self._tokens += 1
            self._status.update(f"{self._doing}: {self._tokens} tokens written")

    def _say(self, console: Console, text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def turns_table(run: WorkflowRun) -> Table:
    """One row for each turn, and their sums."""
    caption = "Head: computed at the front of reused text, + single tokens inside it"
    table = Table("Round", "Agent", show_footer=True, caption=caption)
    table.columns[1].footer = "all turns"
    totals = run.totals
    for name, footer in (
        ("Prompt", str(totals.prompt)),
        ("Computed", str(totals.computed)),
        ("Reused", str(totals.reused)),
        ("Head", _head(totals.head, totals.landmarks)),
        ("Answer", str(totals.generated)),
        ("TTFT ms", _milliseconds(totals)),
    ):
        table.add_column(name, footer, justify="right")
    for turn in run.turns:
        record = turn.record
        table.add_row(
            str(turn.round),
            turn.agent,
            str(record.prompt),
            str(record.computed),
            str(record.reused),
            _head(head_tokens(record), landmark_tokens(record)),
            str(record.generated),
            _milliseconds(record),
        )
    return table


def _head(head: int, landmarks: int) -> str:
    return f"{head}+{landmarks}" if landmarks else str(head)


def _milliseconds(timed: RequestRecord | Totals) -> str:
    return f"{1000 * timed.ttft_s:.0f}"


def _line(record: RequestRecord) -> str:
    return (
        f"{record.prompt} tokens read, {record.reused} of them reused; first token after "
        f"{_milliseconds(record)} ms; {record.generated} tokens written"
    )
