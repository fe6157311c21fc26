"""`kvcomm` and `kvcmas-anchors` on a model: when they are exact, what they keep and when."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from kvcmas.core.deviation import relative_deviation
from kvcmas.engines.transformers import Cancellation, SamplingParams
from kvcmas.engines.transformers.clock import Clock
from kvcmas.engines.transformers.standalone import encode_wanted
from kvcmas.errors import CancelledError, ConfigError
from kvcmas.methods import create
from kvcmas.methods.anchors.distances import token_distances
from kvcmas.methods.anchors.weights import softmax_weights

from .anchor_team import (
    CHANNELS,
    DOCUMENTS,
    LAYERS,
    anchor_team,
    anchors_of,
    critic,
    drop_donors_of,
    judge,
    known,
    planner,
    templated,
)
from .team import DOCUMENT, OTHER_TASK, reused

METHODS = ("kvcomm", "kvcmas-anchors")
BOTH = pytest.mark.parametrize("method", METHODS)
TOKENS = len(DOCUMENT)
FULL_RANK: dict[str, dict[str, Any]] = {"kvcomm": {}, "kvcmas-anchors": {"rank": 1000}}


@BOTH
class TestExact:
    def test_every_text_new_is_a_full_prefill(self, method: str, device: torch.device) -> None:
        team = anchor_team(method, device, gate="new")
        for document in DOCUMENTS[:4]:
            assert team.score(planner(document)).record.exact
            scored = team.score(critic(document), "critic")
            assert scored.record.exact
            assert not [span for span in reused(scored.record) if not span.exact]
            expected = team.dense(critic(document)).logits
            assert (scored.logits - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert len(known(team).pool) == 4
        assert team.settled()

    def test_two_anchors_come_first(self, method: str, device: torch.device) -> None:
        team = anchor_team(method, device, gamma=1.0)
        computed = []
        for document in DOCUMENTS[:4]:
            team.score(planner(document))
            computed.append(team.score(critic(document), "critic").record)
        assert [record.exact for record in computed] == [True, True, False, False]
        assert len(known(team).pool) == 2

    def test_an_own_anchor_gives_the_exact_kv(self, method: str, device: torch.device) -> None:
        team = anchor_team(method, device, **FULL_RANK[method])
        team.score(planner(DOCUMENT))
        exact = team.score(critic(DOCUMENT), "critic").kv
        drop_donors_of(team, "critic")
        again = team.score(critic(DOCUMENT), "critic")
        (span,) = [span for span in reused(again.record) if span.start == 40]
        assert (span.stop, span.correction) == (140, "own anchor")
        assert not again.record.exact
        assert relative_deviation(exact.slice(40, 140), again.kv.slice(40, 140)) < 1e-4
        assert team.agrees(again, critic(DOCUMENT))

    def test_the_exact_dial(self, method: str, device: torch.device) -> None:
        team = anchor_team(method, device, gate="known")
        for document in DOCUMENTS[:2]:
            team.score(planner(document))
            assert team.score(critic(document), "critic", dial="exact").record.exact
        # Under this gate every exact request teaches.
        assert len(known(team).pool) == 2


@BOTH
class TestGate:
    def test_reuse_grows_with_gamma(self, method: str, device: torch.device) -> None:
        """The papers' direction (KVCOMM: 34% of the calls at 0.1, 98% at 0.9)."""
        rates = []
        for gamma in (0.0, 0.1, 0.9):
            team = anchor_team(method, device, gamma=gamma)
            records = []
            for number in range(10):
                document = templated(number)
                team.ask(planner(document), tokens=0)
                records.append(team.ask(critic(document), "critic", tokens=0).record)
            rates.append(sum(not record.exact for record in records) / len(records))
        assert rates[0] < rates[1] < rates[2] <= 0.8  # the first two are always new

    def test_all_placeholders_or_none(self, method: str, device: torch.device) -> None:
        records = []
        for gate in ("entropy", "known"):
            team = anchor_team(method, device, gate=gate)
            team.score(planner(DOCUMENTS[0]))
            team.score(critic(DOCUMENTS[0]), "critic")
            drop_donors_of(team, "critic")
            team.score(planner(DOCUMENTS[1]))
            # The first text has the reader's own anchor, the second one is new.
            both = critic(DOCUMENTS[0] + OTHER_TASK + DOCUMENTS[1])
            records.append(team.score(both, "critic").record)
        assert records[0].exact
        assert records[0].reused == 0
        assert "so is every other shared text of the prompt" in records[0].notes
        assert [(span.start, span.stop) for span in reused(records[1])] == [(40, 140), (149, 249)]

    def test_published_weights_are_nearly_uniform(self, method: str, device: torch.device) -> None:
        """One of four anchors begins with the same 90 tokens, so its distance there is zero."""
        team = anchor_team(method, device, gate="known", **FULL_RANK[method])
        near = DOCUMENT[:90] + DOCUMENTS[1][90:]
        for document in (near, *DOCUMENTS[1:4]):
            team.score(planner(document))
            team.score(critic(document), "critic", dial="exact")
        team.score(planner(DOCUMENT))
        drop_donors_of(team, "critic")
        prompt = team.prompt(critic(DOCUMENT), "critic")
        clock = Clock(device)
        encode_wanted(team.engine.runner, team.method, prompt, clock, Cancellation())
        team.method.plan(prompt)
        (one,) = anchors_of(team).staged(prompt).placeholders
        deltas = [anchor.deltas[one.edge] for anchor in one.anchors]
        bases = [anchor.base for anchor in one.anchors]
        distances = token_distances(one.text(team.library.info.rope), one.at, bases, deltas, 32)
        team.method.finish(prompt, None)
        assert len(bases) == 4
        for each in distances:
            assert each[0, :85].max() < 1e-3
            assert softmax_weights(each)[0, :85].mean() < 0.6
            assert softmax_weights(each, sharp=True)[0, :85].min() > 0.999


@BOTH
class TestIsolation:
    def test_tenants(self, method: str, device: torch.device) -> None:
        team = anchor_team(method, device, gate="known")
        for tenant in ("a", "b"):
            team.score(planner(DOCUMENT), tenant=tenant)
            record = team.score(critic(DOCUMENT), "critic", tenant=tenant).record
            assert record.exact
            assert len(known(team, tenant).pool) == 1
        assert known(team, "a").pool.anchors[0] is not known(team, "b").pool.anchors[0]
        assert len(known(team).pool) == 0
        assert anchors_of(team).state_bytes("a") > 0
        assert anchors_of(team).state_bytes("c") == 0

    def test_a_cancelled_request_leaves_nothing(self, method: str, device: torch.device) -> None:
        team = anchor_team(method, device, gate="known")
        team.score(planner(DOCUMENT))
        before = [info.id for info in team.library.store.infos()]
        cancel = Cancellation()

        def on_token(token: int, text: str) -> None:
            cancel.cancel()

        params = SamplingParams(max_tokens=40, ignore_eos=True)
        with pytest.raises(CancelledError):
            team.engine.generate(
                team.prompt(critic(DOCUMENT), "critic"), params, on_token=on_token, cancel=cancel
            )
        assert team.settled()
        assert [info.id for info in team.library.store.infos()] == before
        assert (len(known(team).pool), len(known(team).contents)) == (0, 0)
        assert anchors_of(team).state_bytes() == 0
        assert anchors_of(team)._requests == {}

    def test_refused(self, method: str, device: torch.device) -> None:
        info = anchor_team(method, device).library.info
        for options, message in (
            ({"gate": "open"}, "gate must be one of entropy, new, known, got 'open'"),
            ({"gamma": 1.5}, "gamma must be a number from 0 to 1, got 1.5"),
            ({"gamma": True}, "gamma must be a number"),
            ({"anchors": 0}, "anchors must be an integer >= 1"),
            ({"sharp": 1}, "sharp must be true or false"),
        ):
            with pytest.raises(ConfigError, match=message):
                create(method, info, **options)


class TestKvcomm:
    def test_encodings_are_charged(self, device: torch.device) -> None:
        team = anchor_team("kvcomm", device, gate="known")
        assert team.score(planner(DOCUMENT)).record.encoded == 0
        record = team.score(critic(DOCUMENT), "critic").record
        assert (record.encoded, record.computed) == (TOKENS, len(critic(DOCUMENT)))
        assert 0 < record.encode_s < record.ttft_s
        parts = record.match_s + record.correct_s + record.forward_s + record.other_s
        assert parts + record.encode_s == pytest.approx(record.ttft_s)
        # Once for all readers.
        assert team.score(judge(DOCUMENT), "judge").record.encoded == 0

    def test_state_bytes(self, device: torch.device) -> None:
        """Base and one full deviation for each reader, plus the encodings that are kept."""
        team = anchor_team("kvcomm", device, gate="known")
        team.score(planner(DOCUMENT))
        team.score(critic(DOCUMENT), "critic")
        team.score(judge(DOCUMENT), "judge")
        (anchor,) = known(team).pool.anchors
        assert sorted(anchor.deltas) == ["critic", "judge"]
        full = 4 * TOKENS * CHANNELS
        assert anchor.nbytes == full * (LAYERS + 2 * (LAYERS - 1))
        ids = 2 * 8 * TOKENS
        assert anchors_of(team).state_bytes() == anchor.nbytes + full * LAYERS + ids

    def test_the_fixed_text_behind(self, device: torch.device) -> None:
        """Encoded once it has recurred, then reused with the shared text; one token is computed."""
        team = anchor_team("kvcomm", device, gate="known")
        for document in DOCUMENTS[:3]:
            team.score(planner(document))
            record = team.score(critic(document), "critic", dial="exact").record
        assert len(known(team).pool) == 3
        # The second exact request encodes the text, since the first one has seen it.
        assert [len(anchor.following) for anchor in known(team).pool.anchors] == [0, 1, 1]
        assert record.encoded == TOKENS
        team.score(planner(DOCUMENTS[3]))
        scored = team.score(critic(DOCUMENTS[3]), "critic")
        spans = [(span.start, span.stop, span.correction) for span in reused(scored.record)]
        assert spans == [(0, 40, None), (40, 140, "anchors"), (140, 148, "following")]
        assert scored.record.computed == 1
        drop_donors_of(team, "critic")
        # With its own anchor the text behind is exact, too.
        again = team.score(critic(DOCUMENTS[2]), "critic")
        exact = team.dense(critic(DOCUMENTS[2])).kv
        assert [span.correction for span in reused(again.record)] == ["own anchor", "following"]
        assert relative_deviation(exact.slice(40, 148), again.kv.slice(40, 148)) < 1e-4
        assert team.agrees(again, critic(DOCUMENTS[2]))

    def test_an_engine_without_encodings_computes(self, device: torch.device) -> None:
        team = anchor_team("kvcomm", device)
        team.score(planner(DOCUMENT))
        prompt = team.prompt(critic(DOCUMENT), "critic")
        plan = team.method.plan(prompt)
        team.method.finish(prompt, None)
        assert plan.computed == len(prompt)
        assert "[40, 140) is computed: it is not encoded by itself" in plan.notes


class TestKvcmasAnchors:
    def test_state_bytes(self, device: torch.device) -> None:
        team = anchor_team("kvcmas-anchors", device, gate="known", rank=8)
        team.score(planner(DOCUMENT))
        team.score(critic(DOCUMENT), "critic")
        team.score(judge(DOCUMENT), "judge")
        (anchor,) = known(team).pool.anchors
        # The chain: each reader starts from the one before.
        assert sorted(anchor.deltas) == ["critic>judge", "planner>critic"]
        layers = LAYERS + 2 * (LAYERS - 1)
        assert anchors_of(team).state_bytes() == 4 * layers * 8 * (2 * TOKENS + CHANNELS)

    def test_factors_are_smaller_than_deviations_in_full(self, device: torch.device) -> None:
        sizes = []
        for method, options in (("kvcomm", {}), ("kvcmas-anchors", {"rank": 4})):
            team = anchor_team(method, device, gate="known", **options)
            team.score(planner(DOCUMENT))
            team.score(critic(DOCUMENT), "critic")
            sizes.append(known(team).pool.nbytes)
        assert sizes[1] < 0.2 * sizes[0]

    def test_corrected_kv_is_the_next_base(self, device: torch.device) -> None:
        team = anchor_team("kvcmas-anchors", device, gate="known")
        for document in DOCUMENTS[:3]:
            team.score(planner(document))
            for ids, agent in ((critic(document), "critic"), (judge(document), "judge")):
                team.score(ids, agent, dial="exact")
        team.score(planner(DOCUMENTS[3]))
        first = team.score(critic(DOCUMENTS[3]), "critic")
        second = team.score(judge(DOCUMENTS[3]), "judge")
        spans = [reused(scored.record)[1] for scored in (first, second)]
        assert [span.correction for span in spans] == ["anchors", "anchors"]
        donors = [team.library.segment_info(span.segment or "") for span in spans]
        assert [(info.agent, info.exact) for info in donors if info] == [
            ("planner", True),
            ("critic", False),
        ]

    def test_a_full_prefill_ends_the_chain(self, device: torch.device) -> None:
        team = anchor_team("kvcmas-anchors", device, gate="known")
        team.score(planner(DOCUMENT))
        team.score(critic(DOCUMENT), "critic")
        team.score(judge(DOCUMENT), "judge")
        agents = [(info.agent, info.exact) for info in team.library.tenant_infos("")]
        assert agents == [("planner", True), ("critic", True), ("judge", True)]

    def test_layer_0_is_not_corrected(self, device: torch.device) -> None:
        blind, team = (
            anchor_team(name, device, **options)
            for name, options in (("fullshared", {}), ("kvcmas-anchors", {"gate": "known"}))
        )
        for document in DOCUMENTS[:2]:
            team.score(planner(document))
            team.score(critic(document), "critic", dial="exact")
        for one in (blind, team):
            one.score(planner(DOCUMENTS[2]))
        kv, other = (
            one.score(critic(DOCUMENTS[2]), "critic").kv.slice(40, 140) for one in (team, blind)
        )
        assert torch.equal(kv.keys[0], other.keys[0])
        assert torch.equal(kv.values[0], other.values[0])
        assert not torch.equal(kv.values[1], other.values[1])


def test_documents_differ() -> None:
    assert all(one != other for one, other in pairwise(DOCUMENTS))


def test_the_text_behind_can_be_left_to_the_model(device: torch.device) -> None:
    team = anchor_team("kvcomm", device, gate="known", following=False)
    for document in DOCUMENTS[:3]:
        team.score(planner(document))
        team.score(critic(document), "critic", dial="exact")
    team.score(planner(DOCUMENTS[3]))
    record = team.score(critic(DOCUMENTS[3]), "critic").record
    assert [span.correction for span in reused(record)] == [None, "anchors"]
    assert record.computed == len(OTHER_TASK)
    assert not any(anchor.following for anchor in known(team).pool.anchors)
