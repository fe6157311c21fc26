"""Hashes of every fixed window of tokens, in time linear in the tokens.

Karp and Rabin's polynomial hash modulo 2**64. Token ids are first mixed with a secret salt, so
nobody who does not know the seed can build windows that collide. A hash only proposes; whoever
uses it compares the tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcmas.errors import ConfigError, InputError
from kvcmas.workflow.prompt import TokenIds

_BITS = 64
_MASK = (1 << _BITS) - 1
# Stafford's "variant 13" finaliser, the mixing step of SplitMix64; a bijection on 64 bits.
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31

TokenSequence = Sequence[int] | NDArray[np.integer[Any]]


def as_token_ids(token_ids: TokenSequence) -> TokenIds:
    """`token_ids` as a `[tokens]` int64 array (no copy where it is one already).

    Raises:
        InputError: not one-dimensional, or not integers.
    """
    array = np.asarray(token_ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(
            "token ids must be a one-dimensional sequence of integers, got shape "
            f"{array.shape} of {array.dtype}; pass the ids of one prompt, without a batch axis"
        )
    return array.astype(np.int64, copy=False)


class RollingHash:
    """Hashes all windows of `window` tokens of a sequence at once.

    Args:
        window: tokens in a window, at least 1.
        seed: determines multiplier and salt; equal seeds give equal hashes.

    Raises:
        ConfigError: `window` is below 1.
    """

    def __init__(self, window: int, seed: int) -> None:
        if window < 1:
            raise ConfigError(f"a window needs at least 1 token, got {window}")
        draw = random.Random(seed)
        self.window = window
        self._salt = draw.getrandbits(_BITS)
        # Any odd number has an inverse modulo 2**64; 5 mod 8 gives the longest period.
        self._multiplier = (draw.getrandbits(_BITS) & ~0b111 | 0b101) & _MASK
        self._inverse = pow(self._multiplier, -1, 1 << _BITS)

    def windows(self, token_ids: TokenIds) -> NDArray[np.uint64]:
        """Hash of `token_ids[i:i+window]` for every i: `[max(0, tokens - window + 1)]` uint64."""
        count = token_ids.shape[0] - self.window + 1
        if count < 1:
            return np.empty(0, dtype=np.uint64)
        terms = self._mix(token_ids) * _powers(self._multiplier, token_ids.shape[0])
        sums = np.zeros(token_ids.shape[0] + 1, dtype=np.uint64)
        np.cumsum(terms, out=sums[1:])
        # The sum of a window carries the factor multiplier**i of its place; divide it away.
        differences: NDArray[np.uint64] = sums[self.window :] - sums[:count]
        return differences * _powers(self._inverse, count)

    def _mix(self, token_ids: TokenIds) -> NDArray[np.uint64]:
        mixed = token_ids.astype(np.uint64) + np.uint64(self._salt)
        for shift, factor in _MIX:
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return mixed ^ (mixed >> np.uint64(_LAST_SHIFT))


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """`base**0, base**1, ...` modulo 2**64: `[count]` uint64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)
