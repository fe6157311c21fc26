"""What a finished request teaches: the reader's exact KV of a run, beside its donor's.

exact request         |  exact prefix  |        run        |      run      |
approximate request   |  exact prefix  | head |   reused   |     reused    |
learned from                           [------)                              heads of first runs
"""

from __future__ import annotations

from dataclasses import replace

from kvcmas.core.channels import to_channels
from kvcmas.core.features import windows_of
from kvcmas.methods.base import Outcome
from kvcmas.methods.captures import exact_end
from kvcmas.methods.kvcmas.book import CorrectionBook, Observation, Pair
from kvcmas.methods.kvcmas.config import KvcmasConfig
from kvcmas.methods.kvcmas.derived import Derived, Second
from kvcmas.methods.kvcmas.requests import Chosen, InFlight
from kvcmas.methods.kvcmas.trust import is_short, learnable, short_pair
from kvcmas.methods.library import DonorLibrary


class Learning:
    """Turns finished requests into observations for a tenant's book."""

    def __init__(self, config: KvcmasConfig, library: DonorLibrary, derived: Derived) -> None:
        self._config = config
        self._library = library
        self._derived = derived

    def learn(self, outcome: Outcome, state: InFlight, book: CorrectionBook) -> None:
        """Observe every run as far as it was computed exactly; its donor must be pinned."""
        self._see_short(outcome, state, book)
        end = exact_end(state.plan, outcome)
        for chosen in state.chosen.values():
            stop = chosen.run.stop if outcome.exact else min(chosen.run.stop, end)
            if stop <= chosen.run.start or not learnable(chosen, self._config):
                continue
            observation = self._observation(outcome, chosen, stop)
            book.observe(observation)
            if not observation.whole or not observation.finite:
                continue
            self._compare_others(outcome, chosen, book)
            if self._config.exact_readers > 1 and chosen.donor.info.exact:
                self._learn_second(chosen, observation, book)

    def _see_short(self, outcome: Outcome, state: InFlight, book: CorrectionBook) -> None:
        """Which short runs were reused as planned, and which were computed after all."""
        for span in state.plan.reused():
            chosen = state.chosen.get(span.start)
            if chosen is None or chosen.donor.own or not is_short(chosen):
                continue
            if span.head.length >= len(span):  # computed by plan: neither agreed nor failed
                continue
            computed = any(
                start <= span.start and span.stop <= stop for start, stop in outcome.computed
            )
            book.see_short(short_pair(chosen), failed=computed)

    def _observation(self, outcome: Outcome, chosen: Chosen, stop: int) -> Observation:
        run, donor = chosen.run, chosen.donor
        rope = self._library.info.rope
        reader = outcome.kv.slice(run.start, stop)
        kv = self._library.kv(donor.segment)
        # Two tokens more to the left, where there are any, for the layer-0 window.
        lead = min(2, donor.offset)
        used = kv.slice(donor.offset - lead, donor.offset + stop - run.start)
        channels = to_channels(rope, used)
        window = windows_of(channels[0])[lead:]
        channels = channels[:, lead:]
        return Observation(
            Pair(chosen.pair.donor, chosen.pair.reader),
            channels,
            window,
            reader.positions[0] - chosen.origin,
            to_channels(rope, reader) - channels,
            whole=stop == run.stop,
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
