"""Plans prompts: which runs are reused, from whom, and what of them is computed all the same.

    find (library) -> choose a donor for every run -> trust it or not -> spans

No tensor is touched: this also runs where there is no KV, beside the scheduler of an engine
whose workers hold it. What was learned comes through `Knowledge`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvcmas.methods.captures import Ranges
from kvcmas.methods.donors import Donor, Found, Run
from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.config import Dial, KvcmasConfig
from kvcmas.methods.kvcmas.knowledge import Knowledge
from kvcmas.methods.kvcmas.pair import Pair
from kvcmas.methods.kvcmas.selection import (
    head_of,
    landmark_count,
    origin_of,
    pair_of,
    rank_donors,
)
from kvcmas.methods.kvcmas.shorts import ShortRuns, short_outcomes
from kvcmas.methods.kvcmas.trust import refusal
from kvcmas.methods.library import DonorLibrary
from kvcmas.methods.pinning import pin, reuse_prefix
from kvcmas.methods.tiling import plan_of
from kvcmas.workflow.plan import Plan, Reuse
from kvcmas.workflow.prompt import Prompt


@dataclass(slots=True)
class Decision:
    """What is reused of a prompt.

    spans: by position, every donor pinned. notes: why other runs are not.
    chosen: every run that was found with its donor, by the run's start, reused or not.
    """

    spans: list[Reuse] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    chosen: dict[int, Chosen] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and every run that was found with its donor, by the run's start."""

    plan: Plan
    chosen: dict[int, Chosen]


class Planner:
    """Plans requests of all tenants; they share nothing. Safe to use from many threads.

    library: whose donors are found and pinned, for whoever ends the request to release.
    """

    def __init__(self, config: KvcmasConfig, library: DonorLibrary[Any]) -> None:
        self.config = config
        self.library = library
        self._shorts: dict[str, ShortRuns] = {}
        self._draws: dict[str, random.Random] = {}
        self._lock = threading.Lock()

    def plan(self, prompt: Prompt, knowledge: Knowledge) -> Planned:
        """Plan a request and pin its donors; end with `finished` and the library's `release`.

        knowledge: of the prompt's tenant.

        Raises:
            ConfigError: the prompt's dial is unknown; nothing is pinned.
        """
        dial = self.config.setting(prompt.dial)
        found = self.library.find(prompt)
        made = self.decide(prompt, found, dial, knowledge)
        plan = plan_of(len(prompt), made.spans, (*found.notes, *made.notes))
        return Planned(plan, made.chosen)

    def decide(
        self, prompt: Prompt, found: Found, dial: Dial | None, knowledge: Knowledge
    ) -> Decision:
        """The exact prefix; then every run, reused as far as its pair is trusted.

        dial: `None` for an exact request.
        """
        made = Decision()
        made.spans = reuse_prefix(self.library, prompt, found, made.notes)
        for run in found.runs:
            donor = self._donor(prompt, run, knowledge, made.notes)
            if donor is not None:
                made.chosen[run.start] = self._choose(prompt, run, donor, knowledge)
        if dial is None:
            if found.runs:
                made.notes.append("the dial is exact: stored runs are computed")
            return made
        if self._is_audited(prompt.tenant, dial):
            if found.runs:
                made.notes.append("audit: served exactly, to measure what reuse would have cost")
            return made
        shorts = self.shorts(prompt.tenant)
        for chosen in made.chosen.values():
            self._add(made, dial, chosen, knowledge, shorts)
        return made

    def finished(self, tenant: str, plan: Plan, chosen: Iterable[Chosen], computed: Ranges) -> None:
        """Count which short runs of a request were reused as planned.

        computed: positions that went through the model.
        """
        if self.config.learn:
            shorts = self.shorts(tenant)
            for pair, failed in short_outcomes(plan, chosen, computed):
                shorts.see(pair, failed)

    def shorts(self, tenant: str) -> ShortRuns:
        """What has happened to a tenant's short runs."""
        with self._lock:
            return self._shorts.setdefault(tenant, ShortRuns())

    def share_shorts(self, other: Planner, tenants: Iterable[str]) -> None:
        """From now on count short runs of these tenants together with the other planner."""
        shorts = {tenant: other.shorts(tenant) for tenant in tenants}
        with self._lock:
            self._shorts |= shorts

    def _is_audited(self, tenant: str, dial: Dial) -> bool:
        """Drawn for each tenant apart, so that none can tell what the others do."""
        with self._lock:
            draws = self._draws.setdefault(tenant, random.Random(self.config.seed))
            return draws.random() < dial.audit

    def _add(
        self,
        made: Decision,
        dial: Dial,
        chosen: Chosen,
        knowledge: Knowledge,
        shorts: ShortRuns,
    ) -> None:
        """Add a run to the spans, or take away from them what is needed to learn from it."""
        run, donor = chosen.run, chosen.donor
        if donor.own:
            made.spans.append(
                Reuse(run.start, run.stop, donor.segment, donor.offset, exact=donor.exact)
            )
            return
        refused = refusal(dial, chosen, knowledge, shorts, self.config)
        if refused is None:
            made.spans.append(self._span(dial, chosen, knowledge))
            return
        made.notes.append(f"[{run.start}, {run.stop}) is computed: {refused.reason}")
        if not refused.teaches:
            return
        # Computed behind approximate KV it would be approximate itself and teach nothing.
        made.notes.extend(
            f"[{span.start}, {span.stop}) is computed: it stands before [{run.start}, {run.stop})"
            for span in made.spans
            if not span.exact
        )
        made.spans = [span for span in made.spans if span.exact]

    def _donor(
        self, prompt: Prompt, run: Run, knowledge: Knowledge, notes: list[str]
    ) -> Donor | None:
        ranked = rank_donors(knowledge, run, prompt.agent, self.config.base)
        return next(
            (donor for donor in ranked if pin(self.library, prompt, donor.segment, notes)), None
        )

    def _choose(self, prompt: Prompt, run: Run, donor: Donor, knowledge: Knowledge) -> Chosen:
        stored = self.library.content(donor.segment).tokens()
        origin = origin_of(prompt.token_ids, run, stored, donor.offset)
        plain = Pair(donor.info.agent, prompt.agent)
        if plain.donor == plain.reader or not self.config.correct:
            return Chosen(run, donor, plain, origin)
        second = knowledge.second(donor, len(run))
        pair = pair_of(*plain[:2], [second] if second is not None else [])
        if pair.other and knowledge.corrected(pair):
            return Chosen(run, donor, pair, origin, corrected=True)
        return Chosen(run, donor, plain, origin, knowledge.corrected(plain))

    def _span(self, dial: Dial, chosen: Chosen, knowledge: Knowledge) -> Reuse:
        run, donor = chosen.run, chosen.donor
        head = head_of(dial, len(run))
        count = landmark_count(dial, len(run), head.length)
        landmarks: tuple[int, ...] = ()
        if self.config.landmarks and count:
            landmarks = knowledge.landmarks(chosen, head.length, count)
        return Reuse(
            run.start,
            run.stop,
            donor.segment,
            donor.offset,
            correction=chosen.pair.name if chosen.corrected else None,
            head=head,
            landmarks=landmarks,
        )
