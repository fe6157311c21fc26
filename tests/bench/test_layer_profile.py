"""Profiling groups of layers on a tiny model."""

from __future__ import annotations

from pathlib import Path

from kvcmas.bench.arms import Arm
from kvcmas.bench.fidelity import FidelityBench
from kvcmas.bench.layer_profile import profile_layers
from kvcmas.engines.transformers import load, model_info
from kvcmas.methods.layer_profile import choose_layers, layer_groups

from .small_team import ROLES, context, model_folder


def test_profile(tmp_path: Path) -> None:
    loaded = load(model_folder(tmp_path))
    layers = model_info(loaded).layers
    groups = layer_groups(layers, 1)
    learning, testing = [context(1)], [context(2), context(3)]
    profile = profile_layers(loaded, ROLES, learning, testing, groups, 5)
    assert [(group.first, group.layers) for group in profile] == groups
    losses = {(group.first, group.layers): group.loss for group in profile}
    assert losses[0, layers] < 1e-6
    assert losses[layers - 1, 1] > 1e-6  # one layer alone leaves something
    assert choose_layers(profile, 1e-6).loss < 1e-6


def test_hidden_states_are_there_for_groups_in_the_middle(tmp_path: Path) -> None:
    loaded = load(model_folder(tmp_path))
    arm = Arm("middle", "droidspeak", {"first": 1, "layers": 1})
    bench = FidelityBench(loaded, ROLES, [context(1)], [context(2)], (arm,), 5)
    bench.learn()
    rows = bench.measure()
    spans = [span for row in rows for span in row.record.spans if span.token_layers is not None]
    assert spans
    assert all(span.token_layers == span.stop - span.start for span in spans)
