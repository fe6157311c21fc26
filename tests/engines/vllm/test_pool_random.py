"""The pool of donors under random operations and from many threads."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcmas.core.segment import SegmentKV
from kvcmas.errors import InputError

from .pool_segments import SIZE, make, same, two_tiers


class Operations(RuleBasedStateMachine):
    """Random operations against a dictionary."""

    names = st.sampled_from("abcdefgh")

    def __init__(self) -> None:
        super().__init__()
        self.pool = two_tiers(3, 4)
        self.expected: dict[str, tuple[int, int]] = {}
        self.handed_out: list[tuple[SegmentKV, tuple[int, int]]] = []

    @rule(name=names, tokens=st.integers(1, 20), seed=st.integers(0, 5))
    def put(self, name: str, tokens: int, seed: int) -> None:
        if name in self.expected:
            with pytest.raises(InputError):
                self.pool.put(name, make(tokens, seed))
            return
        before = self.pool.nbytes
        where = {other: self.pool.tier(other) for other in self.expected}
        size = make(tokens).nbytes
        if self.pool.put(name, make(tokens, seed)):
            self.expected[name] = (tokens, seed)
        else:
            assert self.pool.nbytes == before
            assert where == {other: self.pool.tier(other) for other in self.expected}
            assert size > 3 * SIZE - before["device"] and size > 4 * SIZE - before["host"]

    @rule(name=names)
    def get(self, name: str) -> None:
        held = self.pool.get(name)
        if name not in self.expected:
            assert held is None
            return
        assert same(held, make(*self.expected[name]))
        assert held is not None
        self.handed_out.append((held, self.expected[name]))

    @rule(name=names)
    def peek(self, name: str) -> None:
        where, held = self.pool.tier(name), self.pool.peek(name)
        assert (held is not None) == (name in self.expected)
        assert held is None or same(held, make(*self.expected[name]))
        assert self.pool.tier(name) == where

    @rule(name=names)
    def drop(self, name: str) -> None:
        assert self.pool.drop(name) == (self.expected.pop(name, None) is not None)

    @invariant()
    def is_sound(self) -> None:
        self.pool.check_integrity()
        assert len(self.pool) == len(self.expected)
        total = sum(make(*donor).nbytes for donor in self.expected.values())
        assert sum(self.pool.nbytes.values()) == total
        assert self.pool.nbytes["device"] <= 3 * SIZE and self.pool.nbytes["host"] <= 4 * SIZE
        for held, donor in self.handed_out[-5:]:
            assert same(held, make(*donor))


TestOperations = Operations.TestCase
TestOperations.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_threads() -> None:
    pool = two_tiers(3, 3)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        own = f"own-{seed}"
        try:
            for _ in range(200):
                pool.put(own, make(chance.randint(1, 6), seed)) if own not in pool else None
                for other in range(4):
                    held = pool.get(f"own-{other}")
                    if held is not None:
                        assert same(held, make(len(held), other))
                if chance.random() < 0.5:
                    pool.drop(own)
                pool.check_integrity()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
