"""Which tokens of a reader's prompt are shared with the first agent's, and what became of them."""

from __future__ import annotations

import numpy as np

from kvcmas.engines.transformers import RequestRecord
from kvcmas.workflow.prompt import TokenIds


def longest_shared_run(prompt: TokenIds, other: TokenIds) -> tuple[int, int]:
    """`[start, stop)` in `prompt` of the longest run of tokens that `other` contains too.

    Takes time proportional to the product of the lengths, at numpy's speed.
    """
    best, end = 0, 0
    lengths = np.zeros(len(other) + 1, dtype=np.int64)  # of the run that ends at each position
    for position, token in enumerate(prompt, 1):
        lengths[1:] = np.where(other == token, lengths[:-1] + 1, 0)
        longest = int(lengths.max())
        if longest > best:
            best, end = longest, position
    return end - best, end


def common_prefix(one: TokenIds, other: TokenIds) -> int:
    """Number of tokens with which both begin."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if differ.size else length


def computed_of(record: RequestRecord, start: int, stop: int) -> int:
    """Tokens of `[start, stop)` that went through the model.

    Spans of computed tokens count as far as they overlap; of a reused span its head and landmarks
    count when any of it lies in the range, and of one computed in some layers its share of them.
    """
    computed = 0
    for span in record.spans:
        overlap = min(span.stop, stop) - max(span.start, start)
        if overlap > 0:
            computed += overlap if span.kind == "compute" else min(span.computed, overlap)
    return computed
