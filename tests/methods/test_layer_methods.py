"""`cacheblend` and `droidspeak`: parts of reused runs go through parts of the model."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcmas.core.deviation import relative_deviation
from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers import model_info
from kvcmas.engines.transformers.results import Scored
from kvcmas.errors import ConfigError, UnsupportedSpanError
from kvcmas.methods import create
from kvcmas.methods.droidspeak import EncodedKV
from kvcmas.methods.layer_profile import Profiled, choose_layers, frontier, layer_groups

from ..engines.tiny import FAMILIES, random_ids, tiny_model
from .team import DOCUMENT, OTHER_ROLE, OTHER_TASK, ROLE, TASK, Team, reused, same_kv

FIRST = ROLE + DOCUMENT + TASK
SECOND = OTHER_ROLE + DOCUMENT + OTHER_TASK
SPAN = slice(40, 140)


def served(
    device: torch.device, method: str, family: str = "gemma3", **options: Any
) -> tuple[Team, Scored]:
    """The reader behind one donor; gemma3 has six layers of two kinds."""
    team = Team(method, device, family, **options)
    team.score(FIRST)
    scored = team.score(SECOND, "critic")
    assert team.settled()
    return team, scored


def blind_kv(device: torch.device, family: str = "gemma3") -> SegmentKV:
    return served(device, "fullshared", family)[1].kv


def same_layer(one: SegmentKV, other: SegmentKV, layer: int) -> Tensor:
    """`[tokens]` bool: whether the span's KV of a layer is the same, bit by bit."""
    keys = (one.keys[layer, :, SPAN] == other.keys[layer, :, SPAN]).all(0).all(-1)
    return keys & (one.values[layer, :, SPAN] == other.values[layer, :, SPAN]).all(0).all(-1)


WHOLE = [("cacheblend", {"ratio": 1.0}), ("droidspeak", {"first": 0, "layers": -1})]


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize(("method", "options"), WHOLE)
def test_computing_all_of_it_is_a_full_prefill(
    device: torch.device, family: str, method: str, options: dict[str, int]
) -> None:
    if "layers" in options:
        layers = model_info(tiny_model(family, device)).layers
        options = {**options, "layers": layers}
    team, scored = served(device, method, family, **options)
    exact = team.dense(SECOND)
    assert (scored.logits - exact.logits).abs().max() <= 1e-5 * exact.logits.abs().max()
    assert relative_deviation(exact.kv, scored.kv) < 1e-5
    (span,) = reused(scored.record)
    assert (span.computed, span.reused, scored.record.exact) == (100, 0, True)
    assert scored.record.computed == len(SECOND)


class TestCacheBlend:
    def test_the_most_deviating_tokens_are_computed(self, device: torch.device) -> None:
        team, scored = served(device, "cacheblend")
        exact, blind = team.dense(SECOND).kv, blind_kv(device)
        for layer in (0, 1):  # computed for all tokens, behind exact KV
            torch.testing.assert_close(
                scored.kv.keys[layer, :, SPAN], exact.keys[layer, :, SPAN], rtol=0, atol=2e-5
            )
        deviation = sum(
            (one[1, :, SPAN] - other[1, :, SPAN]).square().sum((0, 2))
            for one, other in ((exact.keys, blind.keys), (exact.values, blind.values))
        )
        assert isinstance(deviation, Tensor)
        expected = set(deviation.topk(15).indices.tolist())
        for layer in range(2, 6):
            computed = (~same_layer(scored.kv, blind, layer)).nonzero()[:, 0].tolist()
            assert set(computed) == expected

    @pytest.mark.parametrize(("ratio", "layers"), [(0.15, 2), (0.001, 2), (0.5, 4), (0, 1)])
    def test_counts(self, device: torch.device, ratio: float, layers: int) -> None:
        _, scored = served(device, "cacheblend", ratio=ratio, layers=layers)
        (span,) = reused(scored.record)
        assert span.token_layers == 100 * layers + ceil(100 * ratio) * (6 - layers)
        assert span.computed == ceil(span.token_layers / 6)
        assert scored.record.computed == 49 + span.computed
        assert scored.record.reused == 100 - span.computed
        assert not scored.record.exact

    def test_quality_grows_with_the_ratio(self, device: torch.device) -> None:
        errors = [_error(device, "cacheblend", ratio=ratio) for ratio in (0, 0.2, 0.5, 0.8)]
        assert errors == sorted(errors, reverse=True)

    def test_only_what_was_computed_whole_is_kept(self, device: torch.device) -> None:
        team, _ = served(device, "cacheblend")
        held = [info for info in team.library.store.infos() if info.agent == "critic"]
        assert [(info.start, info.exact) for info in held] == [(0, True)]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"ratio": 1.5}, r"ratio must be a number from 0 to 1, got 1\.5"),
            ({"ratio": True}, "ratio"),
            ({"layers": 0}, "layers must be an integer >= 1"),
            ({"layers": 7}, "layers is 7, and the model has 6"),
            ({"min_length": 0}, "min_length"),
        ],
    )
    def test_refused(self, device: torch.device, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Team("cacheblend", device, "gemma3", **options)


class TestDroidSpeak:
    @pytest.mark.parametrize(("first", "layers"), [(0, 2), (1, 3), (4, 2)])
    def test_only_these_layers_change(self, device: torch.device, first: int, layers: int) -> None:
        _, scored = served(device, "droidspeak", first=first, layers=layers)
        blind = blind_kv(device)
        (span,) = reused(scored.record)
        assert (span.token_layers, span.computed) == (100 * layers, ceil(100 * layers / 6))
        assert span.reused == 100 - span.computed
        for layer in range(6):
            same = same_layer(scored.kv, blind, layer)
            inside = first <= layer < first + layers
            # The first computed layer's keys come from the same input, and layer 0 is exact.
            assert same.all() or inside
            assert not inside or layer == first or not same.any()

    def test_first_layers_are_exact(self, device: torch.device) -> None:
        team, scored = served(device, "droidspeak", first=0, layers=3)
        exact = team.dense(SECOND).kv
        for layer in range(3):
            torch.testing.assert_close(
                scored.kv.keys[layer, :, SPAN], exact.keys[layer, :, SPAN], rtol=0, atol=2e-5
            )

    def test_quality_grows_with_the_layers(self, device: torch.device) -> None:
        errors = [_error(device, "droidspeak", first=0, layers=count) for count in (1, 3, 5)]
        assert errors == sorted(errors, reverse=True)

    def test_hidden_states_are_the_donors(self, device: torch.device) -> None:
        """Entered by them, layer `first` gives the donor's own KV, moved."""
        team, scored = served(device, "droidspeak", first=3, layers=2)
        torch.testing.assert_close(
            scored.kv.values[3, :, SPAN], blind_kv(device).values[3, :, SPAN], rtol=0, atol=1e-5
        )
        donor = next(info for info in team.library.store.infos() if info.agent == "planner")
        held = team.library.kv(donor.id)
        assert isinstance(held, EncodedKV)
        with torch.no_grad():
            states = team.model(
                torch.tensor([FIRST], device=device), output_hidden_states=True
            ).hidden_states[3][0]
        torch.testing.assert_close(held.hidden[: len(FIRST)], states, rtol=0, atol=1e-5)
        assert held.known.tolist() == [True] * len(FIRST) + [False] * (len(held) - len(FIRST))
        tensors = (held.keys, held.values, held.token_ids, held.positions, held.hidden, held.known)
        assert held.nbytes == sum(part.numel() * part.element_size() for part in tensors)

    def test_a_longer_beginning_keeps_them(self, device: torch.device) -> None:
        team = Team("droidspeak", device, "gemma3", first=3, layers=2)
        team.score(FIRST)
        team.score(FIRST + random_ids(60, 7))
        record = team.score(SECOND, "critic").record
        (span,) = reused(record)
        assert (span.token_layers, record.notes) == (200, ())

    def test_without_hidden_states_it_begins_at_layer_0(self, device: torch.device) -> None:
        team = Team("droidspeak", device, "gemma3", first=3, layers=2)
        answer = list(team.ask(FIRST, tokens=50).token_ids)
        record = team.ask(OTHER_ROLE + answer + OTHER_TASK, "critic").record
        (span,) = reused(record)
        assert span.token_layers == 49 * 5
        assert "the donor has no hidden states at layer 3" in record.notes[0]

    def test_the_donor_is_served_as_ever(self, device: torch.device) -> None:
        team = Team("droidspeak", device, "gemma3", first=3, layers=2)
        assert same_kv(team.score(FIRST).kv, team.dense(FIRST).kv)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"first": -1}, "first must be an integer >= 0"),
            ({"layers": 0}, "layers must be an integer >= 1"),
            ({"first": 5, "layers": 2}, r"layers \[5, 7\) go beyond the model's 6"),
        ],
    )
    def test_refused(self, device: torch.device, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Team("droidspeak", device, "gemma3", **options)

    def test_a_quarter_by_default(self, device: torch.device) -> None:
        method: Any = create("droidspeak", model_info(tiny_model("gemma3", device)))
        assert (method.first, method.last) == (0, 2)


@pytest.mark.parametrize("method", ["cacheblend", "droidspeak"])
def test_models_without_a_list_of_layers_are_refused_by_name(
    device: torch.device, method: str
) -> None:
    team = Team(method, device)
    team.score(FIRST)
    decoder: Any = team.model.get_decoder()
    decoder.layers = decoder.layers[:2]
    with pytest.raises(UnsupportedSpanError, match=f"method '{method}': LlamaForCausalLM"):
        team.score(SECOND, "critic")
    assert team.settled()


def test_profile() -> None:
    assert layer_groups(5, 2) == [(0, 2), (0, 4), (0, 5), (2, 2), (2, 3), (4, 1)]
    profile = [
        Profiled(0, 2, 0.5),
        Profiled(2, 2, 0.3),
        Profiled(0, 3, 0.4),
        Profiled(0, 4, 0.1),
        Profiled(0, 5, 0.1),
    ]
    assert [(group.first, group.layers) for group in frontier(profile)] == [(2, 2), (0, 4)]
    assert choose_layers(profile, 0.3) == Profiled(2, 2, 0.3)
    assert choose_layers(profile, 0.2) == Profiled(0, 4, 0.1)
    assert choose_layers(profile, 0.0) == Profiled(0, 4, 0.1)
    with pytest.raises(ConfigError, match="no group of layers"):
        choose_layers([], 1.0)
    with pytest.raises(ConfigError, match="step must be at least 1"):
        layer_groups(4, 0)


def _error(device: torch.device, method: str, **options: Any) -> float:
    team, scored = served(device, method, **options)
    return relative_deviation(team.dense(SECOND).kv.slice(0, 140), scored.kv.slice(0, 140))
