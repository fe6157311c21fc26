"""A source's KV as its reader gets it, and how far it is from exact KV."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvcmas.core.rope import Rope
from kvcmas.core.segment import CHANNEL, HEAD, TOKEN, SegmentKV
from kvcmas.engines.vllm.messages import Source, Sums
from kvcmas.methods.kvcmas.filling import Added, fill_corrected
from kvcmas.methods.move import fill_moved


def approximate(rope: Rope, donor: SegmentKV, source: Source, added: Added | None) -> SegmentKV:
    """The donor's KV at the source's positions: keys moved, then corrected. Shares no memory.

    added: with features of the whole donor.
    """
    kept = donor.slice(source.offset, source.offset + len(source))
    positions = torch.arange(source.start, source.stop, device=donor.keys.device)[None]
    out = SegmentKV(
        torch.empty_like(kept.keys, memory_format=torch.contiguous_format),
        torch.empty_like(kept.values, memory_format=torch.contiguous_format),
        kept.token_ids,
        positions,
    )
    if added is None:
        fill_moved(rope, donor, source.offset, out)
    else:
        fill_corrected(rope, donor, source.offset, out, added, first=source.offset)
    return out


def deviation_sums(keys: Tensor, values: Tensor, approx: SegmentKV) -> Sums:
    """Sums of a deviation. keys, values: exact, `[layers, kv_heads, tokens, head_dim]`."""
    error, energy = zip(
        _sums(keys.float(), approx.keys.float()),
        _sums(values.float(), approx.values.float()),
        strict=True,
    )
    return Sums(torch.cat(error).cpu().numpy(), torch.cat(energy).cpu().numpy())


def unknown_sums(layers: int) -> Sums:
    """Of a deviation that could not be measured: NaN, so that it agrees with no tolerance."""
    nothing = np.full(2 * layers, np.nan)
    return Sums(nothing, nothing)


def _sums(exact: Tensor, approx: Tensor) -> tuple[Tensor, Tensor]:
    """`[layers]` float64: squared differences, and squares of the exact KV."""
    axes = (HEAD, TOKEN, CHANNEL)
    error = (approx - exact).square().sum(axes, dtype=torch.float64)
    return error, exact.square().sum(axes, dtype=torch.float64)
