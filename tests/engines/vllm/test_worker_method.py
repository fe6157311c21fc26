"""The worker side against `Kvcmas` itself, taught and served with the same KV."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.vllm.messages import Lesson, PairName, Source, StepWork
from kvcmas.methods.base import Outcome
from kvcmas.methods.kvcmas import Kvcmas
from kvcmas.methods.kvcmas.pair import Pair
from kvcmas.workflow.plan import Reuse
from kvcmas.workflow.prompt import Prompt

from ...methods.kvcmas_team import document, prompt_of
from .rank import ROLE, TEXT, Rank, capture, dense_kv, llama_info, small_config, source_of

AB = Pair("a", "b")
DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Twins:
    """The method and a rank, which see the same requests."""

    dtype: torch.dtype
    method: Kvcmas = field(default_factory=lambda: Kvcmas(llama_info(), small_config()))
    asked: int = 0

    def __post_init__(self) -> None:
        self.rank = Rank(dtype=self.dtype)

    def prompt(self, ids: list[int], agent: str, dial: str | None = None) -> Prompt:
        self.asked += 1
        return Prompt(np.array(ids), agent, str(self.asked), dial=dial)

    def read(self, agent: str, number: int, teacher: str | None = None) -> None:
        """An agent computes a document exactly; with a teacher, both learn from it."""
        ids = prompt_of(agent, document(number))
        kv = dense_kv(ids, self.dtype)
        prompt = self.prompt(ids, agent, "exact")
        self.method.plan(prompt)
        found = self.method.library.find(prompt).runs
        self.method.finish(prompt, Outcome(kv, ((0, len(ids)),), exact=True))
        blocks = self.rank.prefill(kv)
        work = StepWork(captures=[capture(f"{agent}{number}", agent, kv, blocks)])
        if teacher is not None:
            (run,) = found
            source = source_of(f"{teacher}{number}", agent, run.start, run.stop)
            assert run.sources[0].offset == source.offset
            work.lessons.append(Lesson("", source, True, blocks))
        self.rank.worker.after_forward(work)
        self.rank.cache.free(blocks)

    def teach(self, count: int) -> None:
        for number in range(count):
            self.read("a", number)
            self.read("b", number, "a")
        assert self.rank.worker.drain(60)

    def fill(self, reader: str, number: int) -> tuple[Reuse, SegmentKV]:
        """How the method reuses a document, and what it gives."""
        prompt = self.prompt(prompt_of(reader, document(number)), reader)
        (span,) = (span for span in self.method.plan(prompt).reused() if not span.exact)
        states = torch.full((3, 2, len(span), 16), torch.nan, dtype=self.dtype)
        positions = torch.arange(span.start, span.stop)[None]
        ids = torch.tensor(prompt.token_ids[span.start : span.stop])
        out = SegmentKV(states, states.clone(), ids, positions)
        self.method.fill(prompt, span, span.start, span.stop, out)
        self.method.finish(prompt, None)
        return span, out


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def taught(request: pytest.FixtureRequest) -> Twins:
    twins = Twins(request.param)
    twins.teach(8)
    return twins


class TestLearning:
    def test_gives_the_same_correction(self, taught: Twins) -> None:
        expected = taught.method.book().correction(AB)
        learned = taught.rank.worker.book().correction(AB)
        assert expected is not None
        assert learned is not None
        assert learned.layers == expected.layers != ()
        assert learned.gain == expected.gain
        assert torch.equal(learned.inward, expected.inward)
        assert torch.equal(learned.outward, expected.outward)

    def test_measures_the_same(self, taught: Twins) -> None:
        expected = taught.method.book().pairs[AB]
        learned = taught.rank.worker.book().pairs[AB]
        assert learned.seen == expected.seen == 8 * TEXT
        assert learned.audits == expected.audits > 0
        assert (learned.audited, learned.blind) == (expected.audited, expected.blind)
        distances = taught.rank.worker.book().distances
        assert distances.between("a", "b") == taught.method.book().distances.between("a", "b")

    def test_reports_it(self) -> None:
        twins = Twins(torch.float32)
        twins.teach(8)
        report = twins.rank.worker.report()
        assert report is not None
        facts = report.facts[0, PairName("", "a", "b")]
        state = twins.method.book().pairs[AB]
        assert (facts.seen, facts.audits) == (state.seen, state.audits)
        assert (facts.audited, facts.blind) == (state.audited, state.blind)
        assert facts.distance == twins.method.book().distances.between("a", "b")
        assert facts.version >= 1


class TestLoading:
    @pytest.mark.parametrize("corrected", [False, True])
    def test_equals_fill(self, taught: Twins, corrected: bool) -> None:
        taught.read("a", 50)
        span, expected = taught.fill("b", 50)
        assert (span.start, span.offset, span.correction) == (ROLE, ROLE, "a>b")
        if not corrected:
            taught = _without_correction(taught)
            span, expected = taught.fill("b", 50)
            assert span.correction is None
        source = source_of("a50", "b", span.start, span.stop, corrected=corrected)
        keys, values = taught.rank.load(source)
        assert torch.equal(keys, expected.keys)
        assert torch.equal(values, expected.values)

    def test_with_an_adopted_book(self, taught: Twins) -> None:
        taught.read("a", 51)
        span, expected = taught.fill("b", 51)
        other = Rank(dtype=taught.dtype)
        other.capture("a51", "a", dense_kv(prompt_of("a", document(51)), taught.dtype))
        other.worker.adopt({"": taught.method.book()})
        keys, values = other.load(source_of("a51", "b", span.start, span.stop))
        assert torch.equal(keys, expected.keys)
        assert torch.equal(values, expected.values)

    def test_in_parts_and_at_another_position(self, taught: Twins) -> None:
        """Keys at the new position, and the correction that fits the distance from the origin."""
        taught.read("a", 52)
        whole = source_of("a52", start=ROLE + 37, stop=ROLE + 37 + TEXT, offset=ROLE, origin=57)
        keys, values = taught.rank.load(whole)
        same, _ = taught.rank.load(source_of("a52"))
        moved = llama_info().rope.move(same, 37, positions=torch.arange(ROLE, ROLE + TEXT)[None])
        tolerance = 1e-5 if taught.dtype == torch.float32 else 0.02
        assert (keys - moved).abs().max() <= tolerance * keys.abs().max()
        for start, stop in ((57, 60), (60, 61), (61, 157)):
            part_keys, part_values = taught.rank.load(whole.part(start, stop))
            part = slice(start - 57, stop - 57)
            assert (part_keys - keys[:, :, part]).abs().max() <= tolerance * keys.abs().max()
            assert (part_values - values[:, :, part]).abs().max() <= tolerance * values.abs().max()


def _without_correction(taught: Twins) -> Twins:
    """The same rank beside a method that knows its donors and does not correct."""
    blind = Twins(taught.dtype, Kvcmas(llama_info(), small_config(correct=False)))
    blind.read("a", 50)
    blind.rank = taught.rank
    return blind


class TestLandmarks:
    def test_scores_are_the_predictions(self, taught: Twins) -> None:
        taught.rank.worker.report()
        taught.read("a", 53)
        assert taught.rank.worker.drain(60)
        report = taught.rank.worker.report()
        assert report is not None
        scores = report.scores[0, PairName("", "a", "b"), "a53"]
        book = taught.rank.worker.book()
        features = taught.rank.worker._known.features("a53", book.basis)  # type: ignore[arg-type]
        assert features is not None
        assert scores.base.dtype == np.float32
        assert scores.base.shape == (len(features),)
        for origin in (0, ROLE):
            distance = torch.arange(len(features)) - origin
            far = np.log(np.maximum(np.arange(len(features)) - origin, 0) + 8)
            given = scores.base + scores.far * far + scores.far_squared * far * far
            expected = book.pairs[AB].landmarks.predict(features, distance)
            assert np.abs(given - expected.numpy()).max() < 1e-4


def test_source_of_a_lesson_need_not_begin_where_the_donor_does() -> None:
    """Behind the donor's own beginning, the layer-0 window reaches back into it."""
    rank = Rank()
    rank.teach(4)
    kv = dense_kv(prompt_of("b", document(0)))
    before = rank.worker.book().pairs[AB].seen
    rank.lesson(Source("", "a0", ROLE + 30, ROLE + 30, ROLE + 90, "b", ROLE, True), kv, False)
    assert rank.worker.drain(60)
    state = rank.worker.book().pairs[AB]
    assert (state.seen - before, state.audits) == (60, 4)
