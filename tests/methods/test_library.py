"""The donor library alone: what is found, who owns it, what is kept."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcmas.core.model_info import ModelInfo
from kvcmas.core.rope import Rope
from kvcmas.core.segment import SegmentKV
from kvcmas.errors import ConfigError, PlanError
from kvcmas.methods.base import Outcome
from kvcmas.methods.kv_library import KVLibrary
from kvcmas.store.info import Put
from kvcmas.workflow.prompt import Prompt

from ..engines.tiny import random_ids

INFO = ModelInfo(1, 1, 2, 2, Rope((), (None,)), None, "")
BYTES = 2 * 2 * 4 + 2 * 8
"""Of one token: keys and values of two float32 each, an id and a position."""
NAMES = count()
ROLE, DOCUMENT, TASK = random_ids(40, 1), random_ids(100, 2), random_ids(30, 3)


def library(budget: int = 1 << 20, **options: Any) -> KVLibrary:
    return KVLibrary(INFO, budget, **options)


def prompt(ids: list[int], agent: str = "a", tenant: str = "") -> Prompt:
    return Prompt(np.array(ids, dtype=np.int64), agent, f"request-{next(NAMES)}", tenant)


def keep(
    shelves: KVLibrary,
    ids: list[int],
    start: int = 0,
    *,
    agent: str = "a",
    tenant: str = "",
    exact: bool = True,
    copies: bool = False,
) -> Put:
    """Capture `ids[start:]`, whose KV is its ids."""
    tokens = torch.tensor(ids)
    state = tokens.float()[None, None, :, None].expand(1, 1, -1, 2)
    kv = SegmentKV(state, state, tokens, torch.arange(len(ids))[None])
    outcome = Outcome(kv, ((0, len(ids)),), exact)
    put = shelves.capture(
        prompt(ids, agent, tenant), outcome, start, len(ids), exact, copies=copies
    )
    shelves.check_integrity()
    return put


class TestFind:
    def test_prefix_then_runs(self) -> None:
        shelves = library()
        first = keep(shelves, ROLE)
        second = keep(shelves, [7] * 20 + DOCUMENT, 20, agent="b")
        found = shelves.find(prompt(ROLE + TASK + DOCUMENT + TASK))
        assert found.prefix is not None
        assert (found.prefix.segment, found.prefix.length) == (first.id, 40)
        (run,) = found.runs
        assert (run.start, run.stop, len(run)) == (70, 170, 100)
        (donor,) = run.sources
        assert (donor.segment, donor.offset, donor.info.agent) == (second.id, 0, "b")
        assert not donor.own
        assert found.notes == ()

    @pytest.mark.parametrize("length", [47, 48, 49, 100])
    def test_last_token_is_left(self, length: int) -> None:
        shelves = library()
        keep(shelves, DOCUMENT[:length])
        found = shelves.find(prompt(DOCUMENT[:length]))
        assert found.prefix is not None
        assert found.prefix.length == length - 1
        assert found.runs == ()
        keep(shelves, ROLE + DOCUMENT[:length], 40)
        (run,) = shelves.find(prompt(TASK + DOCUMENT[:length])).runs
        assert (run.start, run.stop) == (31 if not run.sources[0].info.start else 30, 29 + length)

    @pytest.mark.parametrize(("length", "found"), [(15, 0), (16, 16), (17, 17)])
    def test_shortest_prefix(self, length: int, found: int) -> None:
        shelves = library()
        keep(shelves, DOCUMENT)
        hit = shelves.find(prompt(DOCUMENT[:length] + TASK)).prefix
        assert (hit.length if hit else 0) == found

    @pytest.mark.parametrize(("length", "found"), [(31, 0), (32, 32), (33, 33)])
    def test_shortest_run(self, length: int, found: int) -> None:
        shelves = library()
        keep(shelves, ROLE + DOCUMENT)
        runs = shelves.find(prompt(TASK + DOCUMENT[5 : 5 + length] + TASK)).runs
        assert sum(map(len, runs)) == found

    @pytest.mark.parametrize("length", [0, 1, 2])
    def test_tiny_prompts(self, length: int) -> None:
        shelves = library(min_length=1, min_prefix=1)
        keep(shelves, DOCUMENT)
        found = shelves.find(prompt(DOCUMENT[:length]))
        assert (found.prefix.length if found.prefix else 0) == max(0, length - 1)
        assert found.runs == ()

    def test_first_token_is_neither_moved_nor_replaced(self) -> None:
        shelves = library()
        keep(shelves, DOCUMENT)
        # A donor's own first token is computed wherever the document stands...
        (run,) = shelves.find(prompt(TASK + DOCUMENT + TASK)).runs
        assert (run.start, run.stop, run.sources[0].offset) == (31, 130, 1)
        # ...and so is the reader's, whoever has the document further on.
        shelves = library()
        keep(shelves, ROLE + DOCUMENT, 40)
        (run,) = shelves.find(prompt(DOCUMENT + TASK)).runs
        assert (run.start, run.stop, run.sources[0].offset) == (1, 100, 1)

    def test_approximate_beginnings_are_no_prefix(self) -> None:
        shelves = library()
        keep(shelves, ROLE + DOCUMENT, exact=False)
        assert shelves.find(prompt(ROLE + DOCUMENT + TASK)).prefix is None

    def test_notes_say_why(self) -> None:
        shelves = library()
        assert "nothing is stored" in shelves.find(prompt(DOCUMENT)).notes[0]
        keep(shelves, DOCUMENT)
        assert "no stored segment shares 32" in shelves.find(prompt(ROLE)).notes[0]
        assert "behind its prefix" in shelves.find(prompt(DOCUMENT + ROLE)).notes[0]
        # Nothing to say of a rest that is too short anyway.
        assert shelves.find(prompt(DOCUMENT + TASK[:5])).notes == ()


class TestOwn:
    def own(self, shelves: KVLibrary, ids: list[int], agent: str = "a") -> list[bool]:
        runs = shelves.find(prompt(ids, agent)).runs
        return [donor.own for run in runs for donor in run.sources]

    def test_same_place_and_same_tokens_before(self) -> None:
        shelves = library()
        keep(shelves, ROLE + DOCUMENT, 40, exact=False)
        assert self.own(shelves, ROLE + DOCUMENT + TASK) == [True]
        assert self.own(shelves, ROLE + DOCUMENT + TASK, agent="b") == [False]
        assert self.own(shelves, ROLE[::-1] + DOCUMENT + TASK) == [False]
        assert self.own(shelves, ROLE[1:] + DOCUMENT + TASK) == [False]

    def test_exact_kv_is_anyones(self) -> None:
        shelves = library()
        keep(shelves, ROLE + DOCUMENT, 40)
        assert self.own(shelves, ROLE + DOCUMENT + TASK, agent="b") == [True]
        assert self.own(shelves, ROLE[::-1] + DOCUMENT + TASK, agent="b") == [False]

    def test_tokens_within_the_segment_count(self) -> None:
        """The run begins inside the segment, whose beginning differs from the prompt's."""
        shelves = library()
        keep(shelves, ROLE + DOCUMENT, 20, exact=False)
        changed = [*ROLE[:30], 300, *ROLE[31:]]
        assert self.own(shelves, changed + DOCUMENT + TASK) == [False]
        assert self.own(shelves, ROLE + DOCUMENT + TASK) == [True]


class TestCapture:
    def test_held_text_is_not_stored_again(self) -> None:
        shelves = library()
        first = keep(shelves, ROLE + DOCUMENT, 40)
        again = keep(shelves, TASK + DOCUMENT[10:90], 40)
        assert again.id is None
        assert str(first.id) in again.reason
        assert keep(shelves, TASK + DOCUMENT[10:90], 40, agent="b").id is None
        assert keep(shelves, TASK + DOCUMENT[10:90], 40, agent="b", copies=True).id
        assert keep(shelves, TASK + DOCUMENT[10:90], 40, agent="b", copies=True).id is None

    def test_exact_kv_goes_besides_approximate(self) -> None:
        shelves = library()
        assert keep(shelves, ROLE + DOCUMENT, 40, exact=False).id
        assert keep(shelves, ROLE + DOCUMENT, 40, exact=True).id
        assert keep(shelves, ROLE + DOCUMENT, 40, exact=False).id is None

    def test_beginnings_grow(self) -> None:
        shelves = library()
        short = keep(shelves, ROLE)
        long = keep(shelves, ROLE + DOCUMENT)
        assert [info.id for info in shelves.store.infos()] == [long.id]
        assert short.id != long.id
        assert keep(shelves, ROLE).id is None  # held by the longer one
        assert keep(shelves, ROLE, agent="b").id is None
        # Another agent's stays next to it.
        assert keep(shelves, ROLE + DOCUMENT + TASK, agent="b").id
        assert {info.agent for info in shelves.store.infos()} == {"a", "b"}

    def test_a_held_beginning_is_replaced_when_it_is_released(self) -> None:
        shelves = library()
        short = str(keep(shelves, ROLE).id)
        assert shelves.pin("reader", [short]) == {short}
        keep(shelves, ROLE + DOCUMENT)
        assert shelves.pin("other", [short]) == frozenset()
        assert shelves.kv(short).token_ids.tolist() == ROLE
        shelves.release("reader")
        with pytest.raises(PlanError, match="is not here"):
            shelves.kv(short)
        shelves.check_integrity()

    def test_views_are_copied(self) -> None:
        shelves = library()
        ids = torch.tensor(DOCUMENT)
        state = ids.float()[None, None, :, None].repeat(1, 1, 1, 2)
        kv = SegmentKV(state, state.clone(), ids, torch.arange(100)[None])
        put = shelves.capture(prompt(DOCUMENT), Outcome(kv, ((0, 100),), True), 10, 90, True)
        state.zero_()
        stored = shelves.kv(str(put.id))
        assert stored.keys[0, 0, :, 0].tolist() == [float(i) for i in DOCUMENT[10:90]]
        assert stored.positions.tolist() == [list(range(10, 90))]


class TestBudget:
    def test_evicted_segments_are_not_found(self) -> None:
        shelves = library(100 * BYTES)
        first = keep(shelves, DOCUMENT, tenant="x")
        second = keep(shelves, random_ids(100, 9))
        assert second.evicted == (first.id,)
        found = shelves.find(prompt(DOCUMENT + TASK, tenant="x"))
        assert (found.prefix, found.runs) == (None, ())
        assert found.notes[0].startswith("nothing is stored")
        assert "budget of 3200 bytes" in found.notes[1]

    def test_too_large(self) -> None:
        shelves = library(99 * BYTES)
        put = keep(shelves, DOCUMENT)
        assert put.id is None
        assert "whole budget is 3168" in put.reason
        assert "whole budget is 3168" in shelves.find(prompt(DOCUMENT)).notes[1]

    def test_pinned_segments_stay(self) -> None:
        shelves = library(100 * BYTES)
        first = str(keep(shelves, DOCUMENT).id)
        shelves.pin("reader", [first, first])
        shelves.pin("reader", [first])
        refused = keep(shelves, random_ids(100, 9))
        assert refused.id is None
        assert "pinned" in refused.reason
        shelves.release("reader")
        shelves.release("reader")
        assert shelves.store.pins(first) == 0
        assert keep(shelves, random_ids(100, 9)).id
        assert shelves.pin("reader", [first]) == frozenset()
        assert shelves.pinned() == 0

    def test_dropped(self) -> None:
        shelves = library()
        name = str(keep(shelves, DOCUMENT).id)
        assert shelves.drop(name)
        assert not shelves.drop(name)
        assert shelves.find(prompt(DOCUMENT)).prefix is None
        shelves.check_integrity()

    @pytest.mark.parametrize("options", [{"min_length": 0}, {"min_prefix": 0}])
    def test_options(self, options: dict[str, int]) -> None:
        with pytest.raises(ConfigError, match="must be an integer >= 1"):
            library(**options)
        with pytest.raises(ConfigError, match="budget_bytes"):
            library(-1)


def test_tenants_share_neither_segments_nor_names() -> None:
    shelves = library()
    tenants = ["", "a", "A", " ", "../../x", "a\0", "\u00e9", "e\u0301"]
    names = {keep(shelves, ROLE + DOCUMENT, tenant=tenant).id for tenant in tenants}
    assert len(names) == len(tenants)
    for tenant in tenants:
        found = shelves.find(prompt(ROLE + DOCUMENT, tenant=tenant))
        (info,) = shelves.tenant_infos(tenant)
        assert found.prefix is not None
        assert found.prefix.segment == info.id
    assert shelves.find(prompt(ROLE + DOCUMENT, tenant="B")).prefix is None


PARTS = [random_ids(length, 50 + length) for length in (3, 18, 33, 50, 64)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_found_tokens_are_the_prompts(data: st.DataObject) -> None:
    shelves = library(data.draw(st.integers(200, 700)) * BYTES, min_length=20)
    texts = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map(
        lambda parts: [token for part in parts for token in part]
    )
    for _ in range(data.draw(st.integers(1, 6))):
        ids = data.draw(texts)
        start = data.draw(st.sampled_from([0, 0, len(ids) // 2]))
        keep(
            shelves,
            ids,
            start,
            agent=data.draw(st.sampled_from("ab")),
            exact=data.draw(st.booleans()),
        )
    asked = data.draw(texts)
    found = shelves.find(prompt(asked))
    position = 1
    if found.prefix:
        position = found.prefix.length
        assert 16 <= position < len(asked)
        assert shelves.kv(found.prefix.segment).token_ids[:position].tolist() == asked[:position]
        assert found.prefix.info.exact
    for run in found.runs:
        assert position <= run.start
        assert len(run) >= 20
        position = run.stop
        for donor in run.sources:
            stored = shelves.kv(donor.segment).token_ids.tolist()
            assert stored[donor.offset :][: len(run)] == asked[run.start : run.stop]
            assert donor.info.start + donor.offset > 0
            if donor.own:
                assert donor.info.start + donor.offset == run.start
    assert position < max(2, len(asked))
