"""Whether stored KV is, for a given prompt, the reader's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcmas.store.info import SegmentInfo
from kvcmas.store.segments import SegmentStore
from kvcmas.workflow.prefix_index import prefix_hash
from kvcmas.workflow.prompt import Prompt


class Ownership:
    """Tells whether a donor's KV was computed behind the prompt's very own tokens."""

    def __init__(self, prompt: Prompt, store: SegmentStore[Any]) -> None:
        self._prompt = prompt
        self._store = store
        self._hashes: dict[int, str] = {}

    def owns(self, name: str, info: SegmentInfo, start: int, offset: int) -> bool:
        """For a segment whose first token would stand at `start`, used from `offset` on."""
        if info.start != start or not (info.exact or info.agent == self._prompt.agent):
            return False
        if start not in self._hashes:
            self._hashes[start] = prefix_hash(self._prompt.token_ids[:start])
        if self._hashes[start] != info.prefix:
            return False
        if offset == 0:
            return True
        segment = self._store.get(name)
        if segment is None:
            return False
        stored = segment.tokens()[:offset]
        return bool(np.array_equal(stored, self._prompt.token_ids[start : start + offset]))
