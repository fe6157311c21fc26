"""Segment matching against a slow reference that knows nothing of hashes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcmas.errors import ConfigError, InputError, KvcmasError
from kvcmas.workflow.matching import MAX_SOURCES, Match, SegmentIndex, Source
from kvcmas.workflow.rolling_hash import RollingHash

WINDOW = 4
GUARANTEED = 2 * WINDOW - 1


def naive_runs(prompt: list[int], segment: list[int], min_length: int) -> list[tuple[int, int]]:
    """Every maximal shared run, by walking along every diagonal."""
    runs = []
    for diagonal in range(-len(prompt) + 1, len(segment)):
        start = None
        for position in range(len(prompt) + 1):
            place = position + diagonal
            equal = (
                position < len(prompt)
                and 0 <= place < len(segment)
                and prompt[position] == segment[place]
            )
            if equal and start is None:
                start = position
            elif not equal and start is not None:
                if position - start >= min_length:
                    runs.append((start, position))
                start = None
    return runs


def naive_tiles(
    prompt: list[int], segments: dict[str, list[int]], min_length: int
) -> list[tuple[int, int]]:
    """Again and again the longest, leftmost piece of a run that is still free."""
    runs = [run for ids in segments.values() for run in naive_runs(prompt, ids, min_length)]
    free = [True] * len(prompt)
    tiles: list[tuple[int, int]] = []
    while True:
        best = (min_length - 1, 0, 0)
        for start, stop in runs:
            first = start
            while first < stop:
                last = first
                while last < stop and free[last]:
                    last += 1
                if (last - first, -first) > (best[0], -best[1]) and last - first >= min_length:
                    best = (last - first, first, last)
                first = last + 1
        length, first, last = best
        if length < min_length:
            return sorted(tiles)
        tiles.append((first, last))
        free[first:last] = [False] * length


def find(ids: list[int], wanted: list[int]) -> int:
    """First place of `wanted` in `ids`, or -1."""
    places = range(len(ids) - len(wanted) + 1)
    return next((i for i in places if ids[i : i + len(wanted)] == wanted), -1)


def tiles(matches: list[Match]) -> list[tuple[int, int]]:
    return [(match.start, match.stop) for match in matches]


def crowded(segments: dict[str, list[int]]) -> bool:
    """Whether one text holds one aligned window more than four times."""
    for ids in segments.values():
        windows = [tuple(ids[i : i + WINDOW]) for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
        if any(windows.count(window) > 4 for window in windows):
            return True
    return False


@st.composite
def worlds(draw: st.DrawFn, alphabet: int = 6) -> tuple[dict[str, list[int]], list[int]]:
    """Segments, and a prompt made of pieces of them and of noise."""
    tokens = st.integers(0, alphabet - 1)
    texts = draw(st.lists(st.lists(tokens, max_size=60), min_size=1, max_size=5))
    prompt: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            source = draw(st.sampled_from(texts))
            start = draw(st.integers(0, len(source)))
            prompt += source[start : draw(st.integers(start, len(source)))]
        else:
            prompt += draw(st.lists(tokens, max_size=12))
    return {f"s{i}": text for i, text in enumerate(texts)}, prompt


def build(segments: dict[str, list[int]], seed: int | None = None) -> SegmentIndex:
    index = SegmentIndex(WINDOW, seed)
    for name, ids in segments.items():
        index.add(name, ids)
    index.check_integrity()
    return index


def check_valid(
    matches: list[Match], segments: dict[str, list[int]], prompt: list[int], min_length: int
) -> None:
    position = 0
    for match in matches:
        assert position <= match.start < match.stop <= len(prompt)
        assert len(match) >= min_length
        position = match.stop
        assert 1 <= len(match.sources) <= MAX_SOURCES
        assert len({source.segment for source in match.sources}) == len(match.sources)
        for source in match.sources:
            stored = segments[source.segment][source.offset : source.offset + len(match)]
            assert stored == prompt[match.start : match.stop]


@given(worlds(), st.integers(GUARANTEED, 20))
@settings(max_examples=200, deadline=None)
def test_equals_the_naive_tiling(
    world: tuple[dict[str, list[int]], list[int]], min_length: int
) -> None:
    segments, prompt = world
    assume(not crowded(segments))
    matches = build(segments).match(prompt, min_length)
    check_valid(matches, segments, prompt, min_length)
    assert tiles(matches) == naive_tiles(prompt, segments, min_length)
    for match in matches:
        wanted = prompt[match.start : match.stop]
        expected = {name: find(ids, wanted) for name, ids in segments.items()}
        newest_first = [name for name in reversed(segments) if expected[name] >= 0]
        assert match.sources == tuple(Source(name, expected[name]) for name in newest_first)


@given(worlds(alphabet=2), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_matches_are_real_whatever_the_text(
    world: tuple[dict[str, list[int]], list[int]], min_length: int
) -> None:
    segments, prompt = world
    check_valid(build(segments).match(prompt, min_length), segments, prompt, min_length)


@given(worlds(alphabet=2))
@settings(max_examples=100, deadline=None)
def test_the_inside_of_a_long_run_is_covered_even_when_windows_are_crowded(
    world: tuple[dict[str, list[int]], list[int]],
) -> None:
    segments, prompt = world
    covered = {
        position
        for match in build(segments).match(prompt, 1)
        for position in range(match.start, match.stop)
    }
    margin = WINDOW - 1
    for ids in segments.values():
        for start, stop in naive_runs(prompt, ids, GUARANTEED):
            assert set(range(start + margin, stop - margin)) <= covered


@given(worlds(), st.randoms(use_true_random=False), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_order_and_seed_do_not_matter(
    world: tuple[dict[str, list[int]], list[int]], shuffle: object, seed: int
) -> None:
    segments, prompt = world
    assume(not crowded(segments))
    names = list(segments)
    shuffle.shuffle(names)  # type: ignore[attr-defined]
    first = build(segments).match(prompt, GUARANTEED)
    second = build({name: segments[name] for name in names}, seed).match(prompt, GUARANTEED)
    assert tiles(first) == tiles(second)
    assert [set(match.sources) for match in first] == [set(match.sources) for match in second]


@given(worlds(alphabet=3), st.integers(0, 31))
@settings(max_examples=100, deadline=None)
def test_remove_leaves_nothing(world: tuple[dict[str, list[int]], list[int]], chosen: int) -> None:
    segments, prompt = world
    index = build(segments, seed=1)
    kept = {}
    for number, (name, ids) in enumerate(segments.items()):
        if chosen >> number & 1:
            assert index.remove(name)
            assert not index.remove(name)
            assert name not in index
            index.check_integrity()
        else:
            kept[name] = ids
    assert len(index) == len(kept)
    assert index.match(prompt, GUARANTEED) == build(kept, seed=1).match(prompt, GUARANTEED)
    for name in kept:
        index.remove(name)
    index.check_integrity()
    assert index.match(prompt, 1) == []
    assert not index._table._buckets
    assert not index._texts


@pytest.mark.parametrize("window", [1, 4, 16])
def test_every_run_of_the_guaranteed_length_is_found(window: int) -> None:
    text = list(range(100, 100 + 6 * window))
    index = SegmentIndex(window)
    index.add("text", text)
    length = index.guaranteed_length
    assert length == 2 * window - 1
    for offset in range(len(text) - length + 1):
        prompt = [1, 2, 3, *text[offset : offset + length], 4]
        assert index.match(prompt, length) == [Match(3, 3 + length, (Source("text", offset),))]


def test_the_longest_run_wins_and_the_other_is_cut() -> None:
    index = SegmentIndex(WINDOW)
    index.add("left", list(range(0, 30)))
    index.add("right", list(range(20, 70)))
    assert index.match(list(range(70)), WINDOW) == [
        Match(0, 20, (Source("left", 0),)),
        Match(20, 70, (Source("right", 0),)),
    ]


def test_a_cut_below_the_minimum_is_dropped() -> None:
    index = SegmentIndex(WINDOW)
    index.add("left", list(range(0, 30)))
    index.add("right", list(range(20, 70)))
    assert tiles(index.match(list(range(70)), 21)) == [(20, 70)]


def test_sources_are_the_newest_and_at_most_eight() -> None:
    index = SegmentIndex(WINDOW)
    text = list(range(40))
    for number in range(10):
        index.add(f"same{number}", text)
    for number in range(10):
        index.add(f"longer{number}", [900 + number, *text])
    (match,) = index.match([7, *text], WINDOW)
    assert match.sources == tuple(Source(f"longer{number}", 1) for number in range(9, 1, -1))


def test_one_text_under_many_names_is_indexed_once() -> None:
    index = SegmentIndex(WINDOW)
    for number in range(1000):
        index.add(f"s{number}", list(range(400)))
    assert len(index) == 1000
    assert len(index._table) == 100
    index.remove("s999")
    (match,) = index.match(list(range(400)), WINDOW)
    assert match.sources[0] == Source("s998", 0)
    index.check_integrity()


def test_text_after_a_crowded_beginning_is_found_whole() -> None:
    beginning, rng = list(range(40)), np.random.default_rng(0)
    bodies = [rng.integers(100, 10_000, 50).tolist() for _ in range(100)]
    index = SegmentIndex(WINDOW)
    for number, body in enumerate(bodies):
        index.add(f"s{number}", beginning + body)
    assert index.match([77, *beginning, *bodies[3]], GUARANTEED) == [
        Match(1, 91, (Source("s3", 0),))
    ]


def test_sources_behind_a_crowded_beginning_are_all_named() -> None:
    beginning = list(range(40))
    index = SegmentIndex(WINDOW)
    index.add("old", [500, *beginning, *range(50, 80), 501])
    index.add("older", [600, *beginning, *range(50, 80), 601])
    for number in range(100):
        index.add(f"s{number}", [900 + number, *beginning, 2000 + number])
    (match,) = index.match([7, *beginning, *range(50, 80)], GUARANTEED)
    assert match == Match(1, 71, (Source("older", 1), Source("old", 1)))


def test_collisions_of_hashes_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def useless(self: RollingHash, token_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        return np.zeros(max(0, len(token_ids) - self.window + 1), dtype=np.uint64)

    monkeypatch.setattr(RollingHash, "windows", useless)
    segments = {"a": [*range(10)], "b": [*range(20, 40)], "c": [3, 4, 5, 6, 7]}
    prompt = [1, 2, 3, *range(20, 30), 4, 5]
    matches = build(segments).match(prompt, WINDOW)
    check_valid(matches, segments, prompt, WINDOW)
    assert tiles(matches) == [(3, 13)]
    index = build(segments)
    assert all(index.remove(name) for name in segments)
    index.check_integrity()


def test_accepts_arrays_and_keeps_a_copy() -> None:
    index = SegmentIndex(WINDOW)
    ids = np.arange(20, dtype=np.int32)
    index.add("a", ids)
    ids[:] = 0
    assert tiles(index.match(np.arange(20, dtype=np.uint16), 20)) == [(0, 20)]


def test_short_segments_and_empty_prompts() -> None:
    index = SegmentIndex(WINDOW)
    index.add("empty", [])
    index.add("short", [1, 2, 3])
    index.check_integrity()
    assert index.match([], 1) == []
    assert index.match([1], 1) == []
    assert index.match([1, 2, 3, 4], 1) == []


def test_wrong_input_is_refused() -> None:
    index = SegmentIndex(WINDOW)
    index.add("a", [1, 2, 3, 4])
    with pytest.raises(InputError, match="'a' is already indexed"):
        index.add("a", [5])
    with pytest.raises(InputError, match="one-dimensional"):
        index.match([[1, 2]], 1)  # type: ignore[list-item]
    with pytest.raises(InputError, match="float64"):
        index.add("b", [1.5])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="got 0"):
        index.match([1], 0)
    with pytest.raises(ConfigError, match="got 0"):
        SegmentIndex(0)


def test_broken_index_is_noticed() -> None:
    index = build({"a": list(range(20))})
    index._by_segment["ghost"] = 99
    with pytest.raises(KvcmasError, match="do not agree"):
        index.check_integrity()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), st.integers(1, 9), st.integers(0))
def test_window_hashes_depend_on_their_tokens_only(ids: list[int], window: int, seed: int) -> None:
    rolling = RollingHash(window, seed)
    array = np.array(ids, dtype=np.int64)
    hashes = rolling.windows(array)
    assert hashes.shape == (max(0, len(ids) - window + 1),)
    for place, value in enumerate(hashes):
        assert rolling.windows(array[place : place + window])[0] == value
    assert len(set(hashes.tolist())) == len(
        {tuple(ids[i : i + window]) for i in range(len(hashes))}
    )
