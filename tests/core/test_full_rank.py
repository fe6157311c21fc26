"""A correction at full rank, fitted on the very tokens it corrects, gives the exact KV.

A tiny random Llama reads one segment behind two role prefixes. There are fewer tokens than
features, so that a linear map can pass through all of them; then nothing is left but the least
ridge and the rounding of the state (float32 here, float16 by default).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvcmas.core.channels import deviation, to_channels
from kvcmas.core.correction import Correction
from kvcmas.core.deviation import relative_deviation
from kvcmas.core.features import FeatureBasis, Features, windows_of
from kvcmas.core.learner import LearnerConfig, PairLearner
from kvcmas.core.rope import Rope
from kvcmas.core.segment import SegmentKV

from ..engines.tiny import random_ids, tiny_model

TOKENS = 90
SEGMENT = random_ids(TOKENS, 5)
DONOR, READER = random_ids(20, 6), random_ids(33, 7)
CHANNELS = 2 * (16 + 16)


def kv_behind(model: PreTrainedModel, prefix: list[int], device: torch.device) -> SegmentKV:
    start = len(prefix)
    # Without the model's configuration, so that layers with a sliding window keep all tokens.
    cache: Any = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([prefix + SEGMENT], device=device), past_key_values=cache)
    return SegmentKV(
        torch.stack([layer.keys[0, :, start:] for layer in cache.layers]),
        torch.stack([layer.values[0, :, start:] for layer in cache.layers]),
        torch.tensor(SEGMENT, device=device),
        torch.arange(start, start + TOKENS, device=device)[None],
    )


def fit(
    rope: Rope,
    donor: SegmentKV,
    reader: SegmentKV,
    rank: int,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[Correction | None, Features, torch.Tensor]:
    channels = to_channels(rope, donor)
    basis = FeatureBasis.fit(
        channels, windows_of(channels[0]), own_dim=CHANNELS, window_dim=64, fade=16.0
    )
    features = basis.features(channels)
    fading = basis.fading(torch.arange(1, TOKENS + 1, device=channels.device))
    assert features.matrix(fading).shape[-1] > TOKENS
    config = LearnerConfig(
        rank=rank,
        target_dim=CHANNELS,
        ridges=(0.0,),
        min_tokens=TOKENS,
        basis_tokens=TOKENS,
        hidden=0,
        state_dtype=state_dtype,
    )
    learner = PairLearner(config)
    # The third of these is held out; it holds the same tokens as the others.
    for _ in range(4):
        learner.observe(features, fading, deviation(rope, reader, donor))
    return learner.refit(), features, fading


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_full_rank_on_the_same_tokens_is_exact(
    family: str, dtype: torch.dtype, device: torch.device
) -> None:
    model = tiny_model(family, device)
    rope = Rope.from_config(model.config)
    donor, reader = (kv_behind(model, prefix, device) for prefix in (DONOR, READER))
    correction, features, fading = fit(rope, donor, reader, CHANNELS, dtype)
    assert correction is not None
    shift = len(READER) - len(DONOR)
    moved = SegmentKV(
        rope.move(donor.keys, shift, positions=donor.positions),
        donor.values.clone(),
        donor.token_ids,
        reader.positions,
    )
    assert relative_deviation(reader, moved) > 0.3
    correction.apply(rope, features, fading, moved)
    assert relative_deviation(reader, moved) < 1e-3
    # Every single number; a float16 state rounds by up to 1e-3 of the largest, which reaches 5.
    for exact, found in ((reader.keys, moved.keys), (reader.values, moved.values)):
        scale = 1.0 if dtype == torch.float32 else float(exact.abs().max())
        assert (exact - found).abs().max() < 1e-3 * scale


def test_the_rank_limits_what_a_correction_gives_back(device: torch.device) -> None:
    model = tiny_model("llama", device)
    rope = Rope.from_config(model.config)
    donor, reader = (kv_behind(model, prefix, device) for prefix in (DONOR, READER))
    wanted = deviation(rope, reader, donor)[1:]
    left = []
    for rank in (4, 16, CHANNELS):
        correction, features, fading = fit(rope, donor, reader, rank)
        assert correction is not None
        assert correction.outward.shape[1] == rank
        error = wanted - correction.deviation(features, fading)[-2:]
        best = torch.linalg.svdvals(wanted)[:, rank:].square().sum()
        assert error.square().sum() <= 1.01 * best + 1e-6 * wanted.square().sum()
        left.append(float(error.square().sum()))
    assert left[0] > left[1] > left[2]
