"""What `kvcomm` and `kvcmas-anchors` have in common.

A prompt's placeholders are the runs that another agent's prompt holds too. Either all of them are
predicted, or the whole prompt is computed behind its exact prefix and becomes a lesson:

    plan     placeholders > gate of those not seen before > reuse all, or compute all
    fill     base moved + weighted deviations of the anchors
    finish   computed exactly: an anchor for each new text; then everything that was staged
             becomes known. Nothing of a request that failed does.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from kvcmas.core.channels import to_channels
from kvcmas.core.model_info import ModelInfo
from kvcmas.core.segment import SegmentKV
from kvcmas.methods.anchors.config import AnchorConfig
from kvcmas.methods.anchors.contents import Content, Contents
from kvcmas.methods.anchors.distances import value_distances
from kvcmas.methods.anchors.estimate import of_text
from kvcmas.methods.anchors.known import Known, Placed, Placeholder, Staged
from kvcmas.methods.anchors.pool import Anchor, Pool
from kvcmas.methods.anchors.prediction import Prediction
from kvcmas.methods.anchors.states import State, Stretch
from kvcmas.methods.anchors.weights import LEAST_ANCHORS, is_new
from kvcmas.methods.base import Outcome
from kvcmas.methods.captures import captures
from kvcmas.methods.donors import Donor, Found, Run
from kvcmas.methods.fullshared import EXACT_DIAL
from kvcmas.methods.kv_library import KVLibrary
from kvcmas.methods.library_method import LibraryMethod
from kvcmas.methods.move import fill_moved
from kvcmas.methods.pinning import pin, reuse_prefix
from kvcmas.workflow.plan import Reuse
from kvcmas.workflow.prompt import Prompt

_STAGED = 1 << 10  # more shared texts than any prompt has


class AnchorMethod(LibraryMethod):
    """See the module docstring. Safe to use from many threads."""

    copies: ClassVar[bool]
    """Whether every reader's KV is kept as a donor, so that the next one starts from it."""

    def __init__(self, info: ModelInfo, config: AnchorConfig) -> None:
        super().__init__(
            KVLibrary(info, config.budget_bytes, config.min_length, min_prefix=config.min_prefix)
        )
        self.config = config
        self.key_channels = info.kv_heads * info.head_dim
        self._tenants: dict[str, Known] = {}
        self._requests: dict[str, Staged] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def edge(self, donor: Donor, prompt: Prompt) -> str:
        """Whose deviation it is."""

    @abstractmethod
    def set_base(self, prompt: Prompt, staged: Staged, placeholder: Placeholder, run: Donor) -> str:
        """Give a placeholder its base; returns why there is none, or nothing.

        run: the donor, from the placeholder's first token on.
        """

    @abstractmethod
    def base_state(self, channels: Tensor) -> State:
        """How an anchor keeps its base, `[layers, tokens, channels]`."""

    @abstractmethod
    def delta_state(self, channels: Tensor) -> State:
        """How an anchor keeps a deviation, `[layers - 1, tokens, channels]`."""

    def more_spans(
        self, prompt: Prompt, known: Known, staged: Staged, fixed: list[Run], notes: list[str]
    ) -> list[Reuse]:
        """What else is reused when all placeholders are. fixed: runs of the reader's own."""
        return []

    def more_lessons(
        self, prompt: Prompt, staged: Staged, outcome: Outcome, learned: Placeholder, anchor: Anchor
    ) -> None:
        """What else an anchor learns."""

    def more_known(self, prompt: Prompt, staged: Staged, known: Known) -> None:
        """What else becomes known; called under the lock."""

    def state_bytes(self, tenant: str = "") -> int:
        """Bytes of a tenant's anchors, and of texts encoded by themselves."""
        with self._lock:
            known = self._tenants.get(tenant)
            return 0 if known is None else known.nbytes

    def known(self, tenant: str) -> Known:
        """What is known of a tenant; empty and not kept when that is nothing."""
        with self._lock:
            return self._tenants.get(tenant) or self._empty()

    def staged(self, prompt: Prompt) -> Staged:
        """What a request has staged."""
        with self._lock:
            return self._requests.setdefault(prompt.request_id, Staged(Contents(_STAGED)))

    def reuse(self, prompt: Prompt, found: Found) -> tuple[list[Reuse], list[str]]:
        """The prefix, and all placeholders or none of them."""
        notes: list[str] = []
        staged, known = self.staged(prompt), self.known(prompt.tenant)
        spans = reuse_prefix(self.library, prompt, found, notes)
        own, fixed = self.look(prompt, found, staged, known)
        staged.learn = [one for one in staged.placeholders if self._teaches(one)]
        reasons = [one for one in staged.placeholders if one.why]
        notes.extend(f"[{one.start}, {one.stop}) is computed: {one.why}" for one in reasons)
        exact = prompt.dial == EXACT_DIAL
        if exact and found.runs:
            notes.append("the dial is exact: stored runs are computed")
        if exact or reasons or not staged.placeholders:
            if reasons and len(reasons) < len(staged.placeholders):
                notes.append("so is every other shared text of the prompt")
            own = [run for run in own if run.sources[0].exact]
        else:
            staged.reused, staged.learn = staged.placeholders, []
            spans.extend(self._span(one, staged) for one in staged.placeholders)
            spans.extend(self.more_spans(prompt, known, staged, fixed, notes))
        for run in own:
            donor = run.sources[0]
            if pin(self.library, prompt, donor.segment, notes):
                spans.append(
                    Reuse(run.start, run.stop, donor.segment, donor.offset, exact=donor.exact)
                )
        return sorted(spans, key=lambda span: span.start), notes

    def look(
        self, prompt: Prompt, found: Found, staged: Staged, known: Known
    ) -> tuple[list[Run], list[Run]]:
        """Stage and judge the placeholders; returns runs of the reader's very own KV, and others
        that only the reader's own prompts hold."""
        own: list[Run] = []
        fixed: list[Run] = []
        staged.placeholders = []
        for run in found.runs:
            mine = [donor for donor in run.sources if donor.own]
            donor = next((one for one in run.sources if one.info.agent != prompt.agent), None)
            if mine:
                best = max(mine, key=lambda one: one.info.exact)
                own.append(Run(run.start, run.stop, (best,)))
            elif donor is None:
                fixed.append(run)
            else:
                staged.placeholders.append(self._placeholder(prompt, run, donor, staged, known))
        for placeholder in staged.placeholders:
            self._judge(placeholder, known)
        return own, fixed

    def fill(self, prompt: Prompt, span: Reuse, start: int, stop: int, out: SegmentKV) -> None:
        """Write the base's KV, keys moved, and add what the anchors predict."""
        placed = self.staged(prompt).placed.get(span.start)
        if placed is None or span.correction is None:
            super().fill(prompt, span, start, stop, out)
            return
        rope, begin = self.library.info.rope, start - span.start
        fill_moved(rope, placed.source, placed.offset + begin, out)
        if placed.prediction is None:
            placed.prediction = self.predict(placed)
        placed.prediction.add(rope, out, begin)

    def predict(self, placed: Placed) -> Prediction:
        """The deviation of a placeholder: its own, or a weighted sum over the anchors."""
        return of_text(self.library.info.rope, placed.reads, self.key_channels, self.config.sharp)

    def finish(self, prompt: Prompt, outcome: Outcome | None) -> None:
        """Release the donors; learn from and keep what was computed."""
        plan = self._plans.pop(prompt.request_id, None)
        with self._lock:
            staged = self._requests.pop(prompt.request_id, None)
        self.library.release(prompt.request_id)
        if plan is None or outcome is None or staged is None:
            return
        self._commit(prompt, staged, outcome)
        kept = captures(plan, outcome.computed, outcome.exact, self.library.min_length)
        ranges = [(part.start, part.stop, part.exact) for part in kept]
        if self.copies:
            ranges += [(one.start, one.stop, False) for one in staged.reused]
        for start, stop, exact in ranges:
            self.library.capture(prompt, outcome, start, stop, exact, copies=self.copies)

    def _empty(self) -> Known:
        return Known(Contents(self.config.contents), Pool(self.config.anchors))

    def _placeholder(
        self, prompt: Prompt, run: Run, donor: Donor, staged: Staged, known: Known
    ) -> Placeholder:
        ids = prompt.token_ids[run.start : run.stop]
        located = staged.contents.locate(ids) or known.contents.locate(ids)
        if located is None:
            staged.contents.use(Content(ids.copy()))
            located = staged.contents.locate(ids)
        if located is None:
            raise LookupError("a content that was just added is not found")
        placeholder = Placeholder(
            run.start + located.start,
            run.start + located.stop,
            located.at,
            located.content,
            self.edge(donor, prompt),
        )
        cut = Donor(donor.segment, donor.offset + located.start, donor.info)
        placeholder.why = self.set_base(prompt, staged, placeholder, cut)
        return placeholder

    def _judge(self, one: Placeholder, known: Known) -> None:
        """Decide whether a placeholder can be predicted, and from what."""
        content, anchor = one.content, one.content.anchor
        if one.source is None:
            return
        if anchor is not None and anchor in known.pool.anchors:
            delta = anchor.deltas.get(one.edge)
            if delta is not None and delta.first <= one.at and one.at + len(one) <= delta.stop:
                one.own, one.anchors = delta, [anchor]
        if content.new is None:
            content.new = self._is_new(one, known)
        if one.own is not None:
            return
        one.anchors = known.pool.of_edge(one.edge)
        if content.new:
            one.why = "it is too far from all anchors, or there are too few"
        elif not one.anchors:
            one.why = f"no anchor knows how {one.edge} deviates"

    def _is_new(self, one: Placeholder, known: Known) -> bool:
        if self.config.gate != "entropy":
            return self.config.gate == "new"
        anchors = known.pool.reaching(one.at + len(one))
        if len(anchors) < LEAST_ANCHORS:
            return True
        distances = value_distances(
            one.text(self.library.info.rope),
            one.at,
            [anchor.base for anchor in anchors],
            self.key_channels,
        )
        return is_new(distances, self.config.gamma)

    def _teaches(self, one: Placeholder) -> bool:
        """Whether an exact request makes an anchor of this text, or adds to it."""
        if one.source is None or one.own is not None:
            return False
        return bool(one.content.new) or not one.anchors or self.config.gate == "known"

    def _span(self, one: Placeholder, staged: Staged) -> Reuse:
        if one.source is None:
            raise LookupError(f"[{one.start}, {one.stop}) is to be reused without a base")
        staged.placed[one.start] = Placed(one.source, one.offset, one)
        correction = "anchors" if one.own is None else "own anchor"
        return Reuse(one.start, one.stop, one.segment, one.offset, correction=correction)

    def _commit(self, prompt: Prompt, staged: Staged, outcome: Outcome) -> None:
        rope = self.library.info.rope
        lessons: list[tuple[Placeholder, Anchor]] = []
        for one in staged.learn if outcome.exact else ():
            exact = outcome.kv.slice(one.start, one.stop)
            text = one.text(rope)
            delta = to_channels(rope, exact) - text
            lesson = Anchor(Stretch(one.at, self.base_state(text)))
            lesson.deltas[one.edge] = Stretch(one.at, self.delta_state(delta[1:]))
            self.more_lessons(prompt, staged, outcome, one, lesson)
            lessons.append((one, lesson))
        with self._lock:
            known = self._tenants.get(prompt.tenant) or self._empty()
            for one in staged.placeholders:
                if one.content.new is not None:
                    known.contents.use(one.content)
            for one, lesson in lessons:
                known.teach(one.content, lesson)
            for one in staged.reused:
                for anchor in one.anchors:
                    anchor.used += 1
            self.more_known(prompt, staged, known)
            if len(known.contents) or known.fixed:
                self._tenants[prompt.tenant] = known
