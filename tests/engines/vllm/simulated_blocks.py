"""Blocks of a simulated KV cache: tables, a prefix cache, and what every place of them holds.

What a computed token holds tells everything that it attended to, so that two contents are equal
only if they came about in the same way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .fake_requests import BLOCK, FakeRequest


@dataclass(frozen=True, slots=True)
class Content:
    """KV of one token. behind: of a computed one, all that it attended to; of one that was moved
    here, the donor's content and what was done to it."""

    moved: bool
    tenant: str
    token: int
    behind: Any


def exact_kv(tenant: str, tokens: Sequence[int]) -> list[Content]:
    """What a full prefill gives."""
    made: list[Content] = []
    behind = 0
    for token in tokens:
        made.append(Content(False, tenant, token, behind))
        behind = hash((behind, made[-1]))
    return made


class Blocks:
    """As vLLM's KV cache manager: full blocks are found by hash until they are written anew."""

    def __init__(self, count: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self.tables: dict[str, list[int]] = {}
        self.kv: dict[tuple[int, int], Content] = {}
        self._uses = [0] * count
        self._hash_of: dict[int, Any] = {}
        self._by_hash: dict[Any, int] = {}

    def hit(self, request: FakeRequest) -> list[int]:
        """Blocks that begin the request, the last token left out."""
        found = []
        for name in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            if name not in self._by_hash:
                break
            found.append(self._by_hash[name])
        return found

    def allocate(self, request: FakeRequest, tokens: int, found: Sequence[int] = ()) -> bool:
        """Room for so many tokens, behind the blocks that were found; false if there is none."""
        table = self.tables.get(request.request_id, list(found))
        new = max(0, -(-tokens // BLOCK) - len(table))
        if new > len(self.free) - sum(block in self.free for block in found):
            return False
        for block in found:
            self._use(block)
        for _ in range(new):
            block = next(iter(self.free))
            self._use(block)
            self._forget(block)
            for place in range(BLOCK):
                self.kv.pop((block, place), None)
            table.append(block)
        self.tables[request.request_id] = table
        full = min(tokens, request.num_tokens) // BLOCK
        for block, name in zip(table[:full], request.block_hashes[:full], strict=True):
            if block not in self._hash_of and name not in self._by_hash:
                self._hash_of[block], self._by_hash[name] = name, block
        return True

    def release(self, request_id: str) -> None:
        """The request needs its blocks no more; they can still be found."""
        for block in reversed(self.tables.pop(request_id, [])):
            self._uses[block] -= 1
            if not self._uses[block]:
                self.free[block] = None

    def evict(self, blocks: Sequence[int]) -> None:
        """These blocks hold nothing of use."""
        for block in blocks:
            self._forget(block)

    def shared(self, blocks: Sequence[int]) -> bool:
        """Whether several requests use one of them."""
        return any(self._uses[block] > 1 for block in blocks)

    def read(self, blocks: Sequence[int], start: int, stop: int) -> list[Content | None]:
        """Contents of positions `[start, stop)`."""
        return [self.kv.get((blocks[spot // BLOCK], spot % BLOCK)) for spot in range(start, stop)]

    def write(self, blocks: Sequence[int], position: int, content: Content) -> None:
        """KV of one position."""
        self.kv[blocks[position // BLOCK], position % BLOCK] = content

    def _use(self, block: int) -> None:
        self._uses[block] += 1
        self.free.pop(block, None)

    def _forget(self, block: int) -> None:
        name = self._hash_of.pop(block, None)
        if name is not None:
            del self._by_hash[name]
