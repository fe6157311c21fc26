"""Prefix matching: stored token runs that begin at position 0 of a prompt.

Runs are kept sorted as byte strings. In that order the run that shares the longest beginning
with a prompt is a neighbour of the prompt's own place, so a look-up is one binary search.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left, insort

import numpy as np

from kvcmas.errors import InputError, KvcmasError
from kvcmas.workflow.prompt import TokenIds
from kvcmas.workflow.rolling_hash import TokenSequence, as_token_ids
from kvcmas.workflow.runs import common_prefix

_DIGEST_BYTES = 16


def prefix_hash(token_ids: TokenSequence) -> str:
    """Identifies the tokens before a segment: BLAKE2b of the ids, 32 hexadecimal digits.

    The same on every machine; the empty prefix has a hash of its own.

    Raises:
        InputError: the ids are not a sequence of integers.
    """
    data = as_token_ids(token_ids).astype("<i8", copy=False).tobytes()
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


class PrefixIndex:
    """Finds the stored run that agrees longest with the beginning of a prompt.

    Safe to use from many threads. Knows no tenants: whoever serves several keeps an index for
    each. A look-up compares `O(tokens * log(runs))` tokens at worst, at memory speed.
    """

    def __init__(self) -> None:
        self._sorted: list[bytes] = []
        self._names: dict[bytes, dict[str, None]] = {}
        self._contents: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, segment_id: str) -> bool:
        return segment_id in self._contents

    def add(self, segment_id: str, token_ids: TokenSequence) -> None:
        """Index a run whose first token stood at position 0.

        Raises:
            InputError: the name is in use, or the ids are not a sequence of integers.
        """
        content = as_token_ids(token_ids).tobytes()
        with self._lock:
            if segment_id in self._contents:
                raise InputError(
                    f"segment {segment_id!r} is already indexed; remove it first, or choose "
                    "another name"
                )
            if content not in self._names:
                insort(self._sorted, content)
            self._names.setdefault(content, {})[segment_id] = None
            self._contents[segment_id] = content

    def remove(self, segment_id: str) -> bool:
        """Forget a run; return whether it was indexed."""
        with self._lock:
            content = self._contents.pop(segment_id, None)
            if content is None:
                return False
            names = self._names[content]
            del names[segment_id]
            if not names:
                del self._names[content]
                del self._sorted[bisect_left(self._sorted, content)]
            return True

    def longest(self, token_ids: TokenSequence) -> tuple[str, int] | None:
        """The run with the longest common prefix, and its length in tokens (at least 1).

        Of runs that agree equally long, which one is returned depends on their tokens only; of
        several names for the same tokens, the newest is returned. `None` when no first token
        agrees.

        Raises:
            InputError: the ids are not a sequence of integers.
        """
        prompt = as_token_ids(token_ids)
        key = prompt.tobytes()
        with self._lock:
            place = bisect_left(self._sorted, key)
            best, length = b"", 0
            for content in self._sorted[max(0, place - 1) : place + 1]:
                common = common_prefix(prompt, _ids(content))
                if common > length:
                    best, length = content, common
            if not length:
                return None
            return next(reversed(self._names[best])), length

    def check_integrity(self) -> None:
        """Raises KvcmasError when the index contradicts itself."""
        with self._lock:
            if self._sorted != sorted(self._names):
                raise KvcmasError("the sorted runs are out of order or differ from the named runs")
            names = {name: content for content, held in self._names.items() for name in held}
            if names != self._contents or not all(self._names.values()):
                raise KvcmasError("names and runs of the prefix index do not agree")


def _ids(content: bytes) -> TokenIds:
    return np.frombuffer(content, dtype=np.int64)
