"""What a finished request teaches: the reader's exact KV of a run, beside its donor's."""

from __future__ import annotations

from dataclasses import replace

from kvcmas.core.channels import to_channels
from kvcmas.methods.base import Outcome
from kvcmas.methods.kv_library import KVLibrary
from kvcmas.methods.kvcmas.book import CorrectionBook
from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.config import KvcmasConfig
from kvcmas.methods.kvcmas.derived import Derived, Second
from kvcmas.methods.kvcmas.lessons import Lesson, lessons_of
from kvcmas.methods.kvcmas.observation import Observation, observation
from kvcmas.methods.kvcmas.requests import InFlight
from kvcmas.methods.kvcmas.shorts import short_outcomes


class Learning:
    """Turns finished requests into observations for a tenant's book."""

    def __init__(self, config: KvcmasConfig, library: KVLibrary, derived: Derived) -> None:
        self._config = config
        self._library = library
        self._derived = derived

    def learn(self, outcome: Outcome, state: InFlight, book: CorrectionBook) -> None:
        """Observe every run as far as it was computed exactly; its donor must be pinned."""
        chosen, computed = state.chosen.values(), outcome.computed
        for pair, _ in short_outcomes(state.plan, chosen, computed):
            book.meet(pair)
        for lesson in lessons_of(state.plan, chosen, computed, outcome.exact, self._config):
            seen = self._observation(outcome, lesson)
            book.observe(seen)
            if not seen.whole or not seen.finite:
                continue
            self._compare_others(outcome, lesson.chosen, book)
            if self._config.exact_readers > 1 and lesson.chosen.donor.info.exact:
                self._learn_second(lesson.chosen, seen, book)

    def _observation(self, outcome: Outcome, lesson: Lesson) -> Observation:
        chosen = lesson.chosen
        return observation(
            self._library.info.rope,
            chosen.pair.plain,
            outcome.kv.slice(lesson.start, lesson.stop),
            self._library.kv(chosen.donor.segment),
            chosen.donor.offset,
            chosen.origin,
            lesson.whole,
        )

    def _compare_others(self, outcome: Outcome, chosen: Chosen, book: CorrectionBook) -> None:
        """Distances to the other exact donors of the run: without them none would be tried."""
        run, reader = chosen.run, chosen.pair.reader
        rope = self._library.info.rope
        compared = {chosen.pair.donor, reader}
        for source in run.sources:
            kv = self._library.store.get(source.segment)
            if kv is None or not source.info.exact or source.info.agent in compared:
                continue
            compared.add(source.info.agent)
            channels = to_channels(rope, kv.slice(source.offset, source.offset + len(run)))
            deviation = to_channels(rope, outcome.kv.slice(run.start, run.stop)) - channels
            book.see_distance(source.info.agent, reader, deviation, channels)

    def _learn_second(self, chosen: Chosen, seen: Observation, book: CorrectionBook) -> None:
        run, donor = chosen.run, chosen.donor
        second = self._derived.second(donor, len(run))
        start, stop = donor.offset, donor.offset + len(run)
        if second is None:
            factors = book.see_other(seen.pair, seen.deviation)
            self._derived.keep_second(donor.segment, Second(*seen.pair[:2], start, stop, factors))
        elif second.agent != seen.pair.reader:
            pair = seen.pair._replace(other=second.agent)
            book.observe(replace(seen, pair=pair, other=second.slice(start, stop)))
