"""Block hashes of approximate KV: chains of their own, so that nobody else's request hits them.

vLLM finds a block by the hash of its tokens and of everything before it. Blocks from the first
approximate token on get another chain, which depends on what was reused there and for whom:

    plain      h0 - h1 - h2 - h3 - h4
    reader     h0 - h1 - v2 - v3 - v4        v2 = hash(h1, tokens, what is reused, for whom)

A plain request never hits v2 to v4. The same agent with the same donors does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcmas.workflow.plan import Plan
from kvcmas.workflow.prompt import TokenIds

BlockHashes = list[Any]
Hasher = Callable[[Any, Sequence[int], tuple[Any, ...] | None], Any]
"""`(parent hash, token ids, extra keys) -> hash`, vLLM's own."""

_KEPT = 8


def first_approximate(plan: Plan) -> int | None:
    """Position of the first token whose KV is approximate by plan; `None` if there is none."""
    for span in plan.reused():
        if not span.exact and span.head.length < len(span):
            return span.start + span.head.length
    return None


def variant_chain(
    hasher: Hasher,
    block_size: int,
    token_ids: Sequence[int],
    hashes: BlockHashes,
    plan: Plan,
    variant: tuple[Any, ...],
    from_block: int = 0,
) -> BlockHashes:
    """The block hashes of a request under a plan, in place of its plain ones.

    variant: agent, tenant and whatever else tells one use of the same donor from another.
    from_block: blocks in front of it keep the hashes that are given.
    """
    first = first_approximate(plan)
    if first is None:
        return hashes
    start = max(first // block_size, from_block)
    if start >= len(hashes):
        return hashes
    keys: dict[int, list[Any]] = {}
    for span in plan.reused():
        if not span.exact:
            block = max(span.start // block_size, start)
            use = (span.segment, span.offset, span.start, span.stop, span.correction or "")
            keys.setdefault(block, []).append((*use, *span.landmarks))
    chain = list(hashes[:start])
    parent = chain[-1] if chain else None
    for block in range(start, len(hashes)):
        extra = ("kvcmas", *variant) if block == start else ()
        extra = (*extra, *keys.get(block, ()))
        tokens = token_ids[block * block_size : (block + 1) * block_size]
        parent = hasher(parent, tokens, extra or None)
        chain.append(parent)
    return chain


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A prompt that an agent was served with, its block hashes, and where approximation begins."""

    token_ids: TokenIds
    hashes: BlockHashes
    first: int


@dataclass(frozen=True, slots=True)
class Own:
    """Blocks of an agent's earlier prompt that begin a new one. first: see `Variant`."""

    hashes: BlockHashes
    first: int


class OwnVariants:
    """The last prompts of each agent that were served approximately.

    What an agent was served with stays its context in later turns, as it would in vLLM's prefix
    cache: only what is new in the prompt is planned.
    """

    def __init__(self, agents: int = 1024) -> None:
        self._most = agents
        self._agents: OrderedDict[tuple[str, str], list[Variant]] = OrderedDict()

    def remember(self, tenant: str, agent: str, variant: Variant) -> None:
        """An agent was served with this."""
        key = (tenant, agent)
        kept = self._agents.pop(key, [])
        self._agents[key] = [variant, *kept][:_KEPT]
        if len(self._agents) > self._most:
            self._agents.popitem(last=False)

    def find(self, tenant: str, agent: str, token_ids: TokenIds, block_size: int) -> Own | None:
        """The longest common beginning with an earlier prompt, in whole blocks."""
        best: Own | None = None
        for variant in self._agents.get((tenant, agent), ()):
            length = min(len(variant.token_ids), len(token_ids))
            differ = np.flatnonzero(variant.token_ids[:length] != token_ids[:length])
            same = int(differ[0]) if differ.size else length
            blocks = min(same // block_size, len(variant.hashes))
            if blocks * block_size <= variant.first:
                continue  # all of it is exact: the plain chain finds it too
            if best is None or blocks > len(best.hashes):
                best = Own(list(variant.hashes[:blocks]), variant.first)
        return best
