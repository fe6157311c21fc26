"""What methods on a `KVLibrary` have in common: plans, moved donors, capture."""

from __future__ import annotations

from abc import abstractmethod

from kvcmas.core.segment import SegmentKV
from kvcmas.methods.base import Method, Outcome
from kvcmas.methods.captures import captures
from kvcmas.methods.donors import Found
from kvcmas.methods.kv_library import KVLibrary
from kvcmas.methods.move import fill_moved
from kvcmas.methods.tiling import plan_of
from kvcmas.workflow.plan import Plan, Reuse
from kvcmas.workflow.prompt import Prompt


class LibraryMethod(Method):
    """A method that says what is reused of what its library finds; see `reuse`."""

    def __init__(self, library: KVLibrary) -> None:
        self.library = library
        self._plans: dict[str, Plan] = {}

    @abstractmethod
    def reuse(self, prompt: Prompt, found: Found) -> tuple[list[Reuse], list[str]]:
        """The reused spans by position, every segment pinned, and notes for the plan."""

    def plan(self, prompt: Prompt) -> Plan:
        """The exact prefix, then what `reuse` says; everything else is computed."""
        found = self.library.find(prompt)
        reused, notes = self.reuse(prompt, found)
        plan = plan_of(len(prompt), reused, (*found.notes, *notes))
        self._plans[prompt.request_id] = plan
        return plan

    def fill(self, prompt: Prompt, span: Reuse, start: int, stop: int, out: SegmentKV) -> None:
        """Write the donor's KV, keys moved."""
        donor = self.library.kv(span.segment)
        fill_moved(self.library.info.rope, donor, span.offset + start - span.start, out)

    def finish(self, prompt: Prompt, outcome: Outcome | None) -> None:
        """Release the donors; capture what was computed."""
        plan = self._plans.pop(prompt.request_id, None)
        self.library.release(prompt.request_id)
        if plan is None or outcome is None:
            return
        for part in captures(plan, outcome.computed, outcome.exact, self.library.min_length):
            self.library.capture(prompt, outcome, part.start, part.stop, part.exact)
