"""Maps with one hidden layer, one per model layer, trained side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu

_LEARNING_RATE = 3e-3
_WEIGHT_DECAY = 1e-2


@dataclass(frozen=True, eq=False)
class HiddenMap:
    """`gelu(x @ inward + bias) @ outward`, per layer.

    inward `[layers, features, hidden]`, bias `[layers, 1, hidden]`, outward
    `[layers, hidden, targets]`; float32.
    """

    inward: Tensor
    bias: Tensor
    outward: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """`[layers, tokens, features]` to `[layers, tokens, targets]`."""
        return gelu(torch.baddbmm(self.bias, features, self.inward)) @ self.outward


def train_hidden(
    features: Tensor,
    targets: Tensor,
    *,
    hidden: int,
    steps: int,
    batch: int = 512,
    seed: int = 0,
) -> HiddenMap:
    """Fit by AdamW on the mean squared error, every layer scaled to unit target energy.

    features: `[layers, tokens, features]` float32. targets: `[layers, tokens, targets]`.
    """
    layers, tokens, width = features.shape
    scale = targets.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-8)
    random = torch.Generator().manual_seed(seed)

    def parameter(*shape: int, spread: float) -> Tensor:
        values = torch.randn(shape, generator=random) * spread
        return values.to(features.device).requires_grad_()

    with torch.inference_mode(False), torch.enable_grad():
        features, targets = features.clone(), (targets / scale).clone()
        inward = parameter(layers, width, hidden, spread=width**-0.5)
        bias = parameter(layers, 1, hidden, spread=0.0)
        outward = parameter(layers, hidden, targets.shape[-1], spread=0.0)
        parameters = [inward, bias, outward]
        optimiser = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, total_iters=steps)
        for _ in range(steps):
            index = torch.randint(tokens, (min(batch, tokens),), generator=random)
            index = index.to(features.device)
            guess = HiddenMap(inward, bias, outward)(features[:, index])
            loss = (guess - targets[:, index]).square().mean((1, 2)).sum()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
    return HiddenMap(inward.detach(), bias.detach(), outward.detach() * scale)
