"""`kvcmas`: what requests teach, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcmas.methods.kvcmas.pair import Pair

from .kvcmas_team import KvcmasTeam, approximate, document, first_reads, prompt_of, teach
from .team import reused

LONG = 260
AB = Pair("a", "b")


class TestCorrection:
    @pytest.mark.parametrize("family", ["llama", "qwen3"])
    def test_lowers_the_deviation(self, family: str, device: torch.device) -> None:
        options: dict[str, Any] = {"head": 0, "landmarks": False}
        team = KvcmasTeam(device, family, **options)
        teach(team, 30, "b")
        blind = KvcmasTeam(device, family, correct=False, **options)
        deviations = [approximate(team, number) for number in range(100, 105)]
        uncorrected = [approximate(blind, number) for number in range(100, 105)]
        assert all(one < 0.97 * other for one, other in zip(deviations, uncorrected, strict=True))

    def test_audits_measured_that(self, device: torch.device) -> None:
        team = KvcmasTeam(device)
        teach(team, 30, "b")
        state = team.kvcmas.book().pairs[AB]
        assert (state.audits, state.seen // 100) == (30, 29)
        assert state.audited is not None
        assert state.blind is not None
        assert state.audited < 0.95 * state.blind

    def test_without_any(self, device: torch.device) -> None:
        team = KvcmasTeam(device, correct=False)
        teach(team, 8, "b")
        first_reads(team, 50)
        (span,) = (
            span
            for span in reused(team.score(prompt_of("b", document(50)), "b").record)
            if not span.exact
        )
        assert span.correction is None
        state = team.kvcmas.book().pairs[AB]
        assert state.audited == state.blind

    def test_sizes_do_not_grow_with_contexts(self, device: torch.device) -> None:
        team = KvcmasTeam(device)
        teach(team, 12, "b")
        book = team.kvcmas.book()
        states, shared, learning = book.state_bytes(), book.shared_bytes(), book.learning_bytes()
        teach(team, 12, "b", tokens=200, first=50)
        assert book.state_bytes().keys() == {"b"}
        # The layers that gain by a correction may be other ones.
        assert 0 < book.state_bytes()["b"] <= 3 * states["b"]
        assert (book.shared_bytes(), book.learning_bytes()) == (shared, learning)
        kept = team.kvcmas.donor_bytes()
        assert kept["kv"] == team.library.store.nbytes
        assert kept["features"] > 0
        assert kept["seconds"] == 0


class TestLearnNothing:
    def test_exact_requests_teach_nothing(self, device: torch.device) -> None:
        team = KvcmasTeam(device, learn=False, exact_readers=2, cold_tokens=None)
        teach(team, 6, "b", tokens=LONG)
        book = team.kvcmas.book()
        assert (book.basis, book.pairs, book.other_bases) == (None, {}, {})
        assert book.distances.between("a", "b") is None
        assert book.state_bytes() == {}
        # It would be a cold start without end, and a second reader that is never kept.
        first_reads(team, 50, LONG)
        record = team.score(prompt_of("b", document(50, LONG)), "b").record
        assert record.reused > 0.8 * LONG
        assert reused(record)[-1].correction is None


class TestDonors:
    def test_the_nearer_one_is_chosen(self, device: torch.device) -> None:
        team = KvcmasTeam(device)
        teach(team, 12, "b", "c")
        book = team.kvcmas.book()
        distances = {name: book.distances.between(name, "c") for name in "ab"}
        assert None not in distances.values()
        nearest = min(distances, key=lambda name: distances[name] or 0.0)
        farthest = "ab".replace(nearest, "")
        # Both pairs need a correction.
        for number in range(30, 36):
            team.score(prompt_of(farthest, document(number)), farthest)
            team.score(prompt_of("c", document(number)), "c", dial="exact")
            team.score(prompt_of(nearest, document(number + 10)), nearest)
            team.score(prompt_of("c", document(number + 10)), "c", dial="exact")
        assert book.correction(Pair("a", "c")) is not None
        assert book.correction(Pair("b", "c")) is not None
        for order in ("ab", "ba"):
            text = document(70 + ord(order[0]))
            for agent in order:
                team.score(prompt_of(agent, text), agent, dial="exact")
            (span,) = (
                span
                for span in reused(team.score(prompt_of("c", text), "c").record)
                if not span.exact
            )
            known = {name: book.distances.between(name, "c") or 0.0 for name in "ab"}
            assert span.correction == f"{min(known, key=lambda name: known[name])}>c"

    def test_exact_before_approximate(self, device: torch.device) -> None:
        team = KvcmasTeam(device)
        ids = prompt_of("b", document(0) + document(1, 60))
        team.score(prompt_of("a", document(0)), "a")
        team.score(ids, "b")  # the second document behind approximate KV
        (span,) = reused(team.score(prompt_of("c", document(1, 60)), "c").record)
        info = team.library.segment_info(span.segment or "")
        assert info is not None
        assert (info.agent, info.exact) == ("b", False)
        team.score(prompt_of("d", document(1, 60)), "d", dial="exact")
        span = reused(team.score(prompt_of("a", document(1, 60)), "a").record)[-1]
        info = team.library.segment_info(span.segment or "")
        assert info is not None
        assert (info.agent, info.exact) == ("d", True)


class TestDeterminism:
    def test_two_runs_agree(self, device: torch.device) -> None:
        def run() -> list[object]:
            team = KvcmasTeam(device, hidden=8, audit=0.2, exact_readers=2, share=0.3, head=8)
            seen: list[object] = []
            for number in range(8):
                for agent in "abc":
                    ids = prompt_of(agent, document(number, 256))
                    result = team.ask(ids, agent, 3)
                    spans = [
                        (span.start, span.stop, span.offset, span.head, span.correction)
                        for span in result.record.spans
                    ]
                    seen.append((result.token_ids, spans, result.record.computed))
                    seen.append(team.kvcmas.book().state_bytes())
            return seen

        assert run() == run()
