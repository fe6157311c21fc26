"""The donors of all tenants: looking up, pinning, adding.

    find -> pin -> (the engine fills and computes) -> release -> add

What is held of a donor is its KV (`kv_library`) or, where that lies elsewhere, its tokens.

One byte budget for all tenants, and indexes for each: a look-up sees the segments of its own
tenant only, names of segments are random, and a tenant that holds nothing leaves no trace.

Position 0. The first token of a prompt draws attention unlike any other, so its KV is never used
anywhere else, and no other KV is put in its place: a run neither contains position 0 nor takes
the KV of a donor's first token (in models that have one, the begin-of-text token).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Generic

from kvcmas.errors import InputError, KvcmasError
from kvcmas.methods.donors import Donor, Found, PrefixHit, Run
from kvcmas.methods.gathering import LONG, core_of, gather
from kvcmas.methods.losses import Losses
from kvcmas.methods.options import check_int
from kvcmas.methods.ownership import Ownership
from kvcmas.methods.pins import Pins
from kvcmas.methods.shelf import Shelf
from kvcmas.store.content import ContentT
from kvcmas.store.info import Put, SegmentInfo
from kvcmas.store.segments import SegmentStore
from kvcmas.workflow.matching import Match
from kvcmas.workflow.prefix_index import prefix_hash
from kvcmas.workflow.prompt import Prompt, TokenIds


class DonorLibrary(Generic[ContentT]):
    """Segments of one model under a byte budget. Safe to use from many threads.

    Args:
        budget_bytes: most bytes of KV that are held, for all tenants together.
        min_length: shortest run in tokens that is reused or captured.
        min_prefix: shortest exact prefix in tokens that is reused.
        runs: whether runs at any offset are found, or exact prefixes only.
        tenant_bytes: most bytes of KV that are held for one tenant; `None` for no quota. A tenant
            at its quota evicts its own segments, so it cannot push out those of others.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(
        self,
        budget_bytes: int,
        min_length: int = 32,
        *,
        min_prefix: int = 16,
        runs: bool = True,
        tenant_bytes: int | None = None,
    ) -> None:
        check_int("budget_bytes", budget_bytes, 0)
        check_int("min_length", min_length, 1)
        check_int("min_prefix", min_prefix, 1)
        if tenant_bytes is not None:
            check_int("tenant_bytes", tenant_bytes, 0)
        self.min_length = min_length
        self.min_prefix = min_prefix
        self.store: SegmentStore[ContentT] = SegmentStore(budget_bytes, tenant_bytes)
        self._runs = runs
        self._pins = Pins(self.store)
        self._shelves: dict[str, Shelf] = {}
        self._tenants: dict[str, str] = {}
        self._losses = Losses(self.store)
        # Held while segments come and go, so that store and indexes agree; a look-up goes
        # without, and a segment that leaves meanwhile is noticed when it is pinned.
        self._writing = threading.Lock()

    def find(self, prompt: Prompt) -> Found:
        """What is stored of a prompt; linear in its tokens, and pins nothing."""
        shelf = self._shelves.get(prompt.tenant)
        if shelf is None:
            return Found(
                notes=self._losses.notes(prompt.tenant, "nothing is stored for this tenant")
            )
        prefix = self._prefix(prompt, shelf)
        # Neither position 0 (see above) nor the last token, which gives the first logits.
        first = max(1, prefix.length if prefix else 0)
        owner = Ownership(prompt, self.store)
        rest_ids = prompt.token_ids[first:-1]
        matches = [self._gathered(match, rest_ids, shelf) for match in shelf.runs(rest_ids)]
        runs = tuple(
            run for match in matches if (run := self._run(match, first, owner)) is not None
        )
        notes: tuple[str, ...] = ()
        rest = len(prompt) - 1 - first
        if not runs and (prefix is None or (self._runs and rest >= self.min_length)):
            notes = self._losses.notes(prompt.tenant, self._missed(prefix))
        return Found(prefix, runs, notes)

    def pin(self, request_id: str, segments: Iterable[str]) -> frozenset[str]:
        """Hold segments until `release(request_id)`; returns those that are still here."""
        return self._pins.hold(request_id, segments)

    def release(self, request_id: str) -> frozenset[str]:
        """Give back all pins of a request, if it has any.

        Returns the segments that were removed while they were pinned and are gone for good now.
        """
        return self._pins.release(request_id)

    def pinned(self) -> int:
        """Number of segments that requests in flight hold."""
        return len(self._pins)

    def content(self, segment: str) -> ContentT:
        """What is held of a segment, preferably a pinned one.

        Raises:
            PlanError: no such segment is here.
        """
        return self._pins.content(segment)

    def segment_info(self, segment: str) -> SegmentInfo | None:
        """What is known of a segment; `None` if it is not here."""
        return self.store.info(segment)

    def tenant_infos(self, tenant: str) -> list[SegmentInfo]:
        """The segments of one tenant, oldest first."""
        return [info for info in self.store.infos() if info.tenant == tenant]

    def add(
        self,
        prompt: Prompt,
        token_ids: TokenIds,
        start: int,
        stop: int,
        exact: bool,
        content: ContentT,
        *,
        copies: bool = False,
    ) -> Put:
        """Keep positions `[start, stop)` of a finished request as a new segment.

        Nothing is stored when all of its tokens are in a stored donor that is at least as exact
        (`reason` says so). When it continues an older beginning of the same agent's, that one is
        dropped, and named as `continued`.

        Args:
            token_ids: `[tokens]` int64 of the prompt and of what was generated.
            exact: the KV is what a full prefill gives.
            content: what to hold of these positions; it is cloned.
            copies: donors of other agents do not count as the same text, so that the KV of
                several agents is kept (never for beginnings: they do not depend on the agent).

        Raises:
            InputError: the content has another length.
        """
        if len(content) != stop - start:
            raise InputError(f"positions [{start}, {stop}) got content of {len(content)} tokens")
        text, is_prefix = token_ids[start:stop], exact and start == 0
        info = SegmentInfo(
            agent=prompt.agent,
            tenant=prompt.tenant,
            start=start,
            prefix=prefix_hash(token_ids[:start]),
            exact=exact,
            generated=max(len(prompt) - start, 0) if stop > len(prompt) else None,
            id=secrets.token_hex(8),
        )
        with self._writing:
            shelf = self._shelves.get(prompt.tenant) or Shelf(self.min_length, self._runs)
            holder = self._holder(shelf, text, info, copies)
            if holder:
                return Put(None, (), f"its tokens are already held by segment {holder}")
            shorter = self._continued(shelf, text, info) if is_prefix else None
            if shorter is not None and (held := self.store.info(shorter)) is not None:
                info = replace(info, created=held.created)
            put = self.store.put(content, info)
            for evicted in put.evicted:
                self._losses.evicted(self._unlist(evicted))
            if put.id is None:
                self._losses.refused(prompt.tenant, put.reason)
                return put
            self._list(put.id, shelf, text, prompt.tenant, is_prefix)
            if shorter is not None and self.store.remove(shorter):
                self._unlist(shorter)
                return replace(put, continued=shorter)
            return put

    def drop(self, segment: str) -> bool:
        """Forget a segment; requests that hold it keep its KV. Returns whether it was here."""
        with self._writing:
            if not self.store.remove(segment):
                return False
            self._unlist(segment)
            return True

    def check_integrity(self) -> None:
        """Raises KvcmasError when store, indexes and pins contradict each other."""
        with self._writing:
            self.store.check_integrity()
            self._pins.check_integrity()
            stored = {info.id: info.tenant for info in self.store.infos()}
            indexed = {
                name: tenant for tenant, shelf in self._shelves.items() for name in shelf.names
            }
            if not stored == indexed == self._tenants or not all(self._shelves.values()):
                raise KvcmasError("the store and the indexes of the tenants name other segments")
            for shelf in self._shelves.values():
                shelf.check_integrity()

    def _missed(self, prefix: PrefixHit | None) -> str:
        if not self._runs:
            return f"no stored prompt begins with the prompt's first {self.min_prefix} tokens"
        where = "the prompt" if prefix is None else "the prompt behind its prefix"
        return f"no stored segment shares {self.min_length} tokens in a row with {where}"

    def _prefix(self, prompt: Prompt, shelf: Shelf) -> PrefixHit | None:
        hit = shelf.prefixes.longest(prompt.token_ids)
        if hit is None:
            return None
        name, length = hit[0], min(hit[1], len(prompt) - 1)
        info = self.store.info(name)
        if info is None or length < self.min_prefix:
            return None
        return PrefixHit(name, length, info)

    def _gathered(self, match: Match, ids: TokenIds, shelf: Shelf) -> Match:
        """The match with every segment that holds all of it but a few tokens at its edges."""
        if len(match) < LONG:
            return match
        holders = [
            (source, held.tokens())
            for source in shelf.sources(core_of(match, ids))
            if (held := self.store.get(source.segment)) is not None
        ]
        return gather(match, ids, holders) if len(holders) > len(match.sources) else match

    def _run(self, match: Match, shift: int, owner: Ownership) -> Run | None:
        start, stop = match.start + shift, match.stop + shift
        sources = [
            (source, info)
            for source in match.sources
            if (info := self.store.info(source.segment)) is not None
        ]
        skip = int(any(info.start + source.offset == 0 for source, info in sources))
        if not sources or stop - start - skip < self.min_length:
            return None
        donors = (
            Donor(
                source.segment,
                source.offset + skip,
                info,
                owner.owns(source.segment, info, start - source.offset, source.offset),
            )
            for source, info in sources
        )
        return Run(start + skip, stop, tuple(donors))

    def _holder(self, shelf: Shelf, text: TokenIds, info: SegmentInfo, copies: bool) -> str | None:
        """A stored segment that makes this one needless."""
        if info.start == 0 and info.exact:
            hit = shelf.prefixes.longest(text)
            return hit[0] if hit and hit[1] == text.shape[0] else None
        for name in shelf.holders(text):
            held = self.store.info(name)
            if held is None or (info.exact and not held.exact):
                continue
            if held.agent == info.agent or not copies:
                return name
        return None

    def _continued(self, shelf: Shelf, text: TokenIds, info: SegmentInfo) -> str | None:
        """A stored beginning that the new one holds as a whole.

        Where runs are found, also the agent that computed them counts, so it must be the same.
        """
        hit = shelf.prefixes.longest(text)
        if hit is None:
            return None
        held, segment = self.store.info(hit[0]), self.store.get(hit[0])
        if held is None or segment is None or (self._runs and held.agent != info.agent):
            return None
        return hit[0] if len(segment) == hit[1] else None

    def _list(self, name: str, shelf: Shelf, text: TokenIds, tenant: str, is_prefix: bool) -> None:
        shelf.add(name, text, is_prefix)
        self._shelves[tenant] = shelf
        self._tenants[name] = tenant

    def _unlist(self, name: str) -> str:
        tenant = self._tenants.pop(name)
        shelf = self._shelves[tenant]
        shelf.remove(name)
        if not shelf:
            del self._shelves[tenant]
        return tenant
