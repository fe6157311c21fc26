"""Segments of known content, and a pool whose two tiers are both this machine's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.vllm.pool import TieredPool

CPU = torch.device("cpu")


def make(tokens: int = 4, seed: int = 0, device: torch.device = CPU) -> SegmentKV:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 1, tokens, 4, generator=generator).to(device)
    values = torch.randn(2, 1, tokens, 4, generator=generator).to(device)
    ids = torch.randint(100, (tokens,), generator=generator).to(device)
    return SegmentKV(keys, values, ids, torch.arange(tokens, device=device)[None])


SIZE = make().nbytes


def tensors(segment: SegmentKV) -> tuple[Tensor, ...]:
    return segment.keys, segment.values, segment.token_ids, segment.positions


def same(one: SegmentKV | None, other: SegmentKV) -> bool:
    return one is not None and all(
        torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True)
    )


def two_tiers(device: int, host: int) -> TieredPool:
    """A pool whose tiers are both this machine's memory; every move copies."""
    return TieredPool(
        device * SIZE, host * SIZE, to_device=SegmentKV.clone, to_host=SegmentKV.clone
    )
