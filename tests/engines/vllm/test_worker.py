"""The worker side around a forward pass: loads, measures, captures, and what it reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvcmas.core.deviation import relative_deviation
from kvcmas.core.segment import SegmentKV
from kvcmas.engines.vllm.messages import Load, Measure, Source, StepWork, Sums
from kvcmas.engines.vllm.pool import TieredPool
from kvcmas.engines.vllm.worker import WorkerSide
from kvcmas.errors import StateMismatchError
from kvcmas.methods.kvcmas.pair import Pair

from ...methods.kvcmas_team import document, prompt_of
from .rank import ROLE, TEXT, Rank, capture, dense_kv, small_config, source_of, taught_rank


def measured(rank: Rank, source: Source, kv: SegmentKV) -> Sums:
    """A deviation as the next report gives it."""
    blocks = rank.prefill(kv)
    rank.worker.after_forward(StepWork(measures=[Measure("request", 7, source, blocks)]))
    report = rank.worker.report()
    assert report is not None
    (name,) = report.deviations
    assert name == ("request", 7, source.stop)
    return report.deviations[name]


@pytest.fixture(scope="module")
def taught() -> Rank:
    return taught_rank()


class TestMeasure:
    @pytest.mark.parametrize("corrected", [False, True])
    @pytest.mark.parametrize("span", [(ROLE, ROLE + TEXT), (ROLE + 16, ROLE + 32)])
    def test_is_the_relative_deviation(
        self, taught: Rank, corrected: bool, span: tuple[int, int]
    ) -> None:
        source = source_of("new", "b", *span, corrected=corrected)
        exact = dense_kv(prompt_of("b", document(40)))
        keys, values = taught.load(source)
        part = exact.slice(*span)
        approx = SegmentKV(keys, values, part.token_ids, part.positions)
        expected = relative_deviation(part, approx)
        assert measured(taught, source, exact).deviation() == pytest.approx(expected, rel=1e-6)

    def test_correction_lowers_it(self, taught: Rank) -> None:
        exact = dense_kv(prompt_of("b", document(40)))
        blind, corrected = (
            measured(taught, source_of("new", corrected=flag), exact).deviation()
            for flag in (False, True)
        )
        assert 0 < corrected < 0.97 * blind

    def test_of_itself_is_zero(self, taught: Rank) -> None:
        exact = dense_kv(prompt_of("a", document(40)))
        assert measured(taught, source_of("new", "a"), exact).deviation() == 0.0

    @pytest.mark.parametrize("junk", [torch.nan, torch.inf])
    def test_is_nan_where_kv_is_not_finite(self, taught: Rank, junk: float) -> None:
        exact = dense_kv(prompt_of("b", document(40)))
        exact.values[1, 0, ROLE + 3, 2] = junk
        assert np.isnan(measured(taught, source_of("new"), exact).deviation())

    def test_is_nan_without_the_donor(self, taught: Rank) -> None:
        exact = dense_kv(prompt_of("b", document(40)))
        assert np.isnan(measured(taught, source_of("gone"), exact).deviation())

    def test_of_two_ranks_that_learned_of_their_own_heads(self) -> None:
        exact = dense_kv(prompt_of("b", document(40)))
        sums: dict[bool, list[Sums]] = {False: [], True: []}
        for number in range(2):
            rank = Rank(first=number, heads=1, number=number)
            rank.teach(8)
            rank.capture("new", "a", dense_kv(prompt_of("a", document(40))))
            for corrected, parts in sums.items():
                rank.worker.report()
                parts.append(measured(rank, source_of("new", corrected=corrected), exact))
        blind, better = (one.plus(other).deviation() for one, other in sums.values())
        assert 0 < better < 0.97 * blind

    def test_sums_of_two_ranks_add_up(self) -> None:
        ranks = [Rank(), Rank(first=0, heads=1), Rank(first=1, heads=1, number=1)]
        exact = dense_kv(prompt_of("b", document(0)))
        sums = []
        for rank in ranks:
            rank.capture("a0", "a", dense_kv(prompt_of("a", document(0))))
            sums.append(measured(rank, source_of("a0"), exact))
        whole, both = sums[0], sums[1].plus(sums[2])
        assert whole.error.shape == whole.energy.shape == (6,)
        np.testing.assert_allclose(both.error, whole.error, rtol=1e-12)
        np.testing.assert_allclose(both.energy, whole.energy, rtol=1e-12)


class TestLoad:
    def test_touches_nothing_else(self, taught: Rank) -> None:
        exact = dense_kv(prompt_of("b", document(41)))
        blocks = taught.prefill(exact)
        source = source_of("new", start=ROLE + 5, stop=ROLE + 50)
        taught.worker.before_forward(StepWork(loads=[Load("request", source, blocks)]))
        keys, values = taught.cache.read(blocks, 0, len(exact))
        for span in (slice(0, ROLE + 5), slice(ROLE + 50, None)):
            assert torch.equal(keys[:, :, span], exact.keys[:, :, span])
            assert torch.equal(values[:, :, span], exact.values[:, :, span])
        assert not torch.equal(keys, exact.keys)

    @pytest.mark.parametrize("change", [{"segment": "gone"}, {"tenant": "another"}])
    def test_of_a_missing_donor_fails(self, taught: Rank, change: dict[str, Any]) -> None:
        taught.worker.report()
        kv = dense_kv(prompt_of("c", document(42)))
        bad, good = taught.prefill(kv), taught.prefill(kv)
        source = source_of("new")
        work = StepWork(
            loads=[Load("bad", replace(source, **change), bad), Load("good", source, good)]
        )
        taught.worker.before_forward(work)
        report = taught.worker.report()
        assert report is not None
        assert report.failed == {"bad"}
        assert torch.equal(taught.cache.read(bad, 0, len(kv))[0], kv.keys)
        assert torch.equal(taught.cache.read(bad, 0, len(kv))[1], kv.values)
        assert not torch.equal(taught.cache.read(good, 0, len(kv))[0], kv.keys)

    def test_of_a_donor_dropped_in_the_same_step_fails(self) -> None:
        rank = Rank()
        rank.capture("a0", "a", dense_kv(prompt_of("a", document(0))))
        load = Load("request", source_of("a0"), rank.cache.allocate(200))
        rank.worker.before_forward(StepWork(drops=["a0"], loads=[load]))
        report = rank.worker.report()
        assert report is not None
        assert report.failed == {"request"}
        assert rank.fake.held == {}

    def test_features_that_are_missing_are_computed(self, taught: Rank) -> None:
        expected = taught.load(source_of("new"))
        other = Rank(landmarks=False)  # with landmarks, a new book's features are computed at once
        other.capture("new", "a", dense_kv(prompt_of("a", document(40))))
        assert other.worker.drain(60)
        other.worker.adopt({"": taught.worker.book()})
        assert other.worker.drain(60)
        assert other.worker._known.feature_bytes() == 0
        keys, values = other.load(source_of("new"))
        assert torch.equal(keys, expected[0])
        assert torch.equal(values, expected[1])
        assert other.worker._known.feature_bytes() > 0


class TestCapture:
    def test_copies(self) -> None:
        rank = Rank()
        kv = dense_kv(prompt_of("a", document(0)))
        rank.capture("a0", "a", kv, start=5, stop=77, token_ids=kv.token_ids[5:77].numpy())
        held = rank.fake.held["a0"]
        assert torch.equal(held.keys, kv.keys[:, :, 5:77])
        assert torch.equal(held.values, kv.values[:, :, 5:77])
        assert torch.equal(held.token_ids, kv.token_ids[5:77])
        assert torch.equal(held.positions, torch.arange(5, 77)[None])
        report = rank.worker.report()
        assert report is not None
        assert (report.captured, report.refused) == ({"a0": 1}, {})

    def test_that_continues_equals_a_direct_one(self) -> None:
        rank = Rank()
        kv = dense_kv(prompt_of("a", document(0)))
        rank.capture("direct", "a", kv)
        rank.capture("short", "a", kv, stop=61, token_ids=kv.token_ids[:61].numpy())
        rank.cache.reads.clear()
        rank.capture("long", "a", kv, continues="short", kept=57)
        assert rank.cache.reads == [(57, len(kv))]
        assert rank.fake.held.keys() == {"direct", "long"}
        long, direct = rank.fake.held["long"], rank.fake.held["direct"]
        assert torch.equal(long.keys, direct.keys)
        assert torch.equal(long.values, direct.values)
        assert torch.equal(long.positions, direct.positions)
        assert torch.equal(long.token_ids, direct.token_ids)

    @pytest.mark.parametrize("case", ["gone", "shorter", "elsewhere", "another tenant's"])
    def test_that_continues_something_else_is_read_as_a_whole(self, case: str) -> None:
        rank = Rank()
        kv = dense_kv(prompt_of("a", document(0)))
        if case == "shorter":
            rank.capture("old", "a", kv, stop=40, token_ids=kv.token_ids[:40].numpy())
        if case == "elsewhere":
            rank.capture("old", "a", kv, start=3, token_ids=kv.token_ids[3:].numpy())
        if case == "another tenant's":
            rank.capture("old", "a", kv, tenant="another")
        rank.capture("long", "a", kv, continues="old", kept=50)
        assert torch.equal(rank.fake.held["long"].keys, kv.keys)
        assert rank.fake.held.keys() == {"long"}

    def test_without_room_is_refused(self) -> None:
        rank = Rank()
        kv = dense_kv(prompt_of("a", document(0)))
        rank.capture("short", "a", kv, stop=61, token_ids=kv.token_ids[:61].numpy())
        rank.fake.room = rank.fake.held["short"].nbytes
        rank.worker.report()
        rank.capture("long", "a", kv, continues="short", kept=61)
        report = rank.worker.report()
        assert report is not None
        assert report.captured == {}
        assert list(report.refused) == ["long"]
        assert "no room" in report.refused["long"]
        assert rank.fake.held == {}
        assert rank.worker._known.owner("long") is None


class TestPool:
    def test_donors_that_moved_to_the_host(self, taught: Rank) -> None:
        """Most donors are in the second tier: they are learned from and loaded all the same."""
        size = taught.pool.peek("new").nbytes  # type: ignore[union-attr]
        pool = TieredPool(2 * size, 40 * size, to_device=SegmentKV.clone, to_host=SegmentKV.clone)
        rank = Rank(pool)
        rank.teach(8)
        rank.capture("new", "a", dense_kv(prompt_of("a", document(40))))
        report = rank.worker.report()
        assert report is not None
        assert report.nbytes["kv_host"] == 7 * size
        correction = taught.worker.book().correction(Pair("a", "b"))
        learned = rank.worker.book().correction(Pair("a", "b"))
        assert correction is not None
        assert learned is not None
        assert torch.equal(learned.outward, correction.outward)
        for name in ("a0", "new"):
            given = rank.load(source_of(name))
            assert all(map(torch.equal, given, taught.load(source_of(name))))


def test_description_must_fit_the_cache() -> None:
    rank = Rank()
    with pytest.raises(StateMismatchError, match="give the heads of this rank alone"):
        WorkerSide(rank.cache, rank.pool, replace(rank.info, kv_heads=1), small_config())


def test_measures_of_a_step_come_before_its_captures() -> None:
    rank = Rank()
    kv = dense_kv(prompt_of("a", document(0)))
    blocks = rank.prefill(kv)
    work = StepWork(
        captures=[capture("a0", "a", kv, blocks)],
        measures=[Measure("request", ROLE, source_of("a0"), blocks)],
    )
    rank.worker.after_forward(work)
    report = rank.worker.report()
    assert report is not None
    assert np.isnan(report.deviations["request", ROLE, ROLE + TEXT].deviation())
    assert report.captured == {"a0": 1}
