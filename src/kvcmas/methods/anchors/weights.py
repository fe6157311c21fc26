"""The gate, and the weights of anchors, from distances.

Sources: KVCOMM, https://arxiv.org/abs/2510.12872; KVCMAS, https://arxiv.org/abs/2609.34060.
"""

from __future__ import annotations

from math import log2

import torch
from torch import Tensor

_SHARP = 0.1
_LEAST = 1e-12
LEAST_ANCHORS = 2
"""With fewer there is no entropy to judge by."""


def entropy_bits(distances: Tensor) -> float:
    """Entropy in bits of `softmax(-distances)`, `[anchors]`."""
    shares = torch.softmax(-distances.double(), dim=0)
    return float(torch.special.entr(shares).sum() / torch.log(torch.tensor(2.0)))


def is_new(distances: Tensor, gamma: float) -> bool:
    """Whether a text is too far from all anchors to be predicted from them.

    It is when there are fewer than two, or when no anchor stands out: the entropy of the
    softmax of minus the distances exceeds `gamma` times its maximum.

    distances: `[anchors]`, of the anchors that are at least as long as the text.
    """
    count = distances.shape[0]
    return count < LEAST_ANCHORS or entropy_bits(distances) > gamma * log2(count)


def softmax_weights(distances: Tensor, sharp: bool = False) -> Tensor:
    """Weights of anchors along the first axis; they sum to 1 wherever a distance is finite.

    distances: `[anchors, ...]`; infinite where an anchor does not reach, and its weight is 0.
    sharp: distances are divided by a tenth of the smallest one first. As published they are not,
        and as mean absolute differences of keys and values are far below 1, the weights are then
        nearly uniform.
    """
    if sharp:
        distances = distances / (_SHARP * distances.amin(dim=0)).clamp_min(_LEAST)
    return torch.softmax(-distances, dim=0).nan_to_num(0.0)
