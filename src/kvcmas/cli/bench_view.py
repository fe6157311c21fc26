"""What long benchmarks show while they work, on stderr."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LINES = 10  # of a phase, where there is no terminal


class BenchView:
    """A bar for each phase; where stderr is no terminal, a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._phase, self._task = "", self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def status(self, message: str) -> None:
        """Say what is going on."""
        self._progress.update(self._task, description=message)
        if not self._console.is_terminal:
            self._line(message)

    def note(self, text: str) -> None:
        """Say what the user should know."""
        self._line(f"Note: {text}")

    def report(self, phase: str, done: int, total: int) -> None:
        """Follow a phase; see `kvcmas.bench.steps`."""
        if phase != self._phase:
            self._phase = phase
            if self._progress.tasks[-1].total is None:
                self._progress.update(self._task, description=phase, total=total, completed=done)
            else:
                self._task = self._progress.add_task(phase, total=total, completed=done)
        self._progress.update(self._task, completed=done)
        every = max(1, total // _LINES)
        if not self._console.is_terminal and (done % every == 0 or done == total):
            self._line(f"{phase}: {done} of {total}")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
