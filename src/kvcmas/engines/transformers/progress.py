"""Progress bars of transformers: shown on a terminal, silent elsewhere."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TextIO

from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def quiet_bars(show: bool | None = None) -> Iterator[None]:
    """Hide the progress bars of transformers inside the block.

    show: show them after all; `None` shows them when standard error is a terminal.
    """
    if show if show is not None else sys.stderr.isatty():
        yield
        return
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        # The GGUF reader draws a bar that this switch does not reach.
        with contextlib.redirect_stderr(_WithoutBars(sys.stderr)):
            yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


class _WithoutBars(io.TextIOBase):
    """Passes on all that is written, except what a progress bar draws."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._drawing = False

    def write(self, text: str) -> int:
        bar = text.startswith("\r") or (self._drawing and text == "\n")
        self._drawing = text.startswith("\r")
        if not bar:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()
