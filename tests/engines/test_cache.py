"""The cache by position, and the masks that go with it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from kvcmas.engines.transformers.cache import KVShape, PlanCache
from kvcmas.engines.transformers.masks import MaskBuilder
from kvcmas.errors import UnsupportedModelError

from .tiny import tiny_model

CPU = torch.device("cpu")
SHAPE = KVShape(layers=2, kv_heads=3, head_dim=4, dtype=torch.float32, device=CPU)


def states(tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, 3, tokens, 4), generator=generator)


def test_scatter_by_index_and_by_slice() -> None:
    by_index, by_slice = PlanCache(SHAPE, 9), PlanCache(SHAPE, 9)
    by_index.key_buffer.zero_()
    keys, values = states(4), states(4, 1)
    positions = torch.tensor([0, 2, 3, 6])
    by_index.place(positions, 0, 7)
    seen, _ = by_index.update(keys, values, 1)
    assert seen.shape == (1, 3, 7, 4)
    assert torch.equal(seen[:, :, positions], keys)
    assert not seen[:, :, [1, 4, 5]].any()
    assert not by_index.key_buffer[0].any()
    by_slice.place(slice(5, 9), 5, 9)
    _, seen = by_slice.update(keys, values, 0)
    assert torch.equal(seen[:, :, 5:9], values)
    assert by_slice.get_seq_length() == 5
    assert by_slice.get_mask_sizes(4, 0) == (9, 0)
    assert by_slice.get_max_length() == by_slice.capacity == 9


def test_what_is_returned_is_a_view() -> None:
    cache = PlanCache(SHAPE, 8)
    cache.place(slice(0, 3), 0, 3)
    keys, values = cache.update(states(3), states(3), 0)
    assert keys.data_ptr() == cache.key_buffer.data_ptr()
    assert values.data_ptr() == cache.value_buffer.data_ptr()


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 3, 5), torch.zeros(2, 3, 3, 4), states(3).half()],
)
def test_other_shapes_are_refused(wrong: torch.Tensor) -> None:
    cache = PlanCache(SHAPE, 8)
    cache.place(slice(0, 3), 0, 3)
    with pytest.raises(UnsupportedModelError, match="3 heads of 4"):
        cache.update(wrong, wrong, 0)


def test_masks_by_position() -> None:
    builder = MaskBuilder(("full_attention", "sliding_attention"), 3, False, torch.float32)
    masks = builder.build(torch.tensor([1, 4]), 6)
    assert isinstance(masks, dict)
    assert masks["full_attention"].shape == (1, 1, 2, 6)
    assert masks["full_attention"][0, 0].int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert masks["sliding_attention"][0, 0].int().tolist() == [
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0],
    ]


def test_eager_masks_are_added() -> None:
    mask = MaskBuilder((), None, True, torch.float16).build(torch.tensor([1]), 3)
    assert isinstance(mask, torch.Tensor)
    assert mask.dtype == torch.float16
    assert mask[0, 0].tolist() == [[0.0, 0.0, torch.finfo(torch.float16).min]]


@pytest.mark.parametrize(
    ("family", "layer_types", "window"),
    [
        ("llama", (), None),
        ("qwen2", ("full_attention",), None),
        ("gemma3", ("full_attention", "sliding_attention"), 24),
        ("mistral", (), 24),
    ],
)
def test_builder_of_a_model(family: str, layer_types: tuple[str, ...], window: int | None) -> None:
    builder = MaskBuilder.of(tiny_model(family, CPU).config, torch.float32)
    assert (builder.layer_types, builder.window) == (layer_types, window)


def test_a_configuration_without_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="sdpa"):
        MaskBuilder.of(LlamaConfig(), torch.float32)
