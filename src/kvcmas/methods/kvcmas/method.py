"""kvcmas: exact head and landmarks, the rest moved and corrected by learned low-rank maps.

    found run   |  head  |  reused: moved + corrected, with landmarks computed  |
                 measured: does the KV agree with the donor's plus correction?

The first agent's KV is exact and becomes the donor; later agents reuse it. What they compute
exactly anyway (cold start, heads, audits, requests whose dial is exact) teaches the corrections.
Source: KVCMAS, arXiv 2609.34060; where and why it differs: `docs/method.md`.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvcmas.core.channels import to_channels
from kvcmas.core.correction import Correction
from kvcmas.core.features import Features, windows_of
from kvcmas.core.lowrank import LowRank
from kvcmas.core.model_info import ModelInfo
from kvcmas.core.segment import SegmentKV
from kvcmas.methods.base import Outcome
from kvcmas.methods.captures import captures
from kvcmas.methods.description import MethodDescription
from kvcmas.methods.donors import Donor, Found, Run
from kvcmas.methods.kvcmas.book import CorrectionBook, Observation, Pair
from kvcmas.methods.kvcmas.config import Dial, KvcmasConfig
from kvcmas.methods.kvcmas.selection import (
    head_of,
    landmarks_of,
    origin_of,
    pair_of,
    rank_donors,
)
from kvcmas.methods.library import DonorLibrary
from kvcmas.methods.library_method import LibraryMethod
from kvcmas.workflow.plan import Plan, Reuse
from kvcmas.workflow.prompt import Prompt

_WORTH_LEARNING = 256  # shorter runs teach a pair too little to be worth a cold start


@dataclass(frozen=True, eq=False)
class Chosen:
    """A run of a request in flight, its donor, and what is added to it."""

    run: Run
    donor: Donor
    pair: Pair
    origin: int
    correction: Correction | None = None
    features: Features | None = None


@dataclass(eq=False)
class InFlight:
    """What the method keeps of a request between `plan` and `finish`."""

    plan: Plan
    chosen: dict[int, Chosen] = field(default_factory=dict)


@dataclass(eq=False)
class Second:
    """A second exact reader's deviation from a donor's tokens `[start, stop)`."""

    agent: str
    start: int
    stop: int
    deviation: LowRank


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
        self._features: dict[str, Features] = {}
        self._seconds: dict[str, Second] = {}
        self._requests: dict[str, InFlight] = {}
        self._random = random.Random(self.config.seed)
        self._lock = threading.RLock()

    def book(self, tenant: str = "") -> CorrectionBook:
        """What a tenant's traffic has taught."""
        with self._lock:
            if tenant not in self._books:
                self._books[tenant] = CorrectionBook(self.info, self.config)
            return self._books[tenant]

    # plan ------------------------------------------------------------------------------------

    def reuse(self, prompt: Prompt, found: Found) -> tuple[list[Reuse], list[str]]:
        """The exact prefix; then every run, reused as far as its pair is trusted."""
        notes: list[str] = []
        spans = self.reuse_prefix(prompt, found, notes)
        dial = self.config.setting(prompt.dial)
        state = InFlight(Plan.dense(len(prompt)))
        with self._lock:
            self._requests[prompt.request_id] = state
            audited = dial is not None and self._random.random() < dial.audit
        if dial is None:
            notes.append("the dial is exact: stored runs are computed")
        elif audited and found.runs:
            notes.append("audit: served exactly, to measure what reuse would have cost")
        book = self.book(prompt.tenant)
        for run in found.runs:
            donor = self._donor(prompt, run, book, notes)
            if donor is None:
                continue
            chosen = self._choose(prompt, run, donor, book)
            state.chosen[run.start] = chosen
            if dial is None or audited:
                continue
            if donor.own:
                exact = donor.exact
                spans.append(Reuse(run.start, run.stop, donor.segment, donor.offset, exact=exact))
                continue
            reason = self._distrust(dial, chosen, book)
            if reason:
                notes.append(f"[{run.start}, {run.stop}) is computed: {reason}")
                continue
            spans.append(self._span(dial, chosen, book))
        return spans, notes

    def plan(self, prompt: Prompt) -> Plan:
        """See `LibraryMethod`."""
        plan = super().plan(prompt)
        self._requests[prompt.request_id].plan = plan
        return plan

    def _donor(
        self, prompt: Prompt, run: Run, book: CorrectionBook, notes: list[str]
    ) -> Donor | None:
        ranked = rank_donors(book, run, prompt.agent, self.config.base)
        return next((donor for donor in ranked if self.pin(prompt, donor.segment, notes)), None)

    def _choose(self, prompt: Prompt, run: Run, donor: Donor, book: CorrectionBook) -> Chosen:
        kv = self.library.kv(donor.segment)
        origin = origin_of(prompt.token_ids, run, kv.token_ids.cpu().numpy(), donor.offset)
        second = self._second(donor, run)
        others = [second.agent] if second is not None else []
        pair = pair_of(donor.info.agent, prompt.agent, others)
        features = self._features_of(donor.segment, kv, book)
        if features is not None:
            features = features.slice(donor.offset, donor.offset + len(run))
        correction = book.correction(pair) if self.config.correct else None
        if pair.other and second is not None and features is not None and correction is not None:
            own = LowRank(
                second.deviation.left[:, donor.offset - second.start :][:, : len(run)],
                second.deviation.right,
            )
            features = features.with_other(book.other_features(pair, own))
        elif self.config.correct:
            pair = Pair(pair.donor, pair.reader)
            correction = book.correction(pair)
        if features is None or pair.donor == pair.reader:
            correction = None
        return Chosen(run, donor, pair, origin, correction, features)

    def _distrust(self, dial: Dial, chosen: Chosen, book: CorrectionBook) -> str | None:
        """Why a run is not reused, or `None`."""
        pair, donor = chosen.pair, chosen.donor
        if pair.donor == pair.reader:
            return None
        state = book.pairs.get(Pair(pair.donor, pair.reader))
        long = len(chosen.run) >= _WORTH_LEARNING and donor.info.exact
        seen = state.seen if state is not None else 0
        if long and seen < dial.cold_tokens:
            return (
                f"cold start, {pair.donor}>{pair.reader} has seen {seen} of {dial.cold_tokens} "
                "tokens"
            )
        current = book.pairs.get(pair)
        audited = current.audited if current is not None else None
        if audited is not None and audited > dial.audit_limit:
            return (
                f"{pair.name} was measured at a deviation of {audited:.3f}, above the limit "
                f"{dial.audit_limit:g}"
            )
        if self.config.exact_readers == 2 and donor.info.exact and long:
            second = self._second(donor, chosen.run)
            if second is None:
                return "second exact reader of this segment"
        return None

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
        chosen = self._requests[prompt.request_id].chosen[span.start]
        book = self.book(prompt.tenant)
        if chosen.correction is None or chosen.features is None or book.basis is None:
            return
        features = chosen.features.slice(start - span.start, stop - span.start)
        fading = book.basis.fading(out.positions[0] - chosen.origin)
        chosen.correction.apply(self.info.rope, features, fading, out)

    # finish ----------------------------------------------------------------------------------

    def finish(self, prompt: Prompt, outcome: Outcome | None) -> None:
        """Learn from what was computed exactly, then capture it and release the donors."""
        with self._lock:
            state = self._requests.pop(prompt.request_id, None)
        try:
            if outcome is not None and state is not None and self.config.learn:
                self._learn(prompt, outcome, state)
        finally:
            self._plans.pop(prompt.request_id, None)
            self.library.release(prompt.request_id)
        if outcome is not None and state is not None:
            self._capture(prompt, outcome, state)

    def _learn(self, prompt: Prompt, outcome: Outcome, state: InFlight) -> None:
        end = _exact_end(outcome, state.plan)
        book = self.book(prompt.tenant)
        for chosen in state.chosen.values():
            run, donor, pair = chosen.run, chosen.donor, chosen.pair
            stop = run.stop if outcome.exact else min(run.stop, end)
            learnable = donor.info.exact or self.config.base == "previous"
            if stop <= run.start or donor.own or not learnable or pair.donor == pair.reader:
                continue
            reader = outcome.kv.slice(run.start, stop)
            kv = self.library.kv(donor.segment)
            used = donor.offset + stop - run.start
            # Two tokens more to the left, where there are any, for the layer-0 window.
            lead = min(2, donor.offset)
            channels = to_channels(self.info.rope, kv.slice(donor.offset - lead, used))
            window = windows_of(channels[0])[lead:]
            channels = channels[:, lead:]
            deviation = to_channels(self.info.rope, reader) - channels
            distance = reader.positions[0] - chosen.origin
            plain = Pair(pair.donor, pair.reader)
            book.observe(Observation(plain, channels, window, distance, deviation))
            if self.config.exact_readers == 2 and donor.info.exact and stop == run.stop:
                self._learn_second(chosen, plain, book, channels, window, distance, deviation)

    def _learn_second(
        self,
        chosen: Chosen,
        plain: Pair,
        book: CorrectionBook,
        channels: torch.Tensor,
        window: torch.Tensor,
        distance: torch.Tensor,
        deviation: torch.Tensor,
    ) -> None:
        run, donor = chosen.run, chosen.donor
        second = self._second(donor, run)
        if second is None:
            factors = book.see_other(plain, deviation)
            start = donor.offset
            with self._lock:
                self._seconds[donor.segment] = Second(
                    plain.reader, start, start + len(run), factors
                )
        elif second.agent != plain.reader:
            begin = donor.offset - second.start
            other = LowRank(
                second.deviation.left[:, begin : begin + len(run)], second.deviation.right
            )
            pair = Pair(plain.donor, plain.reader, second.agent)
            book.observe(Observation(pair, channels, window, distance, deviation, other))

    def _capture(self, prompt: Prompt, outcome: Outcome, state: InFlight) -> None:
        book = self.book(prompt.tenant)
        previous = self.config.base == "previous"
        for part in captures(state.plan, outcome, self.library.min_length):
            put = self.library.capture(
                prompt, outcome, part.start, part.stop, part.exact, copies=previous
            )
            if put.id is not None and part.exact and self.config.learn:
                kv = self.library.kv(put.id)
                book.see_donor(to_channels(self.info.rope, kv))
                self._features_of(put.id, kv, book)
        if previous:
            for chosen in state.chosen.values():
                if not outcome.exact and not chosen.donor.own:
                    run = chosen.run
                    self.library.capture(prompt, outcome, run.start, run.stop, False, copies=True)
        self._forget_evicted()

    # what belongs to donors ------------------------------------------------------------------

    def _second(self, donor: Donor, run: Run) -> Second | None:
        """The second exact reader's deviation, if it covers the run."""
        second = self._seconds.get(donor.segment)
        if second is None or donor.offset < second.start:
            return None
        return second if donor.offset + len(run) <= second.stop else None

    def _features_of(self, segment: str, kv: SegmentKV, book: CorrectionBook) -> Features | None:
        """Features of a whole donor, computed once."""
        if book.basis is None:
            return None
        features = self._features.get(segment)
        if features is None:
            features = book.basis.features(to_channels(self.info.rope, kv))
            self._features[segment] = features
        return features

    def _forget_evicted(self) -> None:
        with self._lock:
            for held in (self._features, self._seconds):
                for segment in [name for name in held if self.library.segment_info(name) is None]:
                    held.pop(segment, None)  # type: ignore[attr-defined]

    def donor_bytes(self) -> dict[str, int]:
        """Bytes kept per kind: donors' KV, their features, second readers' factors."""
        return {
            "kv": self.library.store.nbytes,
            "features": sum(features.nbytes for features in list(self._features.values())),
            "seconds": sum(second.deviation.nbytes for second in list(self._seconds.values())),
        }


def _exact_end(outcome: Outcome, plan: Plan) -> int:
    """First position whose KV may be approximate."""
    exact = [(span.start, span.stop) for span in plan.reused() if span.exact]
    end = 0
    for start, stop in sorted((*exact, *outcome.computed)):
        if start > end:
            break
        end = max(end, stop)
    return end


DESCRIPTION = MethodDescription(
    name=Kvcmas.name,
    summary="Reuse corrected by low-rank maps learned online, behind a measured exact head.",
    config=KvcmasConfig,
    build=Kvcmas,
    paper="KVCMAS: Efficient KV cache Correction for Shared Context in Multi-Agent Systems",
    link="https://arxiv.org/abs/2609.34060",
)
