"""The store's quota of a tenant: nobody pushes out what belongs to others."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcmas.errors import ConfigError, KvcmasError
from kvcmas.store.content import TokenRun
from kvcmas.store.info import Put, SegmentInfo
from kvcmas.store.segments import SegmentStore

Store = SegmentStore[TokenRun]


def put(store: Store, name: str, tenant: str, size: int = 10) -> Put:
    found = store.put(TokenRun(np.arange(4), size), SegmentInfo("a", tenant, 0, "", True, name))
    store.check_integrity()
    return found


def names(store: Store) -> set[str]:
    return {info.id for info in store.infos()}


@pytest.fixture
def store() -> Store:
    """Room for ten segments, five a tenant; tenant `y` holds two old ones."""
    store = Store(100, tenant_bytes=50)
    for name in ("y1", "y2"):
        put(store, name, "y")
    return store


def test_a_full_tenant_evicts_its_own(store: Store) -> None:
    for number in range(5):
        assert put(store, f"x{number}", "x").evicted == ()
    for name in ("x0", "x0", "x2"):
        store.pin(name)
        store.unpin(name)
    # Its least valuable ones in the order of their last use; those of `y` are older and stay.
    assert put(store, "x5", "x").evicted == ("x1",)
    assert put(store, "x6", "x", 20).evicted == ("x3", "x4")
    assert names(store) == {"y1", "y2", "x0", "x2", "x5", "x6"}
    assert put(store, "y3", "y").evicted == ()


def test_never_a_pinned_one(store: Store) -> None:
    for number in range(5):
        put(store, f"x{number}", "x")
    for name in ("x0", "x1", "x2"):
        store.pin(name)
    assert put(store, "x5", "x").evicted == ("x3",)
    refused = put(store, "x6", "x", 30)
    assert (refused.id, refused.evicted) == (None, ())
    assert "30 of the quota of the tenant of 50 are pinned" in refused.reason
    # Removed, but still pinned: it goes on to count.
    store.remove("x0")
    assert put(store, "x7", "x", 20).evicted == ("x4", "x5")
    assert not put(store, "x8", "x", 30).id
    assert store.unpin("x0")
    assert put(store, "x8", "x", 30).evicted == ("x7",)


def test_larger_than_the_quota(store: Store) -> None:
    refused = put(store, "x", "x", 51)
    assert refused == Put(None, (), "the segment has 51 bytes, the whole quota of the tenant is 50")
    assert put(store, "x", "x", 50).id == "x"


def test_the_budget_holds_besides(store: Store) -> None:
    for tenant in ("x", "z"):
        for number in range(4):
            put(store, f"{tenant}{number}", tenant)
    assert put(store, "z4", "z").evicted == ("y1",)
    assert put(store, "z5", "z").evicted == ("z0",)


def test_no_quota_is_no_limit() -> None:
    store = Store(100)
    put(store, "y", "y")
    evicted = [put(store, f"x{number}", "x").evicted for number in range(10)]
    assert evicted[:9] == [()] * 9
    assert evicted[9] == ("y",)


def test_many_tenants_stay_within_theirs() -> None:
    draws, store = random.Random(0), Store(400, tenant_bytes=100)
    pinned: list[str] = []
    for step in range(600):
        tenant = draws.choice("wxyz")
        before = {info.id for info in store.infos() if info.tenant != tenant}
        found = put(store, f"{tenant}{step}", tenant, draws.randint(1, 60))
        # Four quotas fit into the budget, so others lose nothing at all.
        assert before <= names(store)
        assert not set(found.evicted) & set(pinned)
        if found.id and draws.random() < 0.2:
            store.pin(found.id)
            pinned.append(found.id)
        if pinned and draws.random() < 0.2:
            store.unpin(pinned.pop(draws.randrange(len(pinned))))


def test_wrong_quota() -> None:
    with pytest.raises(ConfigError, match="quota of a tenant must be >= 0, got -1"):
        Store(10, -1)


def test_broken_quota_is_noticed(store: Store) -> None:
    store.tenant_bytes = 19
    with pytest.raises(KvcmasError, match="20 bytes of a quota of 19"):
        store.check_integrity()
