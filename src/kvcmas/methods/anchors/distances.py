"""How far a text's KV is from that of the anchors. Layer by layer, so that scratch stays small.

A text is `[layers, tokens, channels]` float32 (see `core.channels`), and its first token is number
`first` of its content. Only tokens at the same index are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from torch import Tensor

from kvcmas.methods.anchors.states import Stretch


def value_distances(text: Tensor, first: int, bases: Sequence[Stretch], keys: int) -> Tensor:
    """L2 distances over the values of all layers, `[anchors]`. keys: channels of keys."""
    found = text.new_zeros(len(bases))
    for number, base in enumerate(bases):
        start, stop = _overlap(text, first, base)
        for layer in range(text.shape[0]):
            own = text[layer, start - first : stop - first, keys:]
            found[number] += (own - base.rows(layer, start, stop)[:, keys:]).square().sum()
    return found.sqrt()


def token_distances(
    text: Tensor, first: int, bases: Sequence[Stretch], deltas: Sequence[Stretch], keys: int
) -> tuple[Tensor, Tensor]:
    """Mean absolute differences of each token, of keys and of values, `[anchors, tokens]` each.

    Infinite where an anchor's base or delta does not reach.
    """
    layers, tokens, channels = text.shape
    of_keys = text.new_full((len(bases), tokens), inf)
    of_values = of_keys.clone()
    for number, (base, delta) in enumerate(zip(bases, deltas, strict=True)):
        start, stop = _overlap(text, first, base)
        start, stop = max(start, delta.first), min(stop, delta.stop)
        if start >= stop:
            continue
        where = slice(start - first, stop - first)
        sums = text.new_zeros(2, stop - start)
        for layer in range(layers):
            apart = (text[layer, where] - base.rows(layer, start, stop)).abs_()
            sums[0] += apart[:, :keys].sum(1)
            sums[1] += apart[:, keys:].sum(1)
        of_keys[number, where] = sums[0] / (layers * keys)
        of_values[number, where] = sums[1] / (layers * (channels - keys))
    return of_keys, of_values


def channel_distances(text: Tensor, first: int, bases: Sequence[Stretch]) -> Tensor:
    """Mean absolute differences of each channel over the tokens, `[anchors, layers, channels]`."""
    layers, _, channels = text.shape
    found = text.new_full((len(bases), layers, channels), inf)
    for number, base in enumerate(bases):
        start, stop = _overlap(text, first, base)
        if start >= stop:
            continue
        for layer in range(layers):
            own = text[layer, start - first : stop - first]
            found[number, layer] = (own - base.rows(layer, start, stop)).abs_().mean(0)
    return found


def _overlap(text: Tensor, first: int, base: Stretch) -> tuple[int, int]:
    return max(first, base.first), min(first + text.shape[1], base.stop)
