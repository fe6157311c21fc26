"""`kvcmas`: plans on any prompt, heads and landmarks within their share, and options."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcmas.errors import ConfigError
from kvcmas.methods.donors import Donor, Run
from kvcmas.methods.kvcmas import DIALS, KvcmasConfig
from kvcmas.methods.kvcmas.selection import head_of, origin_of, pair_of
from kvcmas.methods.registry import create
from kvcmas.store.info import SegmentInfo
from kvcmas.workflow.plan import Plan
from kvcmas.workflow.prompt import Prompt

from ..engines.tiny import random_ids
from .kvcmas_team import ROLES, KvcmasTeam, document, prompt_of, teach
from .team import reused


@pytest.fixture(scope="module")
def team(device: torch.device) -> KvcmasTeam:
    """Agents that have learned of each other, and 12 documents."""
    team = KvcmasTeam(device, head=None, cold_tokens=200)
    teach(team, 12, "b", "c")
    return team


def planned(team: KvcmasTeam, ids: list[int], agent: str, dial: str | None = None) -> Plan:
    """The plan of a request that then comes to nothing."""
    prompt = team.prompt(ids, agent, dial=dial)
    try:
        return team.kvcmas.plan(prompt)
    finally:
        team.kvcmas.finish(prompt, None)


pieces = st.one_of(
    st.sampled_from(list(ROLES.values())),
    st.builds(
        lambda number, start, length: document(number)[start : start + length],
        st.integers(0, 13),
        st.integers(0, 60),
        st.integers(1, 100),
    ),
    st.builds(random_ids, st.integers(1, 30), st.integers(0, 9)),
)


class TestPlans:
    @settings(max_examples=150, deadline=None)
    @given(
        parts=st.lists(pieces, min_size=1, max_size=6),
        agent=st.sampled_from("abcd"),
        dial=st.sampled_from([None, "exact", *DIALS]),
    )
    def test_contract(
        self, team: KvcmasTeam, parts: list[list[int]], agent: str, dial: str | None
    ) -> None:
        ids = [token for part in parts for token in part]
        plan = planned(team, ids, agent, dial)
        assert plan.length == len(ids)
        assert len(ids) - 1 in set(plan.computed_positions())
        numbers = team.kvcmas.config.setting(dial)
        for span in plan.reused():
            kv = team.library.kv(span.segment)
            stop = span.offset + len(span)
            assert kv.token_ids[span.offset : stop].tolist() == ids[span.start : span.stop]
            if span.exact:
                continue
            assert numbers is not None
            end, most = span.start + span.head.length, int(numbers.share * len(span))
            assert span.head.length == min(numbers.head, max(8, len(span) // 4), len(span))
            assert all(end <= position < span.stop for position in span.landmarks)
            assert span.head.length + len(span.landmarks) <= max(span.head.length, most)
        assert team.settled()

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.115, 0.3, 0.5, 1.0])
    @pytest.mark.parametrize("head", [0, 8, 16])
    def test_computed_share(self, share: float, head: int, device: torch.device) -> None:
        team = KvcmasTeam(device, share=share, head=head)
        teach(team, 8, "b")
        team.score(prompt_of("a", document(50)), "a")
        record = team.score(prompt_of("b", document(50)), "b").record
        (span,) = (span for span in reused(record) if not span.exact)
        assert span.computed == max(head, int(share * (span.stop - span.start)))
        assert span.head == head
        assert span.landmarks == span.computed - head
        assert (span.deviation is None) == (head == 0)
        if share == 1.0:
            # Every token is computed, those in the middle behind nothing but computed ones.
            assert team.agrees(
                team.score(prompt_of("b", document(50)), "b"), prompt_of("b", document(50))
            )

    def test_without_landmarks(self, device: torch.device) -> None:
        team = KvcmasTeam(device, share=0.5, head=8, landmarks=False)
        teach(team, 8, "b")
        team.score(prompt_of("a", document(50)), "a")
        record = team.score(prompt_of("b", document(50)), "b").record
        assert reused(record)[-1].landmarks == 0
        assert reused(record)[-1].correction == "a>b"

    def test_landmarks_without_corrections(self, device: torch.device) -> None:
        team = KvcmasTeam(device, share=0.5, head=8, correct=False)
        teach(team, 8, "b")
        team.score(prompt_of("a", document(50)), "a")
        record = team.score(prompt_of("b", document(50)), "b").record
        assert reused(record)[-1].landmarks > 30
        assert reused(record)[-1].correction is None


class TestHead:
    @given(st.sampled_from(list(DIALS)), st.integers(1, 3000))
    def test_fits_any_run(self, name: str, length: int) -> None:
        head = head_of(DIALS[name], length)
        assert 1 <= head.length <= length
        assert 1 <= head.probe <= head.length
        assert head.length <= max(8, length // 4)
        assert head.tolerance == DIALS[name].tolerance

    def test_none(self) -> None:
        setting = KvcmasConfig(head=0).setting(None)
        assert setting is not None
        head = head_of(setting, 500)
        assert (head.length, head.tolerance) == (0, None)


def donor(offset: int = 0) -> Donor:
    return Donor("x", offset, SegmentInfo("a", "", 0, "", True))


class TestOrigin:
    @given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
    def test_extends_to_the_left(self, before: int, same: int, other: int) -> None:
        shared = np.array(random_ids(same + 40, 5))
        prompt = np.concatenate([np.full(before, 1), shared])
        stored = np.concatenate([np.full(other, 2), shared])
        run = Run(before + same, before + same + 40, (donor(),))
        assert origin_of(prompt, run, stored, other + same) == before


def test_pairs_have_three_members() -> None:
    assert pair_of("a", "b", []).name == "a>b"
    assert pair_of("a", "b", ["c"]).name == "a+c>b"
    assert pair_of("a", "b", ["b"]).name == "a>b"
    assert pair_of("a", "b", ["a", "d"]).name == "a+d>b"


SIZES = ("own_dim", "window_dim", "other_dim", "rank", "min_length", "min_prefix")
WRONG: dict[str, tuple[Any, ...]] = {
    "dial": ("bogus", "", None, 3),
    "base": ("doner", None, 1),
    "exact_readers": (0, 3, True, 1.0, "2"),
    "share": (-0.1, 1.1, nan, "0.1", True),
    "audit": (-0.1, 1.1, nan, []),
    "fade": (0, -1, nan, None, "16"),
    **dict.fromkeys(("correct", "landmarks", "learn"), (1, None)),
    **dict.fromkeys(("tolerance", "audit_limit"), (-1, nan, "1", False)),
    **dict.fromkeys(("head", "limit", "cold_tokens", "hidden", "seed", "budget_bytes"), (-1, 0.5)),
    **dict.fromkeys((*SIZES, "basis_tokens", "fit_tokens"), (0, 1.5, True)),
}


class TestOptions:
    @pytest.mark.parametrize(
        ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
    )
    def test_wrong_values(self, name: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=name):
            KvcmasConfig(**{name: value})

    def test_unknown_names(self, team: KvcmasTeam) -> None:
        with pytest.raises(ConfigError, match="did you mean 'tolerance'"):
            create("kvcmas", team.library.info, tolerence=0.1)
        with pytest.raises(ConfigError, match="did you mean 'balanced'"):
            KvcmasConfig(dial="balance")

    def test_extremes_are_allowed(self) -> None:
        config = KvcmasConfig(share=1, audit=0, tolerance=inf, audit_limit=0, head=0, limit=0)
        assert config.setting("exact") is None
        setting = config.setting("fast")
        assert setting is not None
        assert (setting.share, setting.tolerance, setting.head) == (1, inf, 0)
        assert setting.cold_tokens == DIALS["fast"].cold_tokens

    def test_dials_get_looser(self) -> None:
        strict, balanced, fast = DIALS.values()
        for one, other in ((strict, balanced), (balanced, fast)):
            assert one.share > other.share
            assert one.head > other.head
            assert one.limit > other.limit
            assert one.tolerance < other.tolerance
            assert one.cold_tokens > other.cold_tokens
            assert one.audit > other.audit
            assert one.audit_limit < other.audit_limit


def test_a_wrong_prompt_dial_holds_nothing(team: KvcmasTeam) -> None:
    prompt = Prompt(np.array(prompt_of("b", document(0))), "b", "wrong", dial="never")
    with pytest.raises(ConfigError):
        team.kvcmas.plan(prompt)
    assert team.settled()
