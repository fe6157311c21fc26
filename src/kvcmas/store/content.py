"""What a store holds of a segment: its KV, or its tokens alone.

An engine whose scheduler and workers are apart plans with the tokens; the KV lies elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcmas.errors import InputError


class Content(Protocol):
    """A run of tokens that occupies bytes. `SegmentKV` is one."""

    def __len__(self) -> int:
        """Number of tokens."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes of a budget."""

    def clone(self) -> Self:
        """What the store may keep: it shares no memory that somebody else will overwrite."""

    def tokens(self) -> NDArray[np.int64]:
        """Token ids, `[tokens]` int64, on the CPU."""


ContentT = TypeVar("ContentT", bound=Content)


@dataclass(frozen=True, slots=True, eq=False)
class TokenRun:
    """The tokens of a segment whose KV is held elsewhere.

    token_ids: `[tokens]` int64; not copied, so nobody may change them afterwards.
    nbytes: what the KV occupies where it is held, over all workers that have a part of it.

    Raises:
        InputError: the ids are not one row, or the KV would occupy nothing.
    """

    token_ids: NDArray[np.int64]
    nbytes: int

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or self.nbytes < 1:
            raise InputError(
                "a run of tokens needs ids [tokens] and at least 1 byte, got shape "
                f"{self.token_ids.shape} and {self.nbytes} bytes"
            )

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    def clone(self) -> Self:
        """The run itself."""
        return self

    def tokens(self) -> NDArray[np.int64]:
        """Token ids, `[tokens]` int64."""
        return self.token_ids
