"""Corrections: the formula, how they are added to KV, and what they weigh."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from kvcmas.core.channels import split_channels
from kvcmas.core.correction import Correction
from kvcmas.core.features import Features
from kvcmas.core.hidden import HiddenMap
from kvcmas.core.rope import Layout, Rope, RopeTable
from kvcmas.core.segment import SegmentKV

from .synthetic import fading_of, features_of, normal, plain_rope, random_segment, segment_of

LAYERS, HEADS, TOKENS, HEAD_DIM, VALUE_DIM, RANK, HIDDEN = 5, 2, 50, 8, 6, 3, 7
CHANNELS = HEADS * (HEAD_DIM + VALUE_DIM)
OWN, WINDOW = 4, 5

SLOW = RopeTable((1.0, 0.2, 0.03, 0.001), (0,) * 4, Layout.NEOX)
PARTIAL = RopeTable((1.0, 0.5), (0,) * 2, Layout.INTERLEAVED)
# Two tables and a layer without positions, as Gemma-3 and others mix them.
MIXED = Rope((SLOW, PARTIAL), (0, 1, None, 0, 1))


def make(
    device: torch.device,
    layers: tuple[int, ...] = (1, 2, 4),
    hidden_layers: tuple[int, ...] = (0, 2),
    other: int = 0,
) -> Correction:
    count, width = len(layers), 2 * OWN + WINDOW + 2 + other
    hidden = HiddenMap(
        normal(device, len(hidden_layers), width, HIDDEN, seed=3).half(),
        normal(device, len(hidden_layers), 1, HIDDEN, seed=4).half(),
        normal(device, len(hidden_layers), HIDDEN, RANK, seed=5).half(),
    )
    return Correction(
        layers,
        normal(device, count, width, RANK, seed=1).half(),
        normal(device, count, RANK, CHANNELS, seed=2).half(),
        hidden_layers,
        hidden if hidden_layers else None,
    )


def by_hand(correction: Correction, features: Features, fading: Tensor) -> list[Tensor]:
    """The docstring's formula, layer by layer."""
    matrix, result = features.matrix(fading), []
    for slot, layer in enumerate(correction.layers):
        codes = matrix[layer] @ correction.inward[slot].float()
        if correction.hidden is not None and slot in correction.hidden_layers:
            at = correction.hidden_layers.index(slot)
            hidden = correction.hidden
            active = gelu(matrix[layer] @ hidden.inward[at].float() + hidden.bias[at].float())
            codes = codes + active @ hidden.outward[at].float()
        result.append(codes @ correction.outward[slot].float())
    return result


@pytest.mark.parametrize("layers", [(0, 1, 2, 3, 4), (1, 2, 3), (0, 3), (4,)])
@pytest.mark.parametrize("other", [0, 3])
def test_deviation_is_the_formula(
    layers: tuple[int, ...], other: int, device: torch.device
) -> None:
    features = features_of(device, LAYERS, TOKENS, OWN, WINDOW, other)
    fading = fading_of(device, TOKENS, 4)
    for hidden in ((), (0,), tuple(range(len(layers)))):
        correction = make(device, layers, hidden, other)
        found = correction.deviation(features, fading)
        assert found.dtype == torch.float32
        expected = torch.stack(by_hand(correction, features, fading))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("rope", [plain_rope(LAYERS, HEAD_DIM), MIXED], ids=["one", "mixed"])
def test_apply_adds_the_rotated_deviation(rope: Rope, device: torch.device) -> None:
    correction = make(device)
    features = features_of(device, LAYERS, TOKENS, OWN, WINDOW)
    fading = fading_of(device, TOKENS, 4)
    # The donor stood 30 tokens further to the left.
    donor = random_segment(device, LAYERS, HEADS, TOKENS, HEAD_DIM, VALUE_DIM, start=90)
    out = segment_of(rope.move(donor.keys, 30), donor.values.clone(), 120)
    before = out.clone()
    correction.apply(rope, features, fading, out)
    keys, values = before.keys.clone(), before.values.clone()
    for layer, flat in zip(correction.layers, by_hand(correction, features, fading), strict=True):
        bare, added = split_channels(flat, HEADS, HEAD_DIM)
        keys[layer] += rope.rotate(bare[None].contiguous(), out.positions, layers=[layer])[0]
        values[layer] += added
    torch.testing.assert_close(out.keys, keys, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(out.values, values, atol=1e-3, rtol=1e-4)
    for layer in (0, 3):
        assert torch.equal(out.keys[layer], before.keys[layer])
        assert torch.equal(out.values[layer], before.values[layer])
    for layer in correction.layers:
        assert not torch.equal(out.keys[layer], before.keys[layer])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_apply_writes_into_a_cache(dtype: torch.dtype, device: torch.device) -> None:
    """`out` is a view of a cache in the model's dtype; what lies beside it stays."""
    rope, correction = plain_rope(LAYERS, HEAD_DIM), make(device)
    features, fading = features_of(device, LAYERS, TOKENS, OWN, WINDOW), fading_of(device, TOKENS)
    exact = random_segment(device, LAYERS, HEADS, 70, HEAD_DIM, VALUE_DIM)
    cache = SegmentKV(
        exact.keys.to(dtype), exact.values.to(dtype), exact.token_ids, exact.positions
    )
    wide = SegmentKV(cache.keys.float(), cache.values.float(), cache.token_ids, cache.positions)
    before = cache.clone()
    correction.apply(rope, features, fading, cache.slice(10, 60))
    correction.apply(rope, features, fading, wide.slice(10, 60))
    for part in (slice(0, 10), slice(60, 70)):
        assert torch.equal(cache.keys[:, :, part], before.keys[:, :, part])
        assert torch.equal(cache.values[:, :, part], before.values[:, :, part])
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(cache.keys.float(), wide.keys, atol=1e-4, rtol=rounding)
    torch.testing.assert_close(cache.values.float(), wide.values, atol=1e-4, rtol=rounding)


def test_parts_of_a_run_get_what_the_run_gets(device: torch.device) -> None:
    rope, correction = plain_rope(LAYERS, HEAD_DIM), make(device)
    features, fading = features_of(device, LAYERS, TOKENS, OWN, WINDOW), fading_of(device, TOKENS)
    whole = random_segment(device, LAYERS, HEADS, TOKENS, HEAD_DIM, VALUE_DIM, start=40)
    parts = whole.clone()
    correction.apply(rope, features, fading, whole)
    for start, stop in ((0, 1), (1, 20), (20, 20), (20, TOKENS)):
        correction.apply(
            rope, features.slice(start, stop), fading[start:stop], parts.slice(start, stop)
        )
    torch.testing.assert_close(parts.keys, whole.keys, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(parts.values, whole.values, atol=1e-4, rtol=1e-5)


def test_without_the_second_reader_its_share_is_left_out(device: torch.device) -> None:
    correction, fading = make(device, other=3), fading_of(device, TOKENS)
    features = features_of(device, LAYERS, TOKENS, OWN, WINDOW, other=3)
    assert features.other is not None
    zero = features.with_other(torch.zeros_like(features.other))
    torch.testing.assert_close(
        correction.deviation(features.with_other(None), fading), correction.deviation(zero, fading)
    )


def test_no_layers_and_no_tokens_change_nothing(device: torch.device) -> None:
    rope = plain_rope(LAYERS, HEAD_DIM)
    features, fading = features_of(device, LAYERS, TOKENS, OWN, WINDOW), fading_of(device, TOKENS)
    segment = random_segment(device, LAYERS, HEADS, TOKENS, HEAD_DIM, VALUE_DIM)
    before = segment.clone()
    empty = Correction((), torch.empty(0, 15, 3), torch.empty(0, 3, CHANNELS))
    empty.apply(rope, features, fading, segment)
    make(device).apply(rope, features.slice(0, 0), fading[:0], segment.slice(7, 7))
    assert torch.equal(segment.keys, before.keys)
    assert torch.equal(segment.values, before.values)


MIB = 1 << 20
SMOLLM2, LLAMA_8B = (30, 3, 64), (32, 8, 128)


@pytest.mark.parametrize("other", [0, 64])
@pytest.mark.parametrize(("shape", "limit"), [(SMOLLM2, 4), (LLAMA_8B, 16)])
def test_the_largest_state_of_real_models(
    shape: tuple[int, int, int], limit: int, other: int
) -> None:
    """Every layer corrected, with a hidden layer, at the default sizes; nothing is allocated."""
    layers, heads, dim = shape
    width = 2 * 64 + 64 + 2 + other

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float16, device="meta")

    everything = tuple(range(layers))
    correction = Correction(
        everything,
        empty(layers, width, 32),
        empty(layers, 32, 2 * heads * dim),
        everything,
        HiddenMap(empty(layers, width, 32), empty(layers, 1, 32), empty(layers, 32, 32)),
    )
    numbers = layers * (2 * width * 32 + 32 * 2 * heads * dim + 32 + 32 * 32)
    assert correction.nbytes == 2 * numbers
    # A reader may hold two: with one and with two exact readers before it.
    assert 2 * correction.nbytes <= limit * MIB
