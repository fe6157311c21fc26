"""What one tenant's traffic has taught: feature basis, corrections, landmarks, distances."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcmas.core.correction import Correction
from kvcmas.core.distances import AgentDistances
from kvcmas.core.features import FeatureBasis, Features, whitening, windows_of
from kvcmas.core.landmarks import LandmarkModel
from kvcmas.core.learner import LearnerConfig, PairLearner
from kvcmas.core.lowrank import LowRank, factorise
from kvcmas.core.model_info import ModelInfo
from kvcmas.methods.kvcmas.config import KvcmasConfig
from kvcmas.methods.kvcmas.observation import Observation
from kvcmas.methods.kvcmas.pair import Pair

_WAITING_TOKENS = 6000
_AUDIT_MEMORY = 0.8  # weight of what was measured before, in the running mean
_AUDIT_TOKENS = 64  # shortest run that says something of a pair
_HEAD = 16  # tokens nearer to the role prefix are always computed: nothing to learn or measure


@dataclass(eq=False)
class PairState:
    """What is known of one pair.

    seen: tokens learned from. audits: whole runs measured; audited, blind: running means of their
    relative deviation with the correction and without, behind the tokens that a head covers.
    """

    learner: PairLearner
    landmarks: LandmarkModel
    seen: int = 0
    audits: int = 0
    audited: float | None = None
    blind: float | None = None


@dataclass
class CorrectionBook:
    """Learned state of one tenant; `observe` is serialised, look-ups may run beside it."""

    info: ModelInfo
    config: KvcmasConfig
    basis: FeatureBasis | None = None
    distances: AgentDistances = field(default_factory=AgentDistances)
    pairs: dict[Pair, PairState] = field(default_factory=dict)
    other_bases: dict[Pair, Tensor] = field(default_factory=dict)
    _numbers: dict[Pair, int] = field(default_factory=dict)
    _sample: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _waiting: list[Observation] = field(default_factory=list)
    _others: dict[Pair, list[Tensor]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def see_donor(self, channels: Tensor) -> None:
        """Show the exact KV of a new donor; the first ones fix the feature basis."""
        if self.basis is None and bool(channels.isfinite().all()):
            with self._lock:
                self._collect(channels)

    def _collect(self, channels: Tensor) -> None:
        if self.basis is not None:  # fixed by another request in the meantime
            return
        self._sample.append((channels, windows_of(channels[0])))
        if sum(part.shape[1] for part, _ in self._sample) < self.config.basis_tokens:
            return
        self.basis = FeatureBasis.fit(
            torch.cat([part for part, _ in self._sample], dim=1),
            torch.cat([window for _, window in self._sample]),
            own_dim=self.config.own_dim,
            window_dim=self.config.window_dim,
            fade=self.config.fade,
            seed=self.config.seed,
        )
        self._sample.clear()
        waiting, self._waiting = self._waiting, []
        for observation in waiting:
            self.observe(observation)

    def observe(self, observation: Observation) -> None:
        """Learn from a run; refit its pair's correction when that is due.

        KV that is not finite would spoil the statistics for good, and is left out.
        """
        if not observation.finite:
            return
        with self._lock:
            if self.basis is None:
                held = sum(len(waiting) for waiting in self._waiting)
                if held + len(observation) <= _WAITING_TOKENS:
                    self._waiting.append(observation)
                return
            pair, deviation = observation.pair, observation.deviation
            features = self._features(observation)
            if features is None:
                return
            state = self.state(pair)
            self._audit(state, features, observation)
            if observation.whole and not pair.other:
                self.see_distance(pair.donor, pair.reader, deviation, observation.channels)
            state.landmarks.observe(features, observation.distance, deviation)
            fading = self.basis.fading(observation.distance)
            behind = torch.nonzero(observation.distance >= _HEAD).flatten()
            state.learner.observe(features.take(behind), fading[behind], deviation[:, behind])
            state.seen += len(observation)
            if state.learner.due():
                state.learner.refit()

    def see_distance(self, donor: str, reader: str, deviation: Tensor, channels: Tensor) -> None:
        """Learn how far two agents are from each other, from whole runs that both computed.

        First tokens alone deviate more, so they would make often used donors look far.
        """
        if not bool(deviation.isfinite().all()):
            return
        with self._lock:
            self.distances.observe(donor, reader, deviation, channels)

    def meet(self, pair: Pair) -> int:
        """The pair's number, in the order in which the tenant's traffic shows them."""
        with self._lock:
            return self._numbers.setdefault(pair, len(self._numbers))

    def state(self, pair: Pair) -> PairState:
        """The state of a pair, made empty when it is new."""
        with self._lock:
            if pair not in self.pairs:
                seed = self.config.seed + self.meet(pair)
                learner = LearnerConfig(
                    rank=self.config.rank,
                    hidden=self.config.hidden,
                    min_tokens=self.config.fit_tokens,
                    basis_tokens=self.config.fit_tokens,
                )
                self.pairs[pair] = PairState(
                    PairLearner(learner, seed), LandmarkModel(self.info.layers)
                )
            return self.pairs[pair]

    def correction(self, pair: Pair) -> Correction | None:
        """The pair's correction, once it is better than none."""
        state = self.pairs.get(pair)
        return state.learner.correction if state is not None else None

    def other_features(self, pair: Pair, other: LowRank) -> Tensor | None:
        """The second exact reader's deviation as features, `[layers, tokens, other_dim]`."""
        basis = self.other_bases.get(Pair(pair.donor, pair.other))
        return None if basis is None else other.left @ (other.right @ basis)

    def see_other(self, pair: Pair, deviation: Tensor) -> LowRank:
        """Keep a second exact reader's deviation in compact form; learn its basis."""
        key = Pair(pair.donor, pair.reader)
        with self._lock:
            if key not in self.other_bases:
                parts = self._others.setdefault(key, [])
                parts.append(deviation)
                if sum(part.shape[1] for part in parts) >= self.config.basis_tokens:
                    joined = torch.cat(self._others.pop(key), dim=1)
                    self.other_bases[key] = whitening(
                        joined, self.config.other_dim, seed=self.config.seed
                    )
        return factorise(deviation, self.config.rank, seed=self.config.seed)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of correction states by reader; independent of contexts and their number."""
        sizes: dict[str, int] = {}
        for pair, state in list(self.pairs.items()):
            correction = state.learner.correction
            if correction is not None:
                sizes[pair.reader] = sizes.get(pair.reader, 0) + correction.nbytes
        return sizes

    def shared_bytes(self) -> int:
        """Bytes of what all agents share: the feature bases."""
        others = sum(basis.numel() * basis.element_size() for basis in self.other_bases.values())
        return others + (self.basis.nbytes if self.basis is not None else 0)

    def learning_bytes(self) -> int:
        """Bytes of the statistics from which corrections are fitted."""
        states = list(self.pairs.values())
        return sum(state.learner.nbytes + state.landmarks.nbytes for state in states)

    def _features(self, observation: Observation) -> Features | None:
        if self.basis is None:
            return None
        features = self.basis.features(observation.channels, observation.window)
        if observation.other is None:
            return features
        other = self.other_features(observation.pair, observation.other)
        return None if other is None else features.with_other(other)

    def _audit(self, state: PairState, features: Features, observation: Observation) -> None:
        """Measure on exact KV, before learning from it, what reuse would have given."""
        behind = observation.distance >= _HEAD
        if not observation.whole or int(behind.sum()) < _AUDIT_TOKENS or self.basis is None:
            return
        error = observation.deviation
        exact = (observation.channels + error)[:, behind]
        blind = self._relative(error[:, behind], exact)
        correction = state.learner.correction
        if correction is not None and self.config.correct:
            error = error.clone()
            fading = self.basis.fading(observation.distance)
            error[list(correction.layers)] -= correction.deviation(features, fading)
        state.audits += 1
        state.audited = _running(state.audited, self._relative(error[:, behind], exact))
        state.blind = _running(state.blind, blind)

    def _relative(self, error: Tensor, exact: Tensor) -> float:
        """Relative deviation as `core.deviation` defines it."""
        split = self.info.kv_heads * self.info.head_dim
        ratios = [
            error[..., part].square().sum((1, 2))
            / exact[..., part].square().sum((1, 2)).clamp_min(1e-30)
            for part in (slice(None, split), slice(split, None))
        ]
        return float(torch.stack(ratios).mean().sqrt())


def _running(mean: float | None, value: float) -> float:
    return value if mean is None else _AUDIT_MEMORY * mean + (1 - _AUDIT_MEMORY) * value
