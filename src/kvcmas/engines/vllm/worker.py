"""A worker's part of the engine: what one rank does around each forward pass.

    before_forward   drops, loads                     the reader's blocks get donor KV
    after_forward    measures, captures, lessons      the blocks' exact KV is compared and kept
    report           what came of it and what was learned since

Everything but learning happens in the engine's thread. Of the engine it knows the contract
(`messages.py`) and a way to its blocks (`interfaces.py`), nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from kvcmas.core.model_info import ModelInfo
from kvcmas.core.segment import SegmentKV
from kvcmas.engines.vllm.approximation import Approximation, deviation_sums, unknown_sums
from kvcmas.engines.vllm.books import Books
from kvcmas.engines.vllm.interfaces import CacheAccess, Donors
from kvcmas.engines.vllm.known import KnownDonors, Owner
from kvcmas.engines.vllm.lessons import LearningThread
from kvcmas.engines.vllm.messages import (
    Capture,
    Lesson,
    Load,
    Measure,
    Report,
    Source,
    StepWork,
    Sums,
)
from kvcmas.engines.vllm.outbox import Outbox
from kvcmas.engines.vllm.telling import Teller
from kvcmas.errors import StateMismatchError
from kvcmas.methods.kvcmas.book import CorrectionBook
from kvcmas.methods.kvcmas.config import KvcmasConfig
from kvcmas.methods.kvcmas.pair import Pair

WAITING_BYTES = 512 << 20


class WorkerSide:
    """One rank. Its calls come from one thread; see the module for their order.

    Args:
        access: the blocks of this rank's heads.
        pool: KV of donors; nobody else puts or drops any.
        info: of this rank: its own heads, the model's rotation.
        config: options of the method.
        rank: among the tensor parallel ranks, names facts and scores.
        waiting_bytes: most bytes of readers' KV that wait to be learned from.

    Raises:
        StateMismatchError: `info` does not describe the KV of `access`.
    """

    def __init__(
        self,
        access: CacheAccess,
        pool: Donors,
        info: ModelInfo,
        config: KvcmasConfig,
        rank: int = 0,
        *,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        held = (access.layers, access.kv_heads, access.head_dim, access.head_dim)
        told = (info.layers, info.kv_heads, info.head_dim, info.value_dim)
        if held != told:
            raise StateMismatchError(
                "the rank's blocks hold (layers, KV heads, sizes of key and value) "
                f"{held}, its description says {told}; give the heads of this rank alone"
            )
        self._access = access
        self._pool = pool
        self._info = info
        self._outbox = Outbox(rank)
        self._known = KnownDonors(pool, info.rope, access.device)
        teller = Teller(self._known, self._outbox, config.landmarks)
        self._books = Books(info, config, self._known, teller)
        self._thread = LearningThread(waiting_bytes, access.device)
        self._worked = False
        self.failed_loads: list[Load] = []

    @property
    def dropped(self) -> int:
        """Lessons given up because too many waited, or because learning had failed."""
        return self._thread.dropped

    @property
    def failure(self) -> Exception | None:
        """Why learning has stopped, if it has; it was logged then."""
        return self._thread.failure

    def book(self, tenant: str = "") -> CorrectionBook:
        """What a tenant's traffic has taught this rank. Read it after `drain`."""
        return self._books.book(tenant)

    def adopt(self, books: Mapping[str, CorrectionBook]) -> None:
        """Use these tenants' books as they are and learn nothing more from their traffic.

        Their facts, and scores of the donors that are here, come with a later report.

        Raises:
            StateMismatchError: a book is of KV of another shape.
        """
        self._books.adopt(books)
        for tenant in books:
            self._submit(partial(self._books.retell, tenant))

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until all is learned; false when `timeout` seconds were not enough.

        Raises:
            LearningError: learning failed.
        """
        return self._thread.drain(timeout)

    def close(self) -> None:
        """End the learning thread."""
        self._thread.close()

    def report(self) -> Report | None:
        """Everything since the last call; `None` when there is nothing.

        Bytes come with the first report after a step with work, which all ranks have alike: so
        the scheduler adds up numbers of the same step.
        """
        worked, self._worked = self._worked, False
        return self._outbox.take(self._nbytes() if worked else None)

    # around the forward pass -----------------------------------------------------------------

    def before_forward(self, work: StepWork) -> None:
        """Forget donors, then write donors' KV into requests' blocks."""
        self._worked |= bool(work)
        if work.reset:
            self._thread.give_up()
            self._known.clear()
            self._books.clear()
        for name in work.drops:
            self._forget(name)
        if work.loads:
            with self._outbox.timed("load"):
                for load in work.loads:
                    self._load(load)

    def after_forward(self, work: StepWork) -> None:
        """Compare, keep and learn from what the requests' blocks hold now."""
        self._worked |= bool(work)
        if work.measures:
            with self._outbox.timed("measure"):
                for measure in work.measures:
                    name = measure.request_id, measure.span, measure.source.stop
                    self._outbox.measured(name, self._measure(measure))
        if work.captures or work.lessons:
            with self._outbox.timed("capture"):
                for capture in work.captures:
                    self._capture(capture)
                for lesson in work.lessons:
                    self._teach(lesson)

    def _load(self, load: Load) -> None:
        approx = self._approximate(load.source)
        if approx is None:
            self._outbox.failed(load.request_id)
            self.failed_loads.append(load)
            return
        source = load.source
        slots = self._access.slots(load.block_ids, source.start, source.stop)
        for layers, keys, values in approx.layers():
            self._access.put(slots, layers, keys, values)

    def _measure(self, measure: Measure) -> Sums:
        source = measure.source
        approx = self._approximate(source)
        if approx is None:
            return unknown_sums(self._info.layers)
        keys, values = self._access.read(measure.block_ids, source.start, source.stop)
        return deviation_sums(keys, values, approx.segment())

    def _approximate(self, source: Source) -> Approximation | None:
        """`None` when the tenant has no such donor."""
        owner = self._known.owner(source.segment)
        if owner is None or owner.tenant != source.tenant:
            return None
        donor = self._pool.get(source.segment)
        if donor is None:
            return None
        added = self._books.added(source, owner.agent, donor)
        return Approximation(self._info.rope, donor, source, added)

    def _capture(self, capture: Capture) -> None:
        segment = self._captured(capture)
        if capture.continues is not None:
            self._forget(capture.continues)  # first, as it makes room
        if not self._pool.put(capture.segment, segment):
            self._outbox.refused(
                capture.segment, f"no room for {segment.nbytes} bytes of KV in the worker's pool"
            )
            return
        self._known.add(capture.segment, Owner(capture.tenant, capture.agent))
        self._outbox.captured(capture.segment)
        self._submit(partial(self._books.see_donor, capture.segment, capture.exact))

    def _captured(self, capture: Capture) -> SegmentKV:
        """KV of the capture; what the older donor holds of it is not read again."""
        older = self._continued(capture)
        kept = capture.kept if older is not None else 0
        keys, values = self._access.read(capture.block_ids, capture.start + kept, capture.stop)
        if older is not None:
            keys = torch.cat([older.keys[:, :, :kept], keys], dim=2)
            values = torch.cat([older.values[:, :, :kept], values], dim=2)
        return SegmentKV(
            keys,
            values,
            torch.as_tensor(capture.token_ids, dtype=torch.int64).to(keys.device),
            torch.arange(capture.start, capture.stop, device=keys.device)[None],
        )

    def _continued(self, capture: Capture) -> SegmentKV | None:
        """The older donor; `None` when it is not here, and the blocks have to give it all."""
        if capture.continues is None:
            return None
        owner = self._known.owner(capture.continues)
        if owner is None or owner.tenant != capture.tenant:
            return None
        older = self._pool.get(capture.continues)
        if older is None or len(older) < capture.kept:
            return None
        return older if int(older.positions[0, 0]) == capture.start else None

    def _teach(self, lesson: Lesson) -> None:
        source = lesson.source
        owner = self._known.owner(source.segment)
        donor = self._pool.peek(source.segment)
        if owner is None or owner.tenant != source.tenant or donor is None:
            return
        if not len(source) or not self._books.learns(source.tenant):
            return
        keys, values = self._access.read(lesson.block_ids, source.start, source.stop)
        reader = SegmentKV(
            keys,
            values,
            donor.token_ids[source.offset : source.offset + len(source)].to(keys.device),
            torch.arange(source.start, source.stop, device=keys.device)[None],
        )
        pair = Pair(owner.agent, source.reader)
        self._submit(
            partial(self._books.observe, pair, source, lesson.whole, reader, donor),
            reader.nbytes,
        )

    def _submit(self, run: Callable[[], None], nbytes: int = 0) -> None:
        def learn() -> None:
            with self._outbox.timed("learn"):
                run()

        self._thread.submit(learn, nbytes)

    def _forget(self, name: str) -> None:
        self._known.forget(name)
        self._outbox.forget(name)

    def _nbytes(self) -> dict[str, int]:
        kv = {f"kv_{tier}": nbytes for tier, nbytes in self._pool.nbytes.items()}
        learned = self._books.nbytes()
        learned["learning"] += self._thread.nbytes
        return {**kv, "features": self._known.feature_bytes(), **learned}
