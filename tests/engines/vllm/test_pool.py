"""The pool of donors: budgets, tiers, moves between them."""

from __future__ import annotations

import pytest
import torch

from kvcmas.engines.vllm.pool import DonorPool, TieredPool
from kvcmas.errors import ConfigError, InputError, KvcmasError

from .pool_segments import CPU, SIZE, make, same, tensors, two_tiers


def filled(device: int, host: int, names: str) -> TieredPool:
    pool = two_tiers(device, host)
    for seed, name in enumerate(names):
        assert pool.put(name, make(seed=seed))
        pool.check_integrity()
    return pool


def tiers(pool: TieredPool, names: str) -> str:
    """`d`, `h` or `-` for each name."""
    return "".join((pool.tier(name) or "-")[0] for name in names)


def test_put_fills_the_device_and_moves_the_least_recently_used_to_the_host() -> None:
    pool = filled(2, 2, "ab")
    assert tiers(pool, "ab") == "dd"
    assert pool.get("a") is not None
    assert pool.put("c", make())
    assert tiers(pool, "abc") == "dhd"
    assert pool.put("d", make())
    assert tiers(pool, "abcd") == "hhdd"
    assert pool.nbytes == {"device": 2 * SIZE, "host": 2 * SIZE}
    assert not pool.put("e", make())
    assert tiers(pool, "abcde") == "hhdd-"
    assert len(pool) == 4 and "a" in pool and "e" not in pool
    pool.check_integrity()


def test_a_donor_beyond_the_device_goes_to_the_host() -> None:
    pool = filled(2, 4, "a")
    assert pool.put("large", make(12))
    assert tiers(pool, "a") == "d" and pool.tier("large") == "host"
    assert same(pool.get("large"), make(12))
    assert pool.tier("large") == "host"
    assert not pool.put("huge", make(20))
    pool.check_integrity()


def test_a_donor_for_which_no_room_can_be_made_goes_to_the_host() -> None:
    pool = two_tiers(4, 1)
    assert pool.put("large", make(12))
    assert pool.put("a", make())
    # The least recently used one does not fit on the host, the next one does.
    assert pool.put("b", make())
    assert pool.tier("large") == "device" and tiers(pool, "ab") == "hd"
    assert not pool.put("c", make())
    assert pool.drop("a")
    assert not pool.put("d", make(12))
    assert pool.put("e", make())
    assert tiers(pool, "be") == "hd"
    pool.check_integrity()


def test_a_refused_put_moves_nothing() -> None:
    pool = filled(2, 1, "ab")
    assert not pool.put("large", make(8))
    assert tiers(pool, "ab") == "dd" and pool.nbytes["host"] == 0


def test_get_promotes_into_free_room() -> None:
    pool = filled(2, 2, "abc")
    assert tiers(pool, "abc") == "hdd"
    assert pool.drop("b")
    assert same(pool.get("a"), make(seed=0))
    assert tiers(pool, "abc") == "d-d"
    assert pool.nbytes == {"device": 2 * SIZE, "host": 0}


def test_get_does_not_push_out_what_was_used_more_recently() -> None:
    pool = filled(2, 1, "abc")
    # a was used before b and c: it is copied for use, and stays.
    assert same(pool.get("a"), make(seed=0))
    assert tiers(pool, "abc") == "hdd"
    # Used again, it was used more recently than b, and the two change places. The host was full.
    assert same(pool.get("a"), make(seed=0))
    assert tiers(pool, "abc") == "dhd"
    assert same(pool.get("b"), make(seed=1)) and same(pool.get("c"), make(seed=2))
    pool.check_integrity()


def test_peek_counts_no_use_and_moves_nothing() -> None:
    pool = filled(2, 2, "ab")
    assert same(pool.peek("a"), make(seed=0))
    assert pool.put("c", make())
    assert tiers(pool, "abc") == "hdd"
    pool.drop("b")
    assert same(pool.peek("a"), make(seed=0))
    assert tiers(pool, "abc") == "h-d"


def test_what_is_absent() -> None:
    pool = filled(1, 1, "a")
    assert pool.get("x") is None and pool.peek("x") is None and pool.tier("x") is None
    assert not pool.drop("x")
    assert pool.drop("a") and not pool.drop("a")
    assert pool.nbytes == {"device": 0, "host": 0} and len(pool) == 0


def test_a_segment_that_was_handed_out_stays_valid() -> None:
    pool = filled(1, 1, "a")
    held = pool.get("a")
    assert pool.put("b", make(seed=1)) and pool.tier("a") == "host"
    on_host = pool.get("a")
    assert pool.drop("a") and pool.drop("b") and pool.put("a", make(seed=2))
    assert same(held, make(seed=0)) and same(on_host, make(seed=0))
    assert same(pool.get("a"), make(seed=2))


def test_refused_input() -> None:
    pool = filled(1, 1, "a")
    with pytest.raises(InputError, match="donor 'a' is already stored; drop it first"):
        pool.put("a", make())
    with pytest.raises(InputError, match="0 tokens"):
        pool.put("b", make(0))
    with pytest.raises(ConfigError, match="the host's byte budget must be >= 0, got -1"):
        DonorPool(5, -1, CPU)
    with pytest.raises(ConfigError, match="the device's byte budget must be >= 0, got -5"):
        DonorPool(-5, 7, CPU)


def test_check_integrity_notices_a_changed_segment() -> None:
    pool = filled(1, 1, "a")
    held = pool.get("a")
    assert held is not None
    object.__setattr__(held, "keys", held.keys.double())
    with pytest.raises(KvcmasError, match=f"hold {SIZE + held.keys.nbytes // 2} bytes, not {SIZE}"):
        pool.check_integrity()


def test_only_counted_memory_is_held() -> None:
    pool = DonorPool(SIZE, 0, CPU)
    buffer = make(100)
    view = buffer.slice(3, 7)
    expected = view.clone()
    assert pool.put("a", view)
    buffer.keys.fill_(9.0)
    held = pool.get("a")
    assert held is not None and same(held, expected)
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors(held)) == SIZE


def test_on_a_cpu_both_budgets_are_one_and_nothing_is_copied() -> None:
    pool = DonorPool(SIZE, 2 * SIZE, CPU)
    first = make(12)
    assert pool.put("a", first)
    held = pool.get("a")
    assert held is not None and held.keys is first.keys
    assert pool.nbytes == {"device": 3 * SIZE, "host": 0}
    assert not pool.put("b", make(1))
    pool.check_integrity()


def test_what_moves_in_inference_mode_is_ordinary() -> None:
    pool = DonorPool(SIZE, 0, CPU)
    with torch.inference_mode():
        assert pool.put("a", make(100).slice(3, 7))
        held = pool.get("a")
    assert held is not None
    held.keys.add_(1.0)


def test_moves_between_a_device_and_the_host(device: torch.device) -> None:
    pool = DonorPool(SIZE, 2 * SIZE, device)
    assert pool.put("a", make(seed=1, device=device))
    assert pool.put("b", make(seed=2, device=device))
    assert pool.put("c", make(seed=3))
    pool.check_integrity()
    for name, seed in (("a", 1), ("b", 2), ("c", 3), ("c", 3)):
        held = pool.get(name)
        assert held is not None and held.keys.device.type == device.type
        assert same(held, make(seed=seed, device=device))
    if device.type == "cuda":
        assert tiers(pool, "abc") == "hhd"
        peeked = pool.peek("a")
        assert peeked is not None and all(tensor.is_pinned() for tensor in tensors(peeked))
