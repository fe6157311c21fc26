"""A prompt as the methods see it: token ids, and who asks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One request before it is planned.

    token_ids: `[tokens]` int64, the tokenizer's ids of the whole rendered chat; matching works
        on them and never changes them.
    agent: name of the agent that asks; corrections and own prefixes belong to it.
    tenant: requests of different tenants share nothing.
    dial: overrides the method's dial for this request, for example `"exact"`.
    request_id: unique among the requests in flight.
    """

    token_ids: TokenIds
    agent: str
    request_id: str
    tenant: str = ""
    dial: str | None = None

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])
