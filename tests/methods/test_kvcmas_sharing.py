"""`kvcmas`: tenants, a byte budget, and many threads."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from kvcmas.methods.kvcmas.pair import Pair
from kvcmas.workflow.prompt import Prompt

from ..engines.tiny import random_ids
from .kvcmas_team import KvcmasTeam, document, prompt_of, teach
from .team import DOCUMENT

AB = Pair("a", "b")
TOKEN_BYTES = 3 * 2 * 16 * 2 * 4 + 16


class TestTenants:
    def test_share_nothing(self, device: torch.device) -> None:
        """Case 17."""
        team = KvcmasTeam(device, cold_tokens=300, exact_readers=2)
        teach(team, 4, "b", "c", tokens=260)
        team.score(prompt_of("a", document(50, 260)), "a")
        taught = team.kvcmas.book("").pairs[AB].seen
        for tenant in ("a", "A", "../../x", "a\0", "\u00e9", "e\u0301", " "):
            book = team.kvcmas.book(tenant)
            record = team.score(prompt_of("b", document(50, 260)), "b", tenant=tenant).record
            assert record.reused == 0
            assert record.notes == ("nothing is stored for this tenant: computed",)
            assert (book.basis is None, book.pairs, book.other_bases) == (True, {}, {})
            assert book.distances.between("a", "b") is None
            assert (book.state_bytes(), book.shared_bytes()) == ({}, 0)
            # Its own cold start, although the others' pair of these names is warm.
            ids = prompt_of("a", document(50, 260))
            record = team.score(ids, "a", tenant=tenant).record
            assert "has seen 0 of 300 tokens" in " ".join(record.notes)
            assert record.exact
        assert team.kvcmas.book("").pairs[AB].seen == taught
        assert team.settled()

    def test_of_equal_traffic_are_served_alike(self, device: torch.device) -> None:
        """Whatever another tenant sent before, and although the names of pairs are the same."""
        team = KvcmasTeam(device, audit=0.3, head=8, share=0.3)
        teach(team, 6, "b")

        def serve(tenant: str) -> list[object]:
            seen: list[object] = []
            for number in range(6):
                for agent in "abc":
                    ids = prompt_of(agent, document(number))
                    scored = team.score(ids, agent, tenant=tenant)
                    seen.append((scored.record.computed, scored.record.notes))
                    seen.append(scored.logits.tolist())
            return seen

        assert serve("one") == serve("two")


class TestMemory:
    def test_departed_donors_take_everything_with_them(self, device: torch.device) -> None:
        """Case 37: many documents under a small budget."""
        team = KvcmasTeam(device, budget_bytes=1000 * TOKEN_BYTES, exact_readers=2)
        sizes = []
        for number in range(30):
            for agent in "abc":
                team.score(prompt_of(agent, document(number, 260)), agent)
                assert team.settled()
            sizes.append(team.kvcmas.donor_bytes())
        assert sizes[-1]["kv"] <= 1000 * TOKEN_BYTES
        for kind in ("features", "seconds"):
            assert 0 < sizes[-1][kind] <= 2 * max(size[kind] for size in sizes[5:15])

    def test_nothing_fits(self, device: torch.device) -> None:
        team = KvcmasTeam(device, budget_bytes=1000)
        for agent in "abc":
            ids = prompt_of(agent, DOCUMENT)
            scored = team.score(ids, agent)
            assert scored.record.reused == 0
            assert torch.equal(scored.logits, team.dense(ids).logits)
        assert team.kvcmas.donor_bytes() == {"kv": 0, "features": 0, "seconds": 0}
        assert team.settled()


class TestThreads:
    def test_tenants_at_once(self, device: torch.device) -> None:
        """Four tenants, each served as if it were alone."""

        def work(team: KvcmasTeam, number: int) -> list[object]:
            served: list[object] = []
            for turn in range(8):
                for agent in "abc":
                    ids = prompt_of(agent, document(100 * number + turn))
                    result = team.ask(ids, agent, 3, tenant=str(number))
                    served.append((result.token_ids, result.record.reused, result.record.notes))
            return served

        options: dict[str, Any] = {"head": 8, "share": 0.3, "audit": 0.2}
        alone, together = KvcmasTeam(device, **options), KvcmasTeam(device, **options)
        expected = [work(alone, number) for number in range(4)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(partial(work, together), range(4)))
        assert found == expected
        assert together.settled()

    def test_one_tenant_under_a_small_budget(self, device: torch.device) -> None:
        """Donors come and go, pairs are learned and used; exact requests stay exact."""
        team = KvcmasTeam(
            device, budget_bytes=900 * TOKEN_BYTES, head=8, share=0.3, hidden=4, exact_readers=2
        )
        start, step = threading.Barrier(4), sys.getswitchinterval()

        def work(number: int) -> bool:
            start.wait()
            right = True
            for turn in range(12):
                text = document((number + turn) % 5, 256)
                agent = "abcd"[(number * turn) % 4]
                ids = prompt_of(agent, text)
                dial = "exact" if turn % 3 == 0 else None
                scored = team.engine.score(
                    Prompt(team.prompt(ids).token_ids, agent, f"{number}-{turn}", dial=dial),
                    random_ids(3),
                )
                right &= bool(torch.isfinite(scored.logits).all())
                if dial:
                    dense = team._plain.score(ids, random_ids(3)).logits
                    close = (scored.logits - dense).abs().max() <= 1e-4 * dense.abs().max()
                    right &= scored.record.exact and bool(close)
            return right

        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(4) as pool:
                assert all(pool.map(work, range(4)))
        finally:
            sys.setswitchinterval(step)
        assert team.settled()
        assert team.kvcmas.book().pairs

    def test_the_basis_is_fixed_once(self, device: torch.device) -> None:
        """However many requests bring the tokens that complete it."""
        team = KvcmasTeam(device, basis_tokens=60)
        book = team.kvcmas.book()
        channels = torch.randn(3, 100, 64)
        seen = []

        def work(number: int) -> None:
            book.see_donor(channels + number)
            seen.append(book.basis)

        with ThreadPoolExecutor(4) as pool:
            with book._lock:
                done = pool.map(work, range(4))
                time.sleep(0.05)  # all of them have seen that there is none yet
            list(done)
        assert seen[0] is not None
        assert all(basis is book.basis for basis in seen)
        assert not book._sample
