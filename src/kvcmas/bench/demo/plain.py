"""The demo as lines of text: for files, pipes and logs."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console

from kvcmas.bench.demo.results import DemoTurn, Learning, prefix_tokens, reused_tokens
from kvcmas.engines.runner import Event, head_tokens, landmark_tokens
from kvcmas.workflow.plan import Plan


def turn_line(turn: DemoTurn) -> str:
    """One turn in one line."""
    sharing = turn.sharing
    exact = ", exact" if sharing.exact else ""
    head = f"{head_tokens(sharing)}+{landmark_tokens(sharing)}"
    return (
        f"round {turn.round}  {turn.agent}: {sharing.prompt} tokens, {sharing.computed} computed "
        f"(head {head}), {reused_tokens(sharing)} reused, "
        f"{prefix_tokens(sharing)} own prefix; TTFT {sharing.ttft_s:.2f} s, without sharing "
        f"{turn.nonshared.ttft_s:.2f} s; {turn.same} of {turn.compared} tokens equal the exact "
        f"run{exact}"
    )


class PlainView:
    """Writes a line for each step and each turn; see `Watcher` for the methods."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing to put back."""

    def status(self, text: str) -> None:
        self._write(text)

    def learning(self, text: int, texts: int, agent: str, tokens: int) -> None:
        self._write(f"learning from earlier text {text} of {texts}: {agent} reads {tokens} tokens")

    def learned(self, learning: Learning) -> None:
        if learning.texts:
            self._write(
                f"learned from {learning.texts} earlier texts, {learning.tokens} tokens in "
                f"{learning.seconds:.0f} s"
            )

    def event(self, event: Event) -> None:
        """The line of a turn follows when it is compared."""

    def planned(self, plan: Plan) -> None:
        """As `event`."""

    def comparing(self) -> None:
        """As `event`."""

    def turn(self, turn: DemoTurn) -> None:
        self._write(turn_line(turn))
        self._write(f"    {' '.join(turn.text.split())}")

    def _write(self, line: str) -> None:
        # Answers may hold anything; only their text is shown.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
