"""How far approximate KV, and what a model says with it, is from the exact one."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcmas.core.segment import CHANNEL, HEAD, TOKEN, SegmentKV
from kvcmas.errors import InputError


def relative_deviation(exact: SegmentKV, approx: SegmentKV) -> float:
    """Relative deviation of `approx` from `exact` (dimensionless; 0 is equal).

    Per layer, and for keys and values apart, the sum of squared differences is divided by the
    sum of squares of the exact KV; the result is the square root of the mean of these ratios.
    So every layer counts alike, whatever the size of its keys. Layer 0 deviates only where the
    move or the correction is wrong and is included for that reason.

    Returns:
        0.0 for segments without tokens; infinity where exact KV is zero and the other is not;
        NaN when either holds NaN.

    Raises:
        InputError: the segments differ in shape.
    """
    if exact.keys.shape != approx.keys.shape or exact.values.shape != approx.values.shape:
        raise InputError(
            f"only segments of one shape can be compared, got {tuple(exact.keys.shape)} and "
            f"{tuple(approx.keys.shape)}"
        )
    if len(exact) == 0:
        return 0.0
    ratios = torch.cat(
        (_energy_ratio(exact.keys, approx.keys), _energy_ratio(exact.values, approx.values))
    )
    return float(ratios.mean().sqrt())


def _energy_ratio(exact: Tensor, approx: Tensor) -> Tensor:
    """`[layers]` float32: energy of the difference over the energy of `exact`."""
    axes = (HEAD, TOKEN, CHANNEL)
    reference = exact.float()
    error = (approx.float() - reference).square().sum(axes)
    energy = reference.square().sum(axes)
    return torch.where(error == 0, error, error / energy)


def kl_divergence(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """KL(p || q) in nats of each token's distribution, summed in float64.

    Args:
        logits_p: `[tokens, vocab]`, of the exact run.
        logits_q: `[tokens, vocab]`, of the run to judge.

    Returns:
        `[tokens]` float64.

    Raises:
        InputError: the shapes differ or are not `[tokens, vocab]`.
    """
    _check_logits(logits_p, logits_q)
    log_p = torch.log_softmax(logits_p.double(), dim=-1)
    log_q = torch.log_softmax(logits_q.double(), dim=-1)
    # A token that p rules out contributes nothing, also where q rules it out (inf - inf).
    terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q))
    return terms.sum(dim=-1)


def top1_agreement(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """Whether both runs would pick the same token: `[tokens]` bool.

    Raises:
        InputError: the shapes differ or are not `[tokens, vocab]`.
    """
    _check_logits(logits_p, logits_q)
    return logits_p.argmax(dim=-1) == logits_q.argmax(dim=-1)


def _check_logits(logits_p: Tensor, logits_q: Tensor) -> None:
    if logits_p.ndim != 2 or logits_p.shape != logits_q.shape:
        raise InputError(
            "logits must both be [tokens, vocab], got "
            f"{tuple(logits_p.shape)} and {tuple(logits_q.shape)}"
        )
