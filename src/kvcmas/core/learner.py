"""Learns the correction of one agent pair online, from tokens that were computed anyway.

Every observation is a run of tokens whose exact reader KV and donor KV are both at hand. Each
fifth observation is held out: the kind of map of every layer (none, linear, with a hidden
layer) and its regularisation are chosen by the error there. Nothing is corrected before that
error is lower than the error of no correction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcmas.core.correction import Correction
from kvcmas.core.features import Features
from kvcmas.core.hidden import HiddenMap, train_hidden
from kvcmas.core.lowrank import factorise
from kvcmas.core.moments import Moments, reduce_rank, solve_ridge
from kvcmas.core.reservoir import Reservoir

_HOLDOUT_EVERY = 5
_HOLDOUT_AT = 2


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """How a pair's correction is learned; sizes in tokens unless said otherwise.

    rank: of the correction's output. target_dim: width of the space in which moments are kept.
    ridges: candidates for the penalty, dimensionless. min_tokens: training tokens before the
    first fit. growth: a refit happens when the training tokens have grown by this factor.
    margin: share of the held-out error that a richer map must save. hidden: units of the hidden
    layer, 0 for linear maps only. hidden_tokens: training tokens below which
    a hidden layer would overfit and is not tried. hidden_steps: training steps of it.
    reservoir: tokens sampled for the hidden layer. basis_tokens: tokens after which the target
    directions are fixed. state_dtype: in which the correction is kept; it computes in float32.
    """

    rank: int = 32
    target_dim: int = 64
    ridges: tuple[float, ...] = (0.003, 0.03, 0.3)
    min_tokens: int = 1500
    growth: float = 2.0
    margin: float = 0.01
    hidden: int = 32
    hidden_tokens: int = 5000
    hidden_steps: int = 200
    reservoir: int = 4096
    basis_tokens: int = 1500
    state_dtype: torch.dtype = torch.float16


class PairLearner:
    """Statistics of one pair and the correction fitted on them.

    Not thread safe: its owner serialises `observe` and `refit`. `correction` is replaced as a
    whole, so a reader that holds one keeps a consistent map.
    """

    def __init__(self, config: LearnerConfig, seed: int = 0) -> None:
        self.config = config
        self.seed = seed
        self.correction: Correction | None = None
        self.observations = 0
        self._basis: Tensor | None = None
        self._waiting: list[tuple[int, Features, Tensor, Tensor]] = []
        self._moments: tuple[Moments, Moments] | None = None
        share = _HOLDOUT_EVERY
        self._reservoirs = (
            Reservoir(config.reservoir, seed),
            Reservoir(max(config.reservoir // share, 1), seed + 1),
        )
        self._fitted_at = 0

    @property
    def tokens(self) -> int:
        """Training tokens seen so far."""
        return self._moments[0].count if self._moments else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the statistics (not of the correction)."""
        moments = sum(part.nbytes for part in self._moments or ())
        return moments + sum(reservoir.nbytes for reservoir in self._reservoirs)

    def observe(self, features: Features, fading: Tensor, deviation: Tensor) -> None:
        """Take in a run of tokens.

        fading: `[tokens]`. deviation: `[layers, tokens, channels]` float32, reader minus donor.
        """
        if not len(features):
            return
        fold = int(self.observations % _HOLDOUT_EVERY == _HOLDOUT_AT)
        self.observations += 1
        if self._basis is not None:
            self._absorb(fold, features, fading, deviation)
            return
        self._waiting.append((fold, features, fading.clone(), deviation))
        if sum(len(waiting[1]) for waiting in self._waiting) >= self.config.basis_tokens:
            seen = torch.cat([waiting[3] for waiting in self._waiting], dim=1)
            self._basis = factorise(seen, self.config.target_dim, seed=self.seed).right
            for waiting in self._waiting:
                self._absorb(*waiting)
            self._waiting.clear()

    def _absorb(self, fold: int, features: Features, fading: Tensor, deviation: Tensor) -> None:
        basis = self._basis
        if basis is None:
            return
        targets = torch.bmm(deviation, basis.mT)
        x = features.matrix(fading)
        if self._moments is None:
            shape = (x.shape[0], x.shape[2], targets.shape[2], x.device)
            self._moments = (Moments.zeros(*shape), Moments.zeros(*shape))
        self._moments[fold].add(x, targets)
        if self.config.hidden:
            self._reservoirs[fold].add(features, fading, targets)

    def due(self) -> bool:
        """Whether enough was seen since the last fit to fit again."""
        if self._moments is None or not self._moments[1].count:
            return False
        return self.tokens >= max(self.config.min_tokens, self._fitted_at * self.config.growth)

    def refit(self) -> Correction | None:
        """Fit anew on everything seen; `None` when no layer gains by a correction."""
        if self._moments is None or self._basis is None or not self._moments[1].count:
            return None
        train, held = self._moments
        self._fitted_at = train.count
        weights, left = self._linear(train, held)
        inward, outward = reduce_rank(weights, train.plus(held), self.config.rank)
        useless = left >= 1.0
        inward[useless] = 0
        outward[useless] = torch.eye(
            outward.shape[1], outward.shape[2], dtype=outward.dtype, device=outward.device
        )
        hidden, better = self._hidden(inward.float(), outward.float())
        left = torch.where(better > 0, left * (1 - better), left)
        layers = torch.nonzero(left < 1.0).flatten().tolist()
        self.correction = self._assemble(layers, left, inward, outward, hidden, better)
        return self.correction

    def _linear(self, train: Moments, held: Moments) -> tuple[Tensor, Tensor]:
        """Weights per layer, fitted on all tokens, and the held-out energy they leave."""
        everything = train.plus(held)
        best = held.yy * (1 - self.config.margin)
        weights = torch.zeros_like(train.xy)
        left = torch.ones_like(held.yy)
        for ridge in self.config.ridges:
            error = held.error(solve_ridge(train, ridge))
            improved = error < best
            best = torch.where(improved, error, best)
            left = torch.where(improved, error / held.yy.clamp_min(1e-30), left)
            refitted = solve_ridge(everything, ridge)
            weights = torch.where(improved[:, None, None], refitted, weights)
        return weights, left

    def _hidden(self, inward: Tensor, outward: Tensor) -> tuple[HiddenMap | None, Tensor]:
        """A hidden layer on what the linear map leaves, and the held-out share that it saves."""
        none = torch.zeros(inward.shape[0], dtype=torch.float64, device=inward.device)
        train, held = self._reservoirs
        if not self.config.hidden or train.seen < self.config.hidden_tokens or not len(held):
            return None, none
        features, targets = train.sample()
        residual = torch.bmm(targets, outward.mT) - torch.bmm(features, inward)
        trained = train_hidden(
            features,
            residual,
            hidden=self.config.hidden,
            steps=self.config.hidden_steps,
            seed=self.seed,
        )
        features, targets = held.sample()
        linear = torch.bmm(features, inward)
        before = (targets - linear @ outward).square().sum((1, 2)).double()
        after = (targets - (linear + trained(features)) @ outward).square().sum((1, 2)).double()
        saved = 1 - after / before.clamp_min(1e-30)
        # Where nothing is left to save (layer 0 of a model without positions, say), zero over
        # zero must not read as all of it saved.
        improved = (after < before) & (saved > self.config.margin)
        return trained, torch.where(improved, saved, none)

    def _assemble(
        self,
        layers: list[int],
        left: Tensor,
        inward: Tensor,
        outward: Tensor,
        hidden: HiddenMap | None,
        better: Tensor,
    ) -> Correction | None:
        if not layers or self._basis is None:
            return None
        kept, dtype = torch.tensor(layers, device=inward.device), self.config.state_dtype
        full = torch.bmm(outward[kept].float(), self._basis[kept])
        slots = [slot for slot, layer in enumerate(layers) if better[layer] > 0]
        part = None
        if hidden is not None and slots:
            chosen = kept[torch.tensor(slots, device=kept.device)]
            part = HiddenMap(
                hidden.inward[chosen].to(dtype),
                hidden.bias[chosen].to(dtype),
                hidden.outward[chosen].to(dtype),
            )
        return Correction(
            layers=tuple(layers),
            inward=inward[kept].to(dtype),
            outward=full.to(dtype),
            hidden_layers=tuple(slots) if part is not None else (),
            hidden=part,
            gain=tuple(round(value, 4) for value in left[kept].tolist()),
        )
