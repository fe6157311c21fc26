"""From tokens to text while they arrive: whole characters only, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
# A character takes at most four bytes, so this many tokens without a whole character at their end
# hold bytes that are no text at all.
_PATIENCE = 16


class Tokenizer(Protocol):
    """The one thing the engine needs of a tokenizer."""

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Text of a list of ids."""


class Detokenizer:
    """Text of the tokens so far, a piece for each token.

    Only a window of tokens is decoded at a time: those whose text is not settled, behind those of
    the piece before, whose presence decides about spaces. A piece never ends within a character:
    while the last bytes are no whole character, they are held back. Bytes that never become one
    are dropped at the end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._settled = 0
        self._emitted = 0

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that became certain, possibly none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._settle(text)
        if len(self._window) - self._settled <= _PATIENCE:
            return ""
        stable = text.rstrip(REPLACEMENT)
        return self._settle(text) if len(stable) <= self._emitted else self._emit(stable)

    def flush(self) -> str:
        """Text held back, without an unfinished character at its end."""
        return self._emit(self._decode(self._window).rstrip(REPLACEMENT))

    def _settle(self, text: str) -> str:
        piece = self._emit(text)
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._emitted = len(self._decode(self._window))
        return piece

    def _emit(self, text: str) -> str:
        piece = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces.

    Text that may be the beginning of a stop string is held back until it is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Add text; returns what is certain to stand before any stop string."""
        if not self._stops or self.found is not None:
            return piece if self.found is None else ""
        text = self._held + piece
        hits = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            at, _, self.found = min(hits)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Text held back, once nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextStream:
    """Pieces of text for tokens, until a stop string; no text at all without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether the text has reached a stop string."""
        return self._stops.found is not None

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that became certain."""
        if self._detokenizer is None:
            return ""
        return self._stops.push(self._detokenizer.push(token_id))

    def end(self) -> str:
        """The text that was held back; nothing behind a stop string."""
        if self._detokenizer is None or self.stopped:
            return ""
        piece = self._stops.push(self._detokenizer.flush())
        return piece + self._stops.flush()
