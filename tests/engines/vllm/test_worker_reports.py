"""What a worker tells the scheduler, for which tenant it learns, and books that it adopts."""

from __future__ import annotations

import pytest
import torch

from kvcmas.engines.vllm.messages import Load, Measure, PairName, StepWork
from kvcmas.errors import StateMismatchError
from kvcmas.methods.kvcmas.frozen import FrozenBook
from kvcmas.methods.kvcmas.pair import Pair

from ...methods.kvcmas_team import document, prompt_of
from .rank import ROLE, TEXT, Rank, dense_kv, source_of, taught_rank

AB = PairName("", "a", "b")


@pytest.fixture(scope="module")
def taught() -> Rank:
    return taught_rank()


class TestReport:
    def test_is_none_without_news(self) -> None:
        rank = Rank()
        assert rank.worker.report() is None
        rank.worker.before_forward(StepWork())
        rank.worker.after_forward(StepWork())
        assert rank.worker.report() is None

    def test_bytes_and_seconds(self, taught: Rank) -> None:
        taught.worker.report()
        exact = dense_kv(prompt_of("b", document(40)))
        blocks, source = taught.prefill(exact), source_of("new")
        taught.worker.before_forward(StepWork(loads=[Load("1", source, blocks)]))
        taught.worker.after_forward(StepWork(measures=[Measure("2", ROLE, source, blocks)]))
        taught.capture("tmp", "a", exact)
        assert taught.worker.drain(60)
        report = taught.worker.report()
        assert report is not None
        book = taught.worker.book()
        features = sum(len(segment) * (3 * 32 + 16) * 4 for segment in taught.fake.held.values())
        assert report.nbytes == {
            "kv_device": taught.pool.nbytes["device"],
            "features": features,
            "states": sum(book.state_bytes().values()) + book.shared_bytes(),
            "learning": book.learning_bytes(),
        }
        assert report.seconds.keys() == {"load", "measure", "capture", "learn"}
        assert all(seconds > 0 for seconds in report.seconds.values())
        taught.worker.before_forward(StepWork(drops=["tmp"]))

    def test_bytes_come_with_work_alone(self) -> None:
        """A rank whose thread is late must not report other bytes than the rest."""
        rank = Rank()
        rank.capture("a0", "a", dense_kv(prompt_of("a", document(0))))
        first = rank.worker.report()
        assert first is not None
        assert first.nbytes["kv_device"] == rank.pool.nbytes["device"]
        rank.lesson(source_of("a0"), dense_kv(prompt_of("b", document(0))))
        rank.worker.report()
        assert rank.worker.drain(60)
        late = rank.worker.report()
        assert late is None or late.nbytes == {}

    def test_versions_count_the_fits(self) -> None:
        rank = Rank()
        versions, corrections = [], []
        for number in range(12):
            rank.teach(1, first=number)
            report = rank.worker.report()
            assert report is not None
            if (0, AB) in report.facts:
                versions.append(report.facts[0, AB].version)
                corrections.append(rank.worker.book().correction(Pair("a", "b")))
        assert versions[0] == 0
        assert versions == sorted(versions)
        assert versions[-1] >= 2
        for before, after in zip(range(len(versions)), range(1, len(versions)), strict=False):
            same = corrections[before] is corrections[after]
            assert (versions[before] == versions[after]) == same

    def test_scores_of_all_donors_once_landmarks_are_known(self) -> None:
        rank = Rank()
        scored: list[set[str]] = []
        for number in range(8):
            rank.teach(1, first=number)
            report = rank.worker.report()
            assert report is not None
            assert {key[:2] for key in report.scores} <= {(0, AB)}
            scored.append({key[2] for key in report.scores})
        first = next(index for index, names in enumerate(scored) if names)
        assert scored[first] == {f"a{number}" for number in range(first + 1)}
        assert all(f"a{number}" in scored[number] for number in range(first, 8))
        rank.capture("b0", "b", dense_kv(prompt_of("b", document(0))))
        assert rank.worker.drain(60)
        report = rank.worker.report()
        assert report is not None
        assert report.scores == {}

    def test_no_scores_of_dropped_donors(self, taught: Rank) -> None:
        taught.worker.report()
        taught.capture("tmp", "a", dense_kv(prompt_of("a", document(43))))
        assert taught.worker.drain(60)
        taught.worker.before_forward(StepWork(drops=["tmp"]))
        report = taught.worker.report()
        assert report is not None
        assert report.scores == {}

    def test_no_scores_without_landmarks(self) -> None:
        rank = Rank(landmarks=False)
        rank.teach(8)
        report = rank.worker.report()
        assert report is not None
        assert report.scores == {}


class TestTenants:
    def test_learn_apart(self, taught: Rank) -> None:
        kv = dense_kv(prompt_of("a", document(44)))
        taught.capture("theirs", "a", kv, tenant="another")
        assert taught.worker.drain(60)
        assert taught.worker.book("another").basis is None
        keys, _ = taught.load(source_of("theirs", tenant="another"))
        assert torch.equal(keys, kv.keys[:, :, ROLE : ROLE + TEXT])

    def test_a_lesson_needs_a_donor_of_its_own(self) -> None:
        rank = Rank()
        rank.teach(6)
        seen = rank.worker.book().pairs[Pair("a", "b")].seen
        exact = dense_kv(prompt_of("b", document(0)))
        rank.lesson(source_of("a0", tenant="another"), exact)
        rank.lesson(source_of("gone"), exact)
        rank.lesson(source_of("a0", stop=ROLE), exact)
        assert rank.worker.drain(60)
        assert rank.worker.book().pairs[Pair("a", "b")].seen == seen
        assert rank.worker.book("another").pairs == {}


class TestAdopt:
    def test_tells_what_the_book_knows_and_learns_nothing(self, taught: Rank) -> None:
        other = Rank(number=3)
        other.capture("new", "a", dense_kv(prompt_of("a", document(40))))
        other.worker.adopt({"": taught.worker.book()})
        assert other.worker.drain(60)
        report = other.worker.report()
        assert report is not None
        state = taught.worker.book().pairs[Pair("a", "b")]
        facts = report.facts[3, AB]
        assert (facts.seen, facts.version, facts.audited) == (state.seen, 1, state.audited)
        assert list(report.scores) == [(3, AB, "new")]
        other.cache.reads.clear()
        seen = state.seen
        other.lesson(source_of("new"), dense_kv(prompt_of("b", document(40))))
        assert other.worker.drain(60)
        assert other.cache.reads == []
        assert state.seen == seen
        assert isinstance(other.worker.book(), FrozenBook)

    def test_of_other_heads_is_refused(self, taught: Rank) -> None:
        half = Rank(heads=1)
        with pytest.raises(StateMismatchError, match="64 channels, this rank has 3 with 32"):
            half.worker.adopt({"": taught.worker.book()})

    def test_does_not_learn_when_told_so(self) -> None:
        rank = Rank(learn=False)
        rank.teach(6)
        assert rank.worker.book().pairs == {}
        assert rank.worker.book().basis is None
