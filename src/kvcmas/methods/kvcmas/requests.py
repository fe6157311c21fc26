"""Requests between `plan` and `finish`, and what the method keeps of each."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvcmas.errors import PromptError
from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.config import Dial
from kvcmas.methods.kvcmas.filling import Added
from kvcmas.workflow.plan import Plan
from kvcmas.workflow.prompt import Prompt


@dataclass(eq=False)
class InFlight:
    """One request.

    dial: `None` when it is served exactly. chosen: runs with their donors, by the run's start.
    added: what is added to those of them that are corrected.
    """

    dial: Dial | None
    plan: Plan
    chosen: dict[int, Chosen] = field(default_factory=dict)
    added: dict[int, Added] = field(default_factory=dict)


class Requests:
    """All requests in flight, by their ids. Safe to use from many threads."""

    def __init__(self) -> None:
        self._states: dict[str, InFlight] = {}
        self._refused: list[Prompt] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._states)

    def open(self, prompt: Prompt, dial: Dial | None) -> InFlight:
        """Begin a request.

        Raises:
            PromptError: another request with this id is in flight.
        """
        with self._lock:
            if prompt.request_id in self._states:
                # Its `finish` will follow, and must not end the other request.
                self._refused.append(prompt)
                raise PromptError(
                    f"request id {prompt.request_id!r} is in use by a request in flight; give "
                    "every request an id of its own"
                )
            state = InFlight(dial, Plan.dense(len(prompt)))
            self._states[prompt.request_id] = state
            return state

    def get(self, prompt: Prompt) -> InFlight:
        """The state of a request that was opened."""
        return self._states[prompt.request_id]

    def ending(self, prompt: Prompt, failed: bool) -> InFlight | None:
        """The state of a request that ends; `None` when it was refused or never opened."""
        with self._lock:
            for index, refused in enumerate(self._refused):
                if failed and refused is prompt:
                    del self._refused[index]
                    return None
            return self._states.get(prompt.request_id)

    def close(self, prompt: Prompt) -> None:
        """Forget a request; its id is free again."""
        with self._lock:
            self._states.pop(prompt.request_id, None)
