"""Cancelling a request from another thread."""

from __future__ import annotations

from threading import Event

from kvcmas.errors import CancelledError


class Cancellation:
    """A flag that the caller sets and the engine reads between passes and between tokens."""

    def __init__(self) -> None:
        self._event = Event()

    def cancel(self) -> None:
        """Ask the request to stop; safe from any thread, and more than once."""
        self._event.set()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._event.is_set()

    def check(self) -> None:
        """Do nothing, or stop the request.

        Raises:
            CancelledError: `cancel` was called.
        """
        if self._event.is_set():
            raise CancelledError("the request was cancelled by its caller")
