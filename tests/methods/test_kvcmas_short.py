"""`kvcmas`: short runs, the age of continued donors, and KV that is not finite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvcmas.methods.donors import Donor, Run
from kvcmas.methods.kvcmas.book import CorrectionBook
from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.config import DIALS
from kvcmas.methods.kvcmas.observation import Observation
from kvcmas.methods.kvcmas.pair import Pair
from kvcmas.methods.kvcmas.selection import SHORT, head_of
from kvcmas.methods.kvcmas.shorts import Counts, short_pair
from kvcmas.store.info import SegmentInfo

from ..engines.tiny import random_ids
from .kvcmas_team import KvcmasTeam, document, first_reads, prompt_of, teach
from .team import ANSWER, reused

AB = Pair("a", "b")
TOKENS = 100


def read(team: KvcmasTeam, number: int, tokens: int = TOKENS) -> Any:
    """Agent `b` reads a document after `a`; gives what was scored."""
    first_reads(team, number, tokens)
    return team.score(prompt_of("b", document(number, tokens)), "b")


def refusals(scored: Any) -> list[str]:
    return [note for note in scored.record.notes if "heads of short runs disagreed" in note]


class TestShortRuns:
    @pytest.mark.parametrize("dial", DIALS.values())
    def test_heads_that_may_not_grow(self, dial: Any) -> None:
        for length in (1, 8, 33, SHORT - 1):
            head = head_of(dial, length)
            assert head.limit == head.length <= length
        head = head_of(dial, SHORT)
        assert head.length < head.limit == min(dial.limit, SHORT)

    @pytest.mark.parametrize(("tokens", "chunks"), [(SHORT - 1, False), (SHORT, True)])
    def test_a_disagreement_computes_the_whole_run_at_once(
        self, tokens: int, chunks: bool, device: torch.device
    ) -> None:
        """One more pass for a short run; a long one grows its head chunk by chunk."""
        team = KvcmasTeam(device, tolerance=0.0)
        first_reads(team, 0, tokens)
        ids = prompt_of("b", document(0, tokens))
        passes: list[int] = []

        def note(module: torch.nn.Module, given: Any, named: Any) -> None:
            passes.append(int(named["input_ids"].shape[1]))

        handle = team.model.register_forward_pre_hook(note, with_kwargs=True)
        prefilled = team.engine.prefill(team.prompt(ids, "b"))
        handle.remove()
        assert (len(passes) > 2) == chunks
        head = head_of(DIALS["balanced"], tokens).length
        assert passes[0] < len(ids)
        if not chunks:
            assert passes == [len(ids) - tokens + head, len(ids) - 20 - head]
        assert prefilled.record.exact
        assert team.agrees(team.score(ids, "c", dial="exact"), ids)

    def test_are_given_up_after_failures_and_tried_again(self, device: torch.device) -> None:
        team = KvcmasTeam(device, tolerance=0.0)
        served = [read(team, number) for number in range(20)]
        refused = [bool(refusals(scored)) for scored in served]
        # Two tries; then seven refusals before each further try.
        tries = [number for number, no in enumerate(refused) if not no]
        assert tries == [0, 1, 9, 17]
        assert refusals(served[2]) == [
            "[20, 120) is computed: heads of short runs disagreed in 2 of 2 for a>b"
        ]
        for number, scored in enumerate(served):
            assert scored.record.exact
            assert team.agrees(scored, prompt_of("b", document(number, TOKENS)))
        counts = team.kvcmas.planner.shorts("").counts(AB)
        assert counts == Counts(tried=4, failed=4, refused=18)

    def test_of_other_pairs_and_long_runs_are_not_concerned(self, device: torch.device) -> None:
        team = KvcmasTeam(device, tolerance=0.0)
        for number in range(3):
            read(team, number)
        assert not refusals(read(team, 3, SHORT))
        first_reads(team, 4)
        assert not refusals(team.score(prompt_of("c", document(4, TOKENS)), "c"))
        assert refusals(read(team, 5))
        other = team.score(prompt_of("b", document(6, TOKENS)), "b", tenant="other")
        assert not refusals(other)

    def test_stay_trusted_while_most_agree(self, device: torch.device) -> None:
        team = KvcmasTeam(device)
        shorts = team.kvcmas.planner.shorts("")
        for number in range(4):
            assert not read(team, number).record.exact
        assert shorts.counts(AB) == Counts(tried=4, failed=0)
        for _ in range(4):
            shorts.see(AB, failed=True)
        assert not read(team, 10).record.exact  # half of them: not more failures than successes
        for _ in range(3):
            shorts.see(AB, failed=True)
        assert refusals(read(team, 11))

    def test_of_a_heads_length_are_no_failures(self, device: torch.device) -> None:
        """They are computed whatever their pair is worth, so they say nothing of it."""
        team = KvcmasTeam(device, min_length=8)
        for number in range(4):
            record = read(team, number, 8).record
            runs = [span for span in reused(record) if not span.exact]
            assert record.exact
            assert {(span.head, span.reused) for span in runs} == {(8, 0)}
        assert team.kvcmas.planner.shorts("").counts(AB) == Counts()
        assert not refusals(read(team, 4))

    def test_one_failure_is_no_pattern(self, device: torch.device) -> None:
        team = KvcmasTeam(device)
        team.kvcmas.planner.shorts("").see(AB, failed=True)
        assert not refusals(read(team, 0))


class TestAge:
    def test_a_continued_donor_stays_the_oldest(self, device: torch.device) -> None:
        team = KvcmasTeam(device)
        ids = prompt_of("a", document(0))
        team.score(ids, "a")
        (first,) = team.library.store.infos()
        team.score(prompt_of("b", document(1)), "b")
        # What was captured ends with the answer, whose last token has no KV.
        team.score(ids + ANSWER[:-1] + random_ids(60, 9), "a")
        assert len(team.library.store.infos()) == 2
        infos = {info.agent: info for info in team.library.store.infos()}
        grown = infos["a"]
        assert grown.id != first.id
        assert len(team.library.kv(grown.id)) > len(ids) + 60
        assert grown.created == first.created < infos["b"].created
        assert team.settled()

    def test_and_goes_on_serving_the_others(self, device: torch.device) -> None:
        """The second reader's exact KV is older than the continuation, but not the first."""
        team = KvcmasTeam(device)
        text = document(0)
        team.score(prompt_of("a", text), "a")
        team.score(prompt_of("b", text), "b", dial="exact")
        team.score(prompt_of("a", text) + ANSWER[:-1] + random_ids(60, 9), "a")
        ages = {info.agent: info.created for info in team.library.store.infos()}
        assert len(team.library.store.infos()) == 2 and ages["a"] < ages["b"]
        scored = team.score(prompt_of("c", text), "c")
        (span,) = [span for span in reused(scored.record) if not span.exact]
        info = team.library.segment_info(span.segment or "")
        assert info is not None and info.agent == "a"


def spoilt(book: CorrectionBook, value: float) -> Observation:
    layers, channels = book.info.layers, 2 * book.info.kv_heads * book.info.head_dim
    donor, deviation = torch.randn(layers, 80, channels), torch.randn(layers, 80, channels)
    deviation[1, 40, 3] = value
    window = torch.randn(80, 3 * channels)
    return Observation(AB, donor, window, torch.arange(80) + 16, deviation, whole=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
class TestNotFinite:
    def test_teaches_nothing(self, value: float, device: torch.device) -> None:
        team = KvcmasTeam(device)
        teach(team, 5, "b")
        book = team.kvcmas.book()
        correction = book.correction(AB)
        before = (book.pairs[AB].seen, book.pairs[AB].audits, book.distances.between("a", "b"))
        observation = spoilt(book, value)
        book.observe(observation)
        book.see_distance("a", "b", observation.deviation, observation.channels)
        state = book.pairs[AB]
        assert (state.seen, state.audits, book.distances.between("a", "b")) == before
        assert book.correction(AB) is correction

    def test_fixes_no_features(self, value: float, device: torch.device) -> None:
        book = KvcmasTeam(device).kvcmas.book()
        observation = spoilt(book, value)
        book.see_donor(observation.deviation)
        book.observe(observation)
        assert book.basis is None
        assert not book._sample and not book._waiting

    @pytest.mark.parametrize("readers", [1, 2])
    def test_requests_leave_no_trace_in_what_is_learned(
        self, value: float, readers: int, device: torch.device
    ) -> None:
        """A token that breaks the model: every request with it, and none after it, is broken."""
        team = KvcmasTeam(device, exact_readers=readers)
        broken = 7
        embedding: Any = team.model.get_input_embeddings()
        with torch.no_grad():
            embedding.weight[broken] = value
        texts = [[t if t != broken else 8 for t in document(n, 260)] for n in range(8)]
        for number, text in enumerate(texts):
            bad = [*text[:100], broken, *text[100:]]
            for content in (bad, text) if number % 2 else (text,):
                for agent in "abc":
                    ids = [t if t != broken or content is bad else 8 for t in
                           prompt_of(agent, content)]  # fmt: skip
                    team.score(ids, agent, dial="exact")
        book = team.kvcmas.book()
        assert book.basis is not None
        assert book.basis.own_project.isfinite().all()
        assert book.pairs[AB].seen > 1000
        for pair, state in book.pairs.items():
            assert state.audited is None or state.audited < 10
            distance = book.distances.between(*pair[:2])
            assert distance is None or 0 <= distance < 10
        for other in book.other_bases.values():
            assert other.isfinite().all()
        reader = team.score([t if t != broken else 8 for t in prompt_of("b", texts[0])], "d")
        assert reader.logits.isfinite().all()
        assert team.settled()


def test_answers_read_first_are_counted_for_all_authors_together() -> None:
    info = SegmentInfo("a", "", 0, "", False, generated=40)
    run = Run(100, 150, ())

    def of(offset: int, generated: int | None) -> Pair:
        donor = Donor("s", offset, replace(info, generated=generated))
        return short_pair(Chosen(run, donor, Pair("a", "b"), 0))

    assert of(39, 40) == Pair("", "b")  # begins one token before the answer
    assert of(0, 40) == Pair("a", "b")  # mostly what the donor had read itself
    assert of(39, None) == Pair("a", "b")


def test_a_stored_answer_knows_where_it_begins(device: torch.device) -> None:
    team = KvcmasTeam(device)
    prompt = prompt_of("a", document(1, 60))
    team.ask(prompt, "a")
    (held,) = team.kvcmas.library.tenant_infos("")
    assert held.generated == len(prompt)
