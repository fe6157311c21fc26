"""kvcmas: exact head and landmarks, the rest moved and corrected by learned low-rank maps.

    found run   |  head  |  reused: moved + corrected, with landmarks computed  |
                 measured: does the KV agree with the donor's plus correction?

The first agent's KV is exact and becomes the donor; later agents reuse it. What they compute
exactly anyway (cold start, heads, audits, requests whose dial is exact) teaches the corrections.
Source: KVCMAS, arXiv 2609.34060; where and why it differs: `docs/method.md`.

    plan     this file; selection.py (donor, head, landmarks), trust.py (whether to reuse at all)
    fill     this file; core/correction.py
    finish   this file; learning.py, book.py (what a tenant's traffic has taught)
"""

from __future__ import annotations

import random
import threading
from typing import ClassVar

from kvcmas.core.channels import to_channels
from kvcmas.core.model_info import ModelInfo
from kvcmas.core.segment import SegmentKV
from kvcmas.methods.base import Outcome
from kvcmas.methods.captures import Capture, captures
from kvcmas.methods.description import MethodDescription
from kvcmas.methods.donors import Donor, Found, Run
from kvcmas.methods.kvcmas.book import CorrectionBook, Pair
from kvcmas.methods.kvcmas.config import Dial, KvcmasConfig
from kvcmas.methods.kvcmas.derived import Derived
from kvcmas.methods.kvcmas.frozen import FrozenBook
from kvcmas.methods.kvcmas.learning import Learning
from kvcmas.methods.kvcmas.requests import Chosen, InFlight, Requests
from kvcmas.methods.kvcmas.selection import (
    head_of,
    landmarks_of,
    origin_of,
    pair_of,
    rank_donors,
)
from kvcmas.methods.kvcmas.trust import refusal
from kvcmas.methods.library import DonorLibrary
from kvcmas.methods.library_method import LibraryMethod
from kvcmas.workflow.plan import Plan, Reuse
from kvcmas.workflow.prompt import Prompt


class Kvcmas(LibraryMethod):
    """See the module. One `CorrectionBook` per tenant; nothing is shared between tenants."""

    name: ClassVar[str] = "kvcmas"

    def __init__(self, info: ModelInfo, config: KvcmasConfig | None = None) -> None:
        self.config = config or KvcmasConfig()
        super().__init__(
            DonorLibrary(
                info,
                self.config.budget_bytes,
                self.config.min_length,
                min_prefix=self.config.min_prefix,
            )
        )
        self.info = info
        self._books: dict[str, CorrectionBook] = {}
        self._requests = Requests()
        self._derived = Derived(self.library)
        self._learning = Learning(self.config, self.library, self._derived)
        self._draws: dict[str, random.Random] = {}
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
        """The exact prefix; then every run, reused as far as its pair is trusted."""
        notes: list[str] = []
        spans = self.reuse_prefix(prompt, found, notes)
        state, book = self._requests.get(prompt), self.book(prompt.tenant)
        for run in found.runs:
            donor = self._donor(prompt, run, book, notes)
            if donor is not None:
                state.chosen[run.start] = self._choose(prompt, run, donor, book)
        if state.dial is None:
            if found.runs:
                notes.append("the dial is exact: stored runs are computed")
            return spans, notes
        if self._is_audited(prompt.tenant, state.dial):
            if found.runs:
                notes.append("audit: served exactly, to measure what reuse would have cost")
            return spans, notes
        for chosen in state.chosen.values():
            spans = self._add(spans, state.dial, chosen, book, notes)
        return spans, notes

    def _is_audited(self, tenant: str, dial: Dial) -> bool:
        """Drawn for each tenant apart, so that none can tell what the others do."""
        with self._lock:
            draws = self._draws.setdefault(tenant, random.Random(self.config.seed))
            return draws.random() < dial.audit

    def _add(
        self,
        spans: list[Reuse],
        dial: Dial,
        chosen: Chosen,
        book: CorrectionBook,
        notes: list[str],
    ) -> list[Reuse]:
        """The spans so far with one run more, or less where that is needed to learn from it."""
        run, donor = chosen.run, chosen.donor
        if donor.own:
            own = Reuse(run.start, run.stop, donor.segment, donor.offset, exact=donor.exact)
            return [*spans, own]
        second = self._derived.second(donor, len(run))
        refused = refusal(dial, chosen, second is not None, book, self.config)
        if refused is None:
            return [*spans, self._span(dial, chosen, book)]
        notes.append(f"[{run.start}, {run.stop}) is computed: {refused.reason}")
        if not refused.teaches:
            return spans
        # Computed behind approximate KV it would be approximate itself and teach nothing.
        notes.extend(
            f"[{span.start}, {span.stop}) is computed: it stands before [{run.start}, {run.stop})"
            for span in spans
            if not span.exact
        )
        return [span for span in spans if span.exact]

    def _donor(
        self, prompt: Prompt, run: Run, book: CorrectionBook, notes: list[str]
    ) -> Donor | None:
        ranked = rank_donors(book, run, prompt.agent, self.config.base)
        return next((donor for donor in ranked if self.pin(prompt, donor.segment, notes)), None)

    def _choose(self, prompt: Prompt, run: Run, donor: Donor, book: CorrectionBook) -> Chosen:
        kv = self.library.kv(donor.segment)
        origin = origin_of(prompt.token_ids, run, kv.token_ids.cpu().numpy(), donor.offset)
        start, stop = donor.offset, donor.offset + len(run)
        plain = Pair(donor.info.agent, prompt.agent)
        features = self._derived.features(donor.segment, kv, book)
        if features is not None:
            features = features.slice(start, stop)
        if features is None or plain.donor == plain.reader or not self.config.correct:
            return Chosen(run, donor, plain, origin, None, features)
        second = self._derived.second(donor, len(run))
        pair = pair_of(*plain[:2], [second.agent] if second is not None else [])
        correction = book.correction(pair) if pair.other else None
        if second is None or correction is None:
            return Chosen(run, donor, plain, origin, book.correction(plain), features)
        other = book.other_features(pair, second.slice(start, stop))
        return Chosen(run, donor, pair, origin, correction, features.with_other(other))

    def _span(self, dial: Dial, chosen: Chosen, book: CorrectionBook) -> Reuse:
        run, donor, pair = chosen.run, chosen.donor, chosen.pair
        head = head_of(dial, len(run))
        landmarks: tuple[int, ...] = ()
        state = book.pairs.get(Pair(pair.donor, pair.reader))
        if self.config.landmarks and state is not None and chosen.features is not None:
            landmarks = landmarks_of(
                state.landmarks,
                chosen.features,
                run.start,
                chosen.origin,
                head.length,
                dial.share,
            )
        return Reuse(
            run.start,
            run.stop,
            donor.segment,
            donor.offset,
            correction=pair.name if chosen.correction is not None else None,
            head=head,
            landmarks=landmarks,
        )

    # fill ------------------------------------------------------------------------------------

    def fill(self, prompt: Prompt, span: Reuse, start: int, stop: int, out: SegmentKV) -> None:
        """Write the donor's KV, keys moved, and add the correction."""
        super().fill(prompt, span, start, stop, out)
        if span.correction is None:
            return
        chosen = self._requests.get(prompt).chosen[span.start]
        book = self.book(prompt.tenant)
        if chosen.correction is None or chosen.features is None or book.basis is None:
            return
        features = chosen.features.slice(start - span.start, stop - span.start)
        fading = book.basis.fading(out.positions[0] - chosen.origin)
        chosen.correction.apply(self.info.rope, features, fading, out)

    # finish ----------------------------------------------------------------------------------

    def finish(self, prompt: Prompt, outcome: Outcome | None) -> None:
        """Learn from what was computed exactly, then capture it and release the donors."""
        state = self._requests.ending(prompt, failed=outcome is None)
        if state is None:
            return
        try:
            if outcome is not None and self.config.learn:
                self._learning.learn(outcome, state, self.book(prompt.tenant))
        finally:
            self._plans.pop(prompt.request_id, None)
            self.library.release(prompt.request_id)
            self._requests.close(prompt)
        if outcome is not None:
            self._capture(prompt, outcome, state)

    def _capture(self, prompt: Prompt, outcome: Outcome, state: InFlight) -> None:
        previous = self.config.base == "previous"
        for part in captures(state.plan, outcome, self.library.min_length):
            put = self.library.capture(
                prompt, outcome, part.start, part.stop, part.exact, copies=previous
            )
            if put.id is not None and part.exact:
                self._see_donor(prompt, outcome, state, part, put.id)
        if previous and not outcome.exact:
            for chosen in state.chosen.values():
                run = chosen.run
                if not chosen.donor.own:
                    self.library.capture(prompt, outcome, run.start, run.stop, False, copies=True)
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
