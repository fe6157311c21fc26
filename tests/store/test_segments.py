"""The segment store: budget, pins, eviction order, threads."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcmas.core.segment import SegmentKV
from kvcmas.errors import ConfigError, InputError, KvcmasError
from kvcmas.store.info import Put, SegmentInfo
from kvcmas.store.segments import SegmentStore


def make(tokens: int = 4, fill: float = 0.0) -> SegmentKV:
    keys = torch.full((2, 1, tokens, 4), fill)
    ids = torch.arange(tokens)
    return SegmentKV(keys, keys.clone(), ids, ids[None])


def info(segment_id: str = "", tenant: str = "t") -> SegmentInfo:
    return SegmentInfo("planner", tenant, 58, "prefix", True, segment_id)


SIZE = make().nbytes


def filled(*names: str, room: int | None = None) -> SegmentStore:
    store = SegmentStore(SIZE * (len(names) if room is None else room))
    for name in names:
        assert store.put(make(), info(name)).id == name
    store.check_integrity()
    return store


def test_put_get_and_info() -> None:
    store = SegmentStore(2 * SIZE)
    first = store.put(make(fill=1.0), info())
    second = store.put(make(fill=2.0), info("mine"))
    assert first == Put("segment-1")
    assert second == Put("mine")
    held = store.get("segment-1")
    assert held is not None and torch.equal(held.keys, make(fill=1.0).keys)
    assert store.nbytes == 2 * SIZE and len(store) == 2
    assert [(i.id, i.created, i.hits) for i in store.infos()] == [
        ("segment-1", 1, 0),
        ("mine", 2, 0),
    ]
    entry = store.info("mine")
    assert entry is not None
    assert (entry.agent, entry.tenant, entry.start, entry.prefix, entry.exact) == (
        "planner",
        "t",
        58,
        "prefix",
        True,
    )
    assert store.get("absent") is None and store.info("absent") is None
    assert store.pin("absent") is None and "absent" not in store


def test_a_view_is_copied_so_that_only_counted_bytes_are_held() -> None:
    buffer = make(1000)
    store = SegmentStore(SIZE)
    assert store.put(buffer.slice(10, 14), info("a")).id == "a"
    buffer.keys.fill_(9.0)
    held = store.get("a")
    assert held is not None
    assert torch.equal(held.keys, make().keys)
    assert held.token_ids.tolist() == [10, 11, 12, 13]
    tensors = (held.keys, held.values, held.token_ids, held.positions)
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == SIZE


def test_a_segment_beyond_the_budget_is_not_stored() -> None:
    store = filled("a", "b")
    result = store.put(make(9), info("big"))
    assert result.id is None and result.evicted == ()
    assert f"{make(9).nbytes} bytes, the whole budget is {2 * SIZE}" in result.reason
    assert "a" in store and "b" in store
    assert SegmentStore(0).put(make(), info()).id is None


def test_pinned_segments_stay_and_a_refused_put_evicts_nothing() -> None:
    store = filled("a", "b", "c")
    store.pin("a")
    store.pin("b")
    result = store.put(make(8), info("big"))
    assert result.id is None and f"{2 * SIZE} of the budget" in result.reason
    assert "c" in store
    assert store.put(make(), info("d")) == Put("d", ("c",))
    store.unpin("a")
    store.unpin("b")
    store.check_integrity()


def test_eviction_order_oldest_first_then_hits_and_recency_count() -> None:
    store = filled("a", "b", "c", "d")
    for name in ("a", "a", "a", "b"):
        store.pin(name)
        store.unpin(name)
    order: list[str] = []
    for number in range(6):
        order += store.put(make(), info(f"n{number}")).evicted
    # Values: c, d 1; b 2; a 3. The clock stands at 1 when n0 comes (value 2, used after b).
    assert order == ["c", "d", "b", "n0", "n1", "a"]


def test_once_popular_segments_do_not_stay_for_ever() -> None:
    store = filled("hot", "x", "y")
    for _ in range(1000):
        store.pin("hot")
        store.unpin("hot")
    puts = 0
    while "hot" in store:
        store.put(make(), info(f"n{puts}"))
        puts += 1
    assert 5 <= puts <= 100


def test_a_bulky_segment_leaves_before_a_compact_one_with_as_many_hits() -> None:
    def kv(dtype: torch.dtype) -> SegmentKV:
        segment = make()
        return SegmentKV(
            segment.keys.to(dtype),
            segment.values.to(dtype),
            segment.token_ids,
            segment.positions,
        )

    store = SegmentStore(2 * SIZE)
    store.put(kv(torch.float16), info("half"))
    store.put(kv(torch.float32), info("full"))
    assert store.put(make(), info("next")).evicted == ("full",)


def test_removed_while_pinned_is_invisible_but_usable_until_unpinned() -> None:
    store = filled("a", room=2)
    segment = store.pin("a")
    assert segment is not None
    assert store.remove("a")
    assert not store.remove("a")
    assert "a" not in store and store.get("a") is None and store.pin("a") is None
    assert store.nbytes == SIZE and len(store) == 0 and store.infos() == []
    assert segment.keys.sum().item() == 0.0
    with pytest.raises(InputError, match="'a' is already stored"):
        store.put(make(), info("a"))
    store.check_integrity()
    store.unpin("a")
    assert store.nbytes == 0
    store.check_integrity()
    assert store.put(make(), info("a")).id == "a"


def test_unpin_more_than_pinned_is_refused() -> None:
    store = filled("a")
    store.pin("a")
    store.unpin("a")
    for name in ("a", "absent"):
        with pytest.raises(InputError, match=f"{name!r} is not pinned"):
            store.unpin(name)
    assert store.pins("a") == 0


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="got -1"):
        SegmentStore(-1)
    with pytest.raises(InputError, match="0 tokens"):
        filled("a").put(make(0), info())
    with pytest.raises(InputError, match="'a' is already stored"):
        filled("a", room=2).put(make(), info("a"))


def test_chosen_ids_avoid_given_ones() -> None:
    store = filled("segment-2", room=3)
    assert store.put(make(), info()).id == "segment-3"
    assert store.put(make(), info()).id is not None
    assert len(store) == 3


def test_broken_counts_are_noticed() -> None:
    store = filled("a")
    store._nbytes += 1
    with pytest.raises(KvcmasError, match="are counted"):
        store.check_integrity()


def test_five_hundred_mixes_over_fourteen_documents() -> None:
    """Mixes share documents; the budget holds 8 of 14, some are asked for more often."""
    rng = random.Random(0)
    names = [f"doc{number}" for number in range(14)]
    weights = [1 / (number + 1) for number in range(14)]
    store = SegmentStore(8 * SIZE)
    rates: list[float] = []
    hits = asked = 0
    for mix in range(500):
        documents = set(rng.choices(names, weights, k=4))
        pinned = [name for name in sorted(documents) if store.pin(name) is not None]
        for name in sorted(documents.difference(pinned)):
            if mix % 7 == 3:
                continue  # this request was cancelled: nothing of it becomes visible
            assert store.put(make(), info(name)).id == name
        for name in pinned:
            store.unpin(name)
        store.check_integrity()
        assert store.nbytes <= store.budget
        hits, asked = hits + len(pinned), asked + len(documents)
        if mix % 100 == 99:
            rates.append(hits / asked)
            hits = asked = 0
    assert all(store.pins(name) == 0 for name in names)
    assert min(rates) > 0.65
    assert max(rates[1:]) - min(rates[1:]) < 0.1


def test_threads_keep_budget_and_pins() -> None:
    store = SegmentStore(6 * SIZE)
    errors: list[Exception] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for step in range(200):
                name = f"doc{rng.randrange(10)}"
                segment = store.pin(name)
                if segment is None:
                    store.put(make(), info(f"{name}-{seed}-{step}"))
                    continue
                assert segment.keys.shape[2] == 4
                if rng.random() < 0.2:
                    store.remove(name)
                store.unpin(name)
        except (KvcmasError, AssertionError) as error:
            errors.append(error)

    for number in range(6):
        store.put(make(), info(f"doc{number}"))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    store.check_integrity()
    assert all(store.pins(entry.id) == 0 for entry in store.infos())


class StoreMachine(RuleBasedStateMachine):
    """Random operations against a model that knows names and pins only."""

    def __init__(self) -> None:
        super().__init__()
        self.store = SegmentStore(5 * SIZE)
        self.visible: set[str] = set()
        self.pinned: list[str] = []

    @rule(name=st.sampled_from("abcdefgh"), tokens=st.integers(1, 22))
    def put(self, name: str, tokens: int) -> None:
        if name in self.visible or name in self.pinned:
            return
        result = self.store.put(make(tokens), info(name))
        assert not set(result.evicted) & set(self.pinned)
        self.visible -= set(result.evicted)
        if result.id is None:
            assert result.reason and not result.evicted
        else:
            self.visible.add(name)

    @rule(name=st.sampled_from("abcdefgh"))
    def pin(self, name: str) -> None:
        found = self.store.pin(name)
        assert (found is not None) == (name in self.visible)
        if found is not None:
            self.pinned.append(name)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.store.unpin(self.pinned.pop())

    @rule(name=st.sampled_from("abcdefgh"))
    def remove(self, name: str) -> None:
        assert self.store.remove(name) == (name in self.visible)
        self.visible.discard(name)

    @invariant()
    def sound(self) -> None:
        self.store.check_integrity()
        assert {entry.id for entry in self.store.infos()} == self.visible
        for name in "abcdefgh":
            assert self.store.pins(name) == self.pinned.count(name)

    def teardown(self) -> None:
        for name in self.pinned:
            self.store.unpin(name)
        self.store.check_integrity()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
