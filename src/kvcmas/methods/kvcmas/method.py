"""kvcmas: exact head and landmarks, the rest moved and corrected by learned low-rank maps.

    found run   |  head  |  reused: moved + corrected, with landmarks computed  |
                 measured: does the KV agree with the donor's plus correction?

The first agent's KV is exact and becomes the donor; later agents reuse it. What they compute
exactly anyway (cold start, heads, audits, requests whose dial is exact) teaches the corrections.
Source: KVCMAS, arXiv 2609.34060; where and why it differs: `docs/method.md`.

    plan     planner.py, selection.py (donor, head), trust.py (whether to reuse at all); known.py
    fill     filling.py; core/correction.py
    finish   lessons.py, learning.py, book.py (what a tenant's traffic has taught)

The planner knows no tensors: `known.py` tells it what was learned.
"""

from __future__ import annotations

import threading
from typing import ClassVar

from kvcmas.core.channels import to_channels
from kvcmas.core.model_info import ModelInfo
from kvcmas.core.segment import SegmentKV
from kvcmas.methods.base import Outcome
from kvcmas.methods.captures import Capture
from kvcmas.methods.description import MethodDescription
from kvcmas.methods.donors import Found
from kvcmas.methods.kv_library import KVLibrary
from kvcmas.methods.kvcmas.book import CorrectionBook
from kvcmas.methods.kvcmas.config import KvcmasConfig
from kvcmas.methods.kvcmas.derived import Derived
from kvcmas.methods.kvcmas.filling import fill_corrected
from kvcmas.methods.kvcmas.frozen import FrozenBook
from kvcmas.methods.kvcmas.known import BookKnowledge
from kvcmas.methods.kvcmas.learning import Learning
from kvcmas.methods.kvcmas.lessons import kept_of
from kvcmas.methods.kvcmas.planner import Planner
from kvcmas.methods.kvcmas.requests import InFlight, Requests
from kvcmas.methods.library_method import LibraryMethod
from kvcmas.workflow.plan import Plan, Reuse
from kvcmas.workflow.prompt import Prompt


class Kvcmas(LibraryMethod):
    """See the module. One `CorrectionBook` per tenant; nothing is shared between tenants."""

    name: ClassVar[str] = "kvcmas"

    def __init__(self, info: ModelInfo, config: KvcmasConfig | None = None) -> None:
        self.config = config or KvcmasConfig()
        super().__init__(
            KVLibrary(
                info,
                self.config.budget_bytes,
                self.config.min_length,
                min_prefix=self.config.min_prefix,
            )
        )
        self.info = info
        self.planner = Planner(self.config, self.library)
        self._books: dict[str, CorrectionBook] = {}
        self._requests = Requests()
        self._derived = Derived(self.library)
        self._learning = Learning(self.config, self.library, self._derived)
        self._lock = threading.Lock()

    def book(self, tenant: str = "") -> CorrectionBook:
        """What a tenant's traffic has taught."""
        with self._lock:
            if tenant not in self._books:
                self._books[tenant] = CorrectionBook(self.info, self.config)
            return self._books[tenant]

    def adopt(self, teacher: Kvcmas) -> None:
        """Serve with what `teacher` has learned so far, and learn nothing more from its tenants."""
        with teacher._lock:
            books = dict(teacher._books)
        with self._lock:
            self._books |= {tenant: FrozenBook.of(book) for tenant, book in books.items()}
        self.planner.share_shorts(teacher.planner, books)

    def donor_bytes(self) -> dict[str, int]:
        """Bytes kept per kind: donors' KV, their features, second readers' factors."""
        return {"kv": self.library.store.nbytes, **self._derived.nbytes()}

    # plan ------------------------------------------------------------------------------------

    def plan(self, prompt: Prompt) -> Plan:
        """See `LibraryMethod`.

        Raises:
            ConfigError: the prompt's dial is unknown.
            PromptError: its request id is in use.
        """
        state = self._requests.open(prompt, self.config.setting(prompt.dial))
        state.plan = super().plan(prompt)
        return state.plan

    def reuse(self, prompt: Prompt, found: Found) -> tuple[list[Reuse], list[str]]:
        """What the planner decides; remembers what is added to the donors."""
        state = self._requests.get(prompt)
        knowledge = BookKnowledge(self.book(prompt.tenant), self._derived)
        made = self.planner.decide(prompt, found, state.dial, knowledge)
        state.chosen = made.chosen
        for span in made.spans:
            chosen = made.chosen.get(span.start)
            added = knowledge.added(chosen) if chosen is not None else None
            if added is not None:
                state.added[span.start] = added
        return made.spans, made.notes

    # fill ------------------------------------------------------------------------------------

    def fill(self, prompt: Prompt, span: Reuse, start: int, stop: int, out: SegmentKV) -> None:
        """Write the donor's KV, keys moved, and add the correction."""
        added = self._requests.get(prompt).added.get(span.start) if span.correction else None
        if added is None:
            super().fill(prompt, span, start, stop, out)
            return
        donor, first = self.library.kv(span.segment), start - span.start
        fill_corrected(self.info.rope, donor, span.offset + first, out, added, first)

    # finish ----------------------------------------------------------------------------------

    def finish(self, prompt: Prompt, outcome: Outcome | None) -> None:
        """Learn from what was computed exactly, then capture it and release the donors."""
        state = self._requests.ending(prompt, failed=outcome is None)
        if state is None:
            return
        try:
            if outcome is not None and self.config.learn:
                chosen = state.chosen.values()
                self.planner.finished(prompt.tenant, state.plan, chosen, outcome.computed)
                self._learning.learn(outcome, state, self.book(prompt.tenant))
        finally:
            self._plans.pop(prompt.request_id, None)
            self.library.release(prompt.request_id)
            self._requests.close(prompt)
        if outcome is not None:
            self._capture(prompt, outcome, state)

    def _capture(self, prompt: Prompt, outcome: Outcome, state: InFlight) -> None:
        computed, exact = outcome.computed, outcome.exact
        copies = self.config.base == "previous"
        for part in kept_of(state.plan, state.chosen.values(), computed, exact, self.config):
            put = self.library.capture(
                prompt, outcome, part.start, part.stop, part.exact, copies=copies
            )
            if put.id is not None and part.exact:
                self._see_donor(prompt, outcome, state, part, put.id)
        self._derived.forget_departed()

    def _see_donor(
        self, prompt: Prompt, outcome: Outcome, state: InFlight, part: Capture, name: str
    ) -> None:
        if not self.config.learn:
            return
        # Not the stored copy: under a small budget another request may have evicted it by now.
        kv, book = outcome.kv.slice(part.start, part.stop), self.book(prompt.tenant)
        book.see_donor(to_channels(self.info.rope, kv))
        self._derived.features(name, kv, book)
        first = next(state.plan.reused(), None)
        if part.start == 0 and first is not None and first.start == 0 and first.exact:
            self._derived.carry_over(first.segment, name, prompt.agent, len(first))


DESCRIPTION = MethodDescription(
    name=Kvcmas.name,
    summary="Reuse corrected by low-rank maps learned online, behind a measured exact head.",
    config=KvcmasConfig,
    build=Kvcmas,
    paper="KVCMAS: Efficient KV cache Correction for Shared Context in Multi-Agent Systems",
    link="https://arxiv.org/abs/2609.34060",
)
