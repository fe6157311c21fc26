"""Prefix matching against a slow reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcmas.errors import InputError
from kvcmas.workflow.prefix_index import PrefixIndex, prefix_hash

TOKENS = st.integers(-2, 2) | st.sampled_from([256, 2**32, -(2**63), 2**63 - 1])
RUNS = st.lists(st.lists(TOKENS, max_size=8), max_size=8)


def common(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def build(runs: list[list[int]]) -> PrefixIndex:
    index = PrefixIndex()
    for number, run in enumerate(runs):
        index.add(f"s{number}", run)
        index.check_integrity()
    return index


@given(RUNS, st.lists(TOKENS, max_size=10))
def test_longest_equals_the_naive_search(runs: list[list[int]], prompt: list[int]) -> None:
    lengths = {f"s{number}": common(run, prompt) for number, run in enumerate(runs)}
    expected = max(lengths.values(), default=0)
    found = build(runs).longest(prompt)
    if expected == 0:
        assert found is None
    else:
        assert found is not None
        assert found[1] == expected == lengths[found[0]]


@given(RUNS, st.lists(TOKENS, max_size=10), st.integers(0, 255))
def test_remove_leaves_nothing(runs: list[list[int]], prompt: list[int], chosen: int) -> None:
    index = build(runs)
    kept = PrefixIndex()
    for number, run in enumerate(runs):
        if chosen >> number & 1:
            assert index.remove(f"s{number}")
            assert not index.remove(f"s{number}")
            index.check_integrity()
        else:
            kept.add(f"s{number}", run)
    assert index.longest(prompt) == kept.longest(prompt)
    assert len(index) == len(kept)
    for number in range(len(runs)):
        index.remove(f"s{number}")
    assert index.longest(prompt) is None
    assert not index._sorted and not index._names and not index._contents


@given(RUNS, st.lists(TOKENS, max_size=10))
def test_order_does_not_matter(runs: list[list[int]], prompt: list[int]) -> None:
    distinct = [list(run) for run in {tuple(run) for run in runs}]
    names = {tuple(run): f"s{number}" for number, run in enumerate(distinct)}
    backwards = PrefixIndex()
    for run in reversed(distinct):
        backwards.add(names[tuple(run)], run)
    assert build(distinct).longest(prompt) == backwards.longest(prompt)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 1000])
def test_the_same_prompt_twice(length: int) -> None:
    """The index tells the whole length; the plan leaves the last token to be computed."""
    index = build([list(range(length))])
    assert index.longest(list(range(length))) == ("s0", length)
    assert index.longest([*range(length), 7]) == ("s0", length)


def test_the_newest_name_of_the_same_run_is_given() -> None:
    index = build([[1, 2, 3], [1, 2, 3]])
    assert index.longest([1, 2]) == ("s1", 2)
    index.remove("s1")
    assert index.longest([1, 2]) == ("s0", 2)
    assert "s0" in index and "s1" not in index


def test_a_name_in_use_is_refused() -> None:
    index = build([[1]])
    with pytest.raises(InputError, match="'s0' is already indexed"):
        index.add("s0", [2])


def test_prefix_hash_is_stable_and_tells_prefixes_apart() -> None:
    assert prefix_hash([1, 2, 3]) == prefix_hash(np.array([1, 2, 3], dtype=np.uint16))
    hashes = {prefix_hash(ids) for ids in ([], [0], [0, 0], [1], [256], [1, 2], [2, 1])}
    assert len(hashes) == 7
    assert prefix_hash([]) == "cae66941d9efbd404e4d88758ea67670"
    assert all(len(digest) == 32 for digest in hashes)
