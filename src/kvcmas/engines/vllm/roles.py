"""Who asks: the agent's name, from the prompt's own tokens.

The role prefix is the prompt's first message, up to the token that ends it, where that message is
the agent's own. Where it is not (there is none, it is the template's default one, or it is so
long that it holds the context itself), the first tokens behind what the template puts in front
of every prompt name the agent: agents that differ only later share a name, and whether their KV
agrees is measured all the same.

A client can give the name instead (`hints.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from kvcmas.workflow.prompt import TokenIds

_LONGEST = 1024
_FIRST = 32


class RoleNames:
    """Names agents by their role prefixes.

    Args:
        end_ids: tokens that end a message in the model's chat template; none if it has no such.
        defaults: what the template puts in front when a prompt has no system message: token ids.
    """

    def __init__(self, end_ids: Iterable[int] = (), defaults: TokenIds | None = None) -> None:
        self._ends = np.array(sorted(end_ids), dtype=np.int64)
        self._defaults = np.zeros(0, np.int64) if defaults is None else defaults

    def prefix(self, token_ids: TokenIds) -> TokenIds:
        """The tokens that name the agent."""
        common = _common(token_ids, self._defaults)
        if common < len(self._defaults) or not common:
            ends = np.flatnonzero(np.isin(token_ids[:_LONGEST], self._ends))
            if ends.size and int(ends[0]) + 1 < len(token_ids) // 2 + _FIRST:
                return token_ids[: int(ends[0]) + 1]
            common = 0
        return token_ids[: common + _FIRST]

    def name(self, token_ids: TokenIds) -> str:
        """A short name, the same for every prompt with the same role prefix."""
        ids = np.ascontiguousarray(self.prefix(token_ids), dtype=np.int64)
        return "agent-" + hashlib.blake2b(ids.tobytes(), digest_size=6).hexdigest()


def _common(one: TokenIds, other: TokenIds) -> int:
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if differ.size else length
