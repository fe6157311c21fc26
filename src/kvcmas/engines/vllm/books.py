"""What one rank has learned: a book for each tenant.

learning thread   see_donor, observe, retell > books > facts and scores, into the outbox
engine's thread   added: look-ups alone, which wait for no learning
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from kvcmas.core.channels import to_channels
from kvcmas.core.model_info import ModelInfo
from kvcmas.core.segment import SegmentKV
from kvcmas.engines.vllm.known import KnownDonors, on_device
from kvcmas.engines.vllm.messages import Source
from kvcmas.engines.vllm.telling import Teller
from kvcmas.errors import StateMismatchError
from kvcmas.methods.kvcmas.book import CorrectionBook
from kvcmas.methods.kvcmas.config import KvcmasConfig
from kvcmas.methods.kvcmas.filling import Added
from kvcmas.methods.kvcmas.frozen import FrozenBook
from kvcmas.methods.kvcmas.observation import observation
from kvcmas.methods.kvcmas.pair import Pair


class Books:
    """Books of all tenants; nothing is shared between them."""

    def __init__(
        self, info: ModelInfo, config: KvcmasConfig, known: KnownDonors, teller: Teller
    ) -> None:
        self._info = info
        self._config = config
        self._known = known
        self._teller = teller
        self._books: dict[str, CorrectionBook] = {}
        self._lock = threading.Lock()

    def book(self, tenant: str) -> CorrectionBook:
        """What a tenant's traffic has taught."""
        with self._lock:
            if tenant not in self._books:
                self._books[tenant] = CorrectionBook(self._info, self._config)
            return self._books[tenant]

    def learns(self, tenant: str) -> bool:
        """Whether exact KV of this tenant teaches anything."""
        return self._config.learn and not isinstance(self._books.get(tenant), FrozenBook)

    def adopt(self, books: Mapping[str, CorrectionBook]) -> None:
        """Use these books as they are, in place of the tenants' own.

        Raises:
            StateMismatchError: a book is of KV of another shape.
        """
        for tenant, book in books.items():
            given, mine = book.info, self._info
            if (given.layers, given.channels) != (mine.layers, mine.channels):
                raise StateMismatchError(
                    f"the book of tenant {tenant!r} is of {given.layers} layers with "
                    f"{given.channels} channels, this rank has {mine.layers} with "
                    f"{mine.channels}; give every rank a book of its own heads"
                )
        with self._lock:
            self._books |= {tenant: FrozenBook.of(book) for tenant, book in books.items()}

    def added(self, source: Source, agent: str, donor: SegmentKV) -> Added | None:
        """What corrects an agent's donor for the source's reader, if anything does."""
        book = self._books.get(source.tenant)
        if not (source.corrected and self._config.correct) or book is None:
            return None
        correction, basis = book.correction(Pair(agent, source.reader)), book.basis
        if correction is None or basis is None:
            return None
        features = self._known.features(source.segment, basis, donor)
        return None if features is None else Added(correction, basis, source.origin, features)

    def clear(self) -> None:
        """Forget all that was learned."""
        with self._lock:
            self._books.clear()
        self._teller.clear()

    # in the learning thread ------------------------------------------------------------------

    def see_donor(self, name: str, exact: bool) -> None:
        """Learn the basis from a new donor; find its landmarks."""
        owner = self._known.owner(name)
        kv = self._known.kv(name)
        if owner is None or kv is None:  # dropped in the meantime
            return
        book = self.book(owner.tenant)
        if exact and self.learns(owner.tenant):
            book.see_donor(to_channels(self._info.rope, kv))
            self._teller.tell(owner.tenant, book)
        if book.basis is not None:
            self._known.features(name, book.basis, kv)
            self._teller.tell_scores(name, owner, book)

    def observe(
        self, pair: Pair, source: Source, whole: bool, reader: SegmentKV, donor: SegmentKV
    ) -> None:
        """Learn from a reader's exact KV of a source; `donor` is the donor's, as a whole."""
        if not self.learns(source.tenant):  # a book was adopted in the meantime
            return
        book = self.book(source.tenant)
        donor = on_device(donor, reader.keys.device)
        book.observe(
            observation(self._info.rope, pair, reader, donor, source.offset, source.origin, whole)
        )
        self._teller.tell(source.tenant, book)

    def retell(self, tenant: str) -> None:
        """Tell the scheduler of a book that was adopted."""
        self._teller.forget(tenant)
        self._teller.tell(tenant, self.book(tenant))

    def nbytes(self) -> dict[str, int]:
        """Bytes of `states` (corrections and feature bases) and of `learning`."""
        with self._lock:
            books = list(self._books.values())
        return {
            "states": sum(sum(book.state_bytes().values()) + book.shared_bytes() for book in books),
            "learning": sum(book.learning_bytes() for book in books),
        }
