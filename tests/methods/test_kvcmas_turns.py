"""`kvcmas`: second turns of a growing context, second exact readers, and the chain."""

from __future__ import annotations

from typing import Any

import torch

from kvcmas.core.deviation import relative_deviation
from kvcmas.core.lowrank import LowRank
from kvcmas.methods.kvcmas.derived import Second
from kvcmas.methods.kvcmas.pair import Pair

from ..engines.tiny import random_ids
from .kvcmas_team import ROLES, KvcmasTeam, approximate, document, prompt_of, teach
from .team import ANSWER, DOCUMENT, reused

LONG = 260


class TestGrowingContext:
    def test_the_second_turn_continues_the_first(self, device: torch.device) -> None:
        """Role and head are not computed again, and the agent's own KV is taken as it is."""
        team = KvcmasTeam(device, head=16, landmarks=False)
        teach(team, 8, "b", "c")
        team.score(prompt_of("a", DOCUMENT), "a")
        first = prompt_of("b", DOCUMENT) + random_ids(40, 60)
        answer = list(team.ask(first, "b", 40).token_ids)
        longer = first + answer + random_ids(20, 61)
        scored = team.score(longer, "b")
        spans = [
            (span.start, span.stop, span.exact, span.head, span.correction)
            for span in reused(scored.record)
        ]
        # Exact: role and the first head. Then the document, and the turn that stood behind it.
        assert spans == [
            (0, 36, True, 0, None),
            (36, 120, False, 16, "a>b"),
            (120, len(first) + 39, False, 0, None),
        ]
        # All the same, a plain request with that text is exact.
        exact = team.score(longer, "b", dial="exact")
        assert exact.record.exact
        assert team.agrees(exact, longer)
        assert team.settled()

    def test_distances_count_from_the_role(self, device: torch.device) -> None:
        """A run found behind the exact prefix starts in the middle of the shared text."""
        team = KvcmasTeam(device, head=16, landmarks=False)
        team.score(prompt_of("a", DOCUMENT), "a")
        team.score(prompt_of("b", DOCUMENT), "b")
        prompt = team.prompt([*prompt_of("b", DOCUMENT), 7, 8], "b")
        team.kvcmas.plan(prompt)
        chosen = team.kvcmas._requests.get(prompt).chosen
        assert {start: one.origin for start, one in chosen.items()} == {36: 20}
        team.kvcmas.finish(prompt, None)
        assert team.settled()

    def test_each_turn_prolongs_the_exact_beginning(self, device: torch.device) -> None:
        team = KvcmasTeam(device, head=16, landmarks=False)
        team.score(prompt_of("a", DOCUMENT), "a")
        ends = []
        for _ in range(4):
            record = team.score(prompt_of("b", DOCUMENT), "b").record
            ends.append(next((span.stop for span in reused(record) if span.exact), 0))
        assert ends == [0, 36, 52, 68]

    def test_rounds_of_a_team(self, device: torch.device) -> None:
        """Three agents talk for two rounds; donors grow, and nothing is left behind."""
        team = KvcmasTeam(device, head=8, share=0.2, exact_readers=2, cold_tokens=None)
        talk = document(3, 256)
        for _ in range(2):
            for agent in "abc":
                result = team.ask(prompt_of(agent, talk), agent, 20)
                talk = talk + list(result.token_ids)
                assert team.settled()
        assert result.record.prompt == 29 + len(talk) - 20


class TestSecondExactReaders:
    def test_the_third_agent_reuses(self, device: torch.device) -> None:
        team = KvcmasTeam(device, exact_readers=2, head=8, landmarks=False)
        exact = []
        for agent in "abcd":
            ids = prompt_of(agent, document(0, LONG))
            scored = team.score(ids, agent)
            exact.append(scored.record.exact)
            if scored.record.exact:
                assert team.agrees(scored, ids)
            if agent == "b":
                assert scored.record.notes[-1] == (
                    f"[20, {20 + LONG}) is computed: second exact reader of this segment"
                )
        assert exact == [True, True, False, False]
        # The second reader itself comes back, with the document at another place.
        moved = ROLES["b"] + random_ids(10, 3) + document(0, LONG) + random_ids(5)
        assert not team.score(moved, "b").record.exact
        assert team.kvcmas.donor_bytes()["seconds"] > 0
        assert team.settled()

    def test_its_deviation_corrects_the_others(self, device: torch.device) -> None:
        options: dict[str, Any] = {
            "exact_readers": 2,
            "head": 0,
            "landmarks": False,
            "other_dim": 32,
            "rank": 32,
        }
        team = KvcmasTeam(device, **options)
        deviations = []
        for number in range(16):
            text = document(number, LONG)
            for agent in "ab":
                team.score(prompt_of(agent, text), agent)
            team.score(prompt_of("c", text), "c", dial="exact")
        book = team.kvcmas.book()
        both = book.pairs[Pair("a", "c", "b")]
        plain = book.pairs[Pair("a", "c")]
        assert both.audited is not None
        assert plain.audited is not None
        assert both.audited <= plain.audited
        assert book.other_bases.keys() == {Pair("a", "b")}
        assert book.correction(Pair("a", "c", "b")) is not None
        blind = KvcmasTeam(device, **options, correct=False)
        for one in (team, blind):
            text = document(70, LONG)
            for agent in "ab":
                one.score(prompt_of(agent, text), agent)
            ids = prompt_of("c", text)
            scored = one.score(ids, "c")
            dense = one.dense(ids).kv.slice(20, 20 + LONG)
            deviations.append(relative_deviation(dense, scored.kv.slice(20, 20 + LONG)))
            span = next(span for span in reused(scored.record) if not span.exact)
            assert span.correction == ("a+b>c" if one is team else None)
        assert deviations[0] < 0.97 * deviations[1]
        alone = KvcmasTeam(device, **{**options, "exact_readers": 1})
        for number in range(16):
            teach(alone, 1, "b", "c", first=number, tokens=LONG)
        assert deviations[0] < 0.99 * approximate(alone, 70, "c", LONG)

    def test_a_part_of_what_it_read(self) -> None:
        left, right = torch.randn(2, 10, 3), torch.randn(2, 3, 8)
        second = Second("a", "b", 20, 30, LowRank(left, right))
        part = second.slice(22, 26)
        torch.testing.assert_close(part.dense(), second.deviation.dense()[:, 2:6])

    def test_two_documents_of_one_donor(self, device: torch.device) -> None:
        """Each has a second reader of its own; one does not push out the other."""
        team = KvcmasTeam(device, exact_readers=2, head=0, landmarks=False)
        one, two = document(1, 256), document(2, 150)
        team.score(ROLES["a"] + one + two + random_ids(9), "a")
        between = {agent: random_ids(3, 70 + ord(agent)) for agent in "bcd"}
        for agent in "bcd":
            ids = ROLES[agent] + one + between[agent] + two + random_ids(9, 8)
            record = team.score(ids, agent, dial="exact" if agent == "b" else None).record
            approximate = [span for span in reused(record) if not span.exact]
            assert len(approximate) == (0 if agent == "b" else 2)
        (held,) = team.kvcmas._derived._seconds.values()
        assert sorted((one.agent, one.start, one.stop) for one in held) == [
            ("b", 20, 276),
            ("b", 276, 426),
        ]

    def test_a_longer_donor_keeps_its_second_reader(self, device: torch.device) -> None:
        team = KvcmasTeam(device, exact_readers=2, head=0, landmarks=False)
        teach(team, 12, "c", first=50)  # so that `a` is the donor that `c` prefers
        text = document(1, LONG)
        team.score(prompt_of("a", text), "a")
        team.score(prompt_of("b", text), "b")
        team.score(prompt_of("a", text) + ANSWER[:-1] + random_ids(50), "a")
        donors = [info for info in team.library.store.infos() if info.agent == "a"]
        assert len(donors) == 13
        assert team.kvcmas.book().correction(Pair("a", "c")) is not None
        assert not team.score(prompt_of("c", text), "c").record.exact
        assert team.settled()


class TestPrevious:
    def test_each_hop_starts_from_the_last_readers_kv(self, device: torch.device) -> None:
        team = KvcmasTeam(device, base="previous", head=8, landmarks=False)
        for number in range(6):
            teach(team, 1, "b", "c", first=number)
        names = {pair.name for pair in team.kvcmas.book().pairs}
        assert names == {"a>b", "b>c"}
        text = document(60)
        donors, kvs = [], {}
        for agent in "abcd":
            scored = team.score(prompt_of(agent, text), agent)
            kvs[agent] = scored.kv
            spans = [span for span in reused(scored.record) if not span.exact]
            donors.append(
                [
                    (info.agent, info.exact, span.correction)
                    for span in spans
                    if (info := team.library.segment_info(span.segment or "")) is not None
                ]
            )
        assert donors == [
            [],
            [("a", True, "a>b")],
            [("b", False, "b>c")],
            [("c", False, None)],
        ]
        # Without a correction, the last hop moves the third agent's KV as it was (same place).
        torch.testing.assert_close(
            kvs["d"].values[:, :, 28:120], kvs["c"].values[:, :, 28:120], rtol=0, atol=0
        )
        assert team.settled()

    def test_never_reaches_exact_requests(self, device: torch.device) -> None:
        team = KvcmasTeam(device, base="previous", head=8)
        for agent in "abc":
            team.score(prompt_of(agent, DOCUMENT), agent)
        approximate = [info for info in team.library.store.infos() if not info.exact]
        assert {info.agent for info in approximate} == {"b", "c"}
        for agent in "abcd":
            ids = prompt_of(agent, DOCUMENT)
            scored = team.score(ids, agent, dial="exact")
            assert scored.record.exact
            assert team.agrees(scored, ids)

    def test_a_second_turn_takes_its_own_copy(self, device: torch.device) -> None:
        team = KvcmasTeam(device, base="previous", head=8, landmarks=False)
        for agent in "abc":
            team.score(prompt_of(agent, DOCUMENT), agent)
        scored = team.score([*prompt_of("b", DOCUMENT), 9, 9], "b")
        span = reused(scored.record)[-1]
        info = team.library.segment_info(span.segment or "")
        assert info is not None
        assert (info.agent, info.exact, span.head, span.correction) == ("b", False, 0, None)

    def test_hops_learn_from_corrected_kv(self, device: torch.device) -> None:
        """A cold pair also computes exactly behind a donor that is approximate."""
        team = KvcmasTeam(device, base="previous", cold_tokens=200, head=8, landmarks=False)
        teach(team, 3, "b", tokens=LONG)
        text = document(60, LONG)
        exact = []
        for agent in "abc":
            exact.append(team.score(prompt_of(agent, text), agent).record.exact)
        assert exact == [True, False, True]
        assert team.kvcmas.book().pairs[Pair("b", "c")].seen == LONG
