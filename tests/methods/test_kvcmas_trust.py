"""`kvcmas`: when a pair of agents is trusted: cold start, audits, measured deviation."""

from __future__ import annotations

import pytest
import torch

from kvcmas.methods.kvcmas.pair import Pair

from .kvcmas_team import KvcmasTeam, approximate, document, first_reads, prompt_of, teach
from .team import reused

LONG = 260
AB = Pair("a", "b")


class TestColdStart:
    def test_computes_exactly_and_then_reuses(self, device: torch.device) -> None:
        team = KvcmasTeam(device, cold_tokens=600)
        notes = []
        for number in range(5):
            first_reads(team, number, LONG)
            ids = prompt_of("b", document(number, LONG))
            scored = team.score(ids, "b")
            notes.append([note for note in scored.record.notes if "cold start" in note])
            if notes[-1]:
                assert scored.record.exact
                assert team.agrees(scored, ids)
            else:
                assert scored.record.reused > 0.8 * LONG
        # The first document is waiting for the feature basis, which needs 300 tokens.
        assert notes[0] == [
            f"[20, {20 + LONG}) is computed: cold start, a>b has seen 0 of 600 tokens"
        ]
        assert [len(note) for note in notes] == [1, 1, 1, 0, 0]

    def test_each_pair_for_itself(self, device: torch.device) -> None:
        team = KvcmasTeam(device, cold_tokens=600)
        teach(team, 4, "b", tokens=LONG)
        first_reads(team, 50, LONG)
        for reader, exact in (("c", True), ("b", False)):
            assert team.score(prompt_of(reader, document(50, LONG)), reader).record.exact == exact

    def test_short_runs_and_loose_dials_do_not_wait(self, device: torch.device) -> None:
        team = KvcmasTeam(device, cold_tokens=None)
        first_reads(team, 0, 255)
        assert not team.score(prompt_of("b", document(0, 255)), "b").record.exact
        first_reads(team, 1, 256)
        fast = team.score(prompt_of("b", document(1, 256)), "b", dial="fast")
        assert not fast.record.exact
        first_reads(team, 2, 256)
        strict = team.score(prompt_of("b", document(2, 256)), "b", dial="strict")
        assert strict.record.exact

    def test_what_stands_before_is_computed_too(self, device: torch.device) -> None:
        """Behind approximate KV nothing exact could be learned, and the start never ended."""
        team = KvcmasTeam(device, cold_tokens=LONG)
        question = document(90, 60)
        team.score(prompt_of("a", question), "a")
        for number in range(4):
            text = document(number, LONG)
            team.score(prompt_of("a", text), "a")
            scored = team.score(prompt_of("b", question + text), "b")
            if not scored.record.exact:
                break
            notes = " ".join(scored.record.notes)
            assert "cold start" in notes
            if number == 0:
                assert "[20, 80) is computed: it stands before [80, 340)" in notes
        assert 0 < number < 3
        assert len([span for span in reused(scored.record) if not span.exact]) >= 1


class TestAudits:
    def test_are_served_exactly_and_counted(self, device: torch.device) -> None:
        team = KvcmasTeam(device, audit=0.3)
        exact = []
        for number in range(20):
            first_reads(team, number)
            ids = prompt_of("b", document(number))
            scored = team.score(ids, "b")
            audited = any(note.startswith("audit: ") for note in scored.record.notes)
            assert scored.record.exact == audited
            if audited:
                assert team.agrees(scored, ids)
                exact.append(number)
        assert 2 <= len(exact) <= 11
        # The basis of the features exists from the second or third document on.
        assert team.kvcmas.book().pairs[AB].audits == len(exact)
        again = KvcmasTeam(device, audit=0.3, seed=1)
        other = KvcmasTeam(device, audit=0.3, seed=1)
        drawn = [
            [team.score(prompt_of("b", document(0)), "b").record.notes for _ in range(10)]
            for team in (again, other)
        ]
        assert drawn[0] == drawn[1]

    @pytest.mark.parametrize(("share", "exact"), [(0.0, 0), (1.0, 6)])
    def test_never_and_always(self, share: float, exact: int, device: torch.device) -> None:
        team = KvcmasTeam(device, audit=share)
        served = []
        for number in range(6):
            first_reads(team, number)
            served.append(team.score(prompt_of("b", document(number)), "b").record.exact)
        assert sum(served) == exact

    def test_other_tenants_do_not_change_the_draws(self, device: torch.device) -> None:
        alone, beside = (KvcmasTeam(device, audit=0.5) for _ in range(2))
        served: dict[bool, list[bool]] = {False: [], True: []}
        for number in range(10):
            for team in (alone, beside):
                first_reads(team, number)
                ids = prompt_of("b", document(number))
                served[team is beside].append(team.score(ids, "b").record.exact)
            beside.score(prompt_of("b", document(number)), "b", tenant="other")
        assert served[True] == served[False]
        assert len(set(served[True])) == 2

    def test_heads_are_no_audits(self, device: torch.device) -> None:
        """First tokens deviate more than the rest, and are computed anyway."""
        team = KvcmasTeam(device, head=70, landmarks=False)
        for number in range(8):
            approximate(team, number, tokens=280)
        state = team.kvcmas.book().pairs[AB]
        assert state.seen > 300
        assert (state.audits, state.audited) == (0, None)
        assert team.kvcmas.book().distances.between("a", "b") is None


class TestDistrust:
    def test_a_pair_above_the_limit_is_served_exactly(self, device: torch.device) -> None:
        team = KvcmasTeam(device, audit_limit=0.1)
        assert approximate(team, 0) > 0.1  # nothing is known of it yet
        teach(team, 5, "b", first=1)
        first_reads(team, 50)
        ids = prompt_of("b", document(50))
        scored = team.score(ids, "b")
        assert scored.record.exact
        assert team.agrees(scored, ids)
        assert any(
            "a>b was measured at a deviation of 0." in note and "above the limit 0.1" in note
            for note in scored.record.notes
        )
        # It says nothing of other pairs.
        assert not team.score(prompt_of("c", document(50)), "c").record.exact

    def test_and_recovers(self, device: torch.device) -> None:
        """Exact requests go on teaching, and what is measured then counts for more."""
        team = KvcmasTeam(device, audit_limit=0.65)
        teach(team, 4, "b", first=60)
        served = []
        for number in range(40):
            first_reads(team, number)
            served.append(team.score(prompt_of("b", document(number)), "b").record.exact)
        audited = team.kvcmas.book().pairs[AB].audited
        assert audited is not None
        assert audited <= 0.65
        assert served.count(True) > 3
        assert not any(served[-3:])
