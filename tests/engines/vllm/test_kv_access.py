"""The paged KV cache by position: every layout against plain slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcmas.engines.vllm.kv_access import KVAccess
from kvcmas.errors import InputError, UnsupportedEngineError

from .fake_layers import LAYOUTS, FakeEngine, Layout, fake_engine

BLOCK_IDS = (7, 2, 10, 0, 5)
SPANS = [(0, 40), (0, 8), (8, 24), (3, 4), (7, 8), (8, 9), (5, 29), (1, 40), (39, 40), (16, 16)]


def access_of(engine: FakeEngine) -> KVAccess:
    return KVAccess(engine.caches, engine.layers, engine.block_size, engine.num_blocks)


def random_kv(access: KVAccess, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, access.layers, access.kv_heads, tokens, access.head_dim)
    keys, values = torch.randn(shape, generator=generator).to(access.dtype)
    return keys, values


def fill(engine: FakeEngine, access: KVAccess) -> tuple[Tensor, Tensor]:
    """Write a request's 40 tokens straight through the layers, one at a time."""
    keys, values = random_kv(access, 40)
    for index, name in enumerate(sorted(engine.caches, key=lambda name: int(name.split(".")[2]))):
        layer = engine.layers[name]
        for position in range(40):
            slot = BLOCK_IDS[position // engine.block_size] * engine.block_size
            slot += position % engine.block_size
            layer.impl.do_kv_cache_update(
                layer,
                keys[index, :, position][None].contiguous(),
                values[index, :, position][None].contiguous(),
                engine.caches[name],
                torch.tensor([slot]),
            )
    return keys, values


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reads_what_the_backend_wrote(layout: Layout, dtype: torch.dtype) -> None:
    engine = fake_engine(layout, dtype=dtype)
    access = access_of(engine)
    keys, values = fill(engine, access)
    for start, stop in SPANS:
        got_keys, got_values = access.read(BLOCK_IDS, start, stop)
        assert torch.equal(got_keys, keys[:, :, start:stop])
        assert torch.equal(got_values, values[:, :, start:stop])
        assert got_keys.is_contiguous() and got_values.is_contiguous()
        assert got_keys.dtype == dtype


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_writes_these_slots_and_no_others(layout: Layout) -> None:
    every = tuple(range(11))
    for start, stop in SPANS:
        engine = fake_engine(layout)
        access = access_of(engine)
        expected_keys, expected_values = access.read(every, 0, 88)
        keys, values = random_kv(access, stop - start, seed=start)
        access.write(BLOCK_IDS, start, keys, values)
        slots = [BLOCK_IDS[p // 8] * 8 + p % 8 for p in range(start, stop)]
        expected_keys[:, :, slots], expected_values[:, :, slots] = keys, values
        got_keys, got_values = access.read(every, 0, 88)
        assert torch.equal(got_keys, expected_keys)
        assert torch.equal(got_values, expected_values)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_construction_leaves_the_cache_as_it_was(layout: Layout) -> None:
    engine, same = fake_engine(layout), fake_engine(layout)
    access_of(engine)
    for name, cache in engine.caches.items():
        assert torch.equal(cache, same.caches[name])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("blocks, heads", [(2, 1), (2, 2), (8, 8), (3, 6), (12, 12), (24, 3)])
def test_the_axis_of_blocks_is_found_among_others_of_its_size(
    layout: Layout, blocks: int, heads: int
) -> None:
    engine = fake_engine(layout, blocks=blocks, heads=heads, dim=12)
    access = access_of(engine)
    keys, values = random_kv(access, 12)
    ids = (blocks - 1, 0)
    access.write(ids, 1, keys, values)
    got_keys, got_values = access.read(ids, 1, 13)
    assert torch.equal(got_keys, keys) and torch.equal(got_values, values)


def test_attributes() -> None:
    access = access_of(fake_engine(LAYOUTS["2BNHD"], dtype=torch.bfloat16))
    assert (access.layers, access.kv_heads, access.head_dim) == (3, 3, 6)
    assert (access.dtype, access.device) == (torch.bfloat16, torch.device("cpu"))
    assert access.bytes_per_token == 2 * 3 * 3 * 6 * 2


def test_what_is_read_is_an_ordinary_copy_also_in_inference_mode() -> None:
    engine = fake_engine(LAYOUTS["BHNC"])
    with torch.inference_mode():
        access = access_of(engine)
        keys, _ = access.read((1,), 0, 8)
    keys.add_(1)
    again, _ = access.read((1,), 0, 8)
    assert torch.equal(keys, again + 1)


def test_caches_made_in_inference_mode() -> None:
    with torch.inference_mode():
        engine = fake_engine(LAYOUTS["keys transposed"])
    access = access_of(engine)
    keys, values = random_kv(access, 9)
    access.write(BLOCK_IDS, 3, keys, values)
    got_keys, got_values = access.read(BLOCK_IDS, 3, 12)
    assert torch.equal(got_keys, keys) and torch.equal(got_values, values)
    got_keys.mul_(2)


def test_write_converts_the_dtype() -> None:
    access = access_of(fake_engine(LAYOUTS["BHNC"], dtype=torch.bfloat16))
    keys, values = random_kv(access, 5)
    access.write(BLOCK_IDS, 2, keys.float(), values.float())
    got_keys, got_values = access.read(BLOCK_IDS, 2, 7)
    assert torch.equal(got_keys, keys) and torch.equal(got_values, values)


@pytest.mark.parametrize("span", [(-1, 3), (4, 3), (0, 17), (16, 17)])
def test_positions_that_do_not_exist(span: tuple[int, int]) -> None:
    access = access_of(fake_engine(LAYOUTS["BHNC"]))
    with pytest.raises(InputError, match="do not lie in 2 blocks of 8"):
        access.read((3, 4), *span)


@pytest.mark.parametrize("block", [-1, 11])
def test_blocks_that_do_not_exist(block: int) -> None:
    access = access_of(fake_engine(LAYOUTS["BHNC"]))
    with pytest.raises(InputError, match=f"block {block} does not exist; the cache has 11"):
        access.read((3, block), 0, 9)
    keys, values = random_kv(access, 9)
    with pytest.raises(InputError, match=f"block {block} does not exist"):
        access.write((3, block), 0, keys, values)


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (3, 2, 4, 6), (3, 3, 4, 5), (3, 3, 4)])
def test_write_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    access = access_of(fake_engine(LAYOUTS["BHNC"]))
    keys = torch.zeros(shape)
    with pytest.raises(InputError, match=r"must be \[3 layers, 3 KV heads, tokens, 6\]"):
        access.write(BLOCK_IDS, 0, keys, keys)


# What is refused


def changed(**attributes: Any) -> FakeEngine:
    engine = fake_engine(LAYOUTS["BHNC"])
    for name, value in attributes.items():
        setattr(engine.layers["model.layers.9.self_attn.attn"], name, value)
    return engine


class LatentImpl:
    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        raise AssertionError("must not be called")


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, r"layers\.9.* keeps its KV as fp8_e4m3"),
        ({"kv_cache_dtype": "int8_per_token_head"}, r"as int8_per_token_head.*dtype auto"),
        ({"impl": SimpleNamespace()}, r"layers\.9.*latent attention or a state"),
        ({"impl": LatentImpl()}, r"layers\.9.*latent attention or a state"),
        (
            {"kv_sharing_target_layer_name": "model.layers.8"},
            r"9.* uses the KV of model\.layers\.8",
        ),
        ({"head_size_v": 4}, r"keys of 6 and values of 4 numbers"),
        ({"num_kv_heads": 1}, r"layers' KV differs.*8.* has 3 heads of 6.*9.* has 1 of 6"),
        ({"kv_cache": torch.zeros(22, 3, 4, 12)}, r"other blocks than vLLM registered"),
    ],
)
def test_refused_by_name(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=message):
        access_of(changed(**attributes))


def test_a_cache_of_bytes_is_refused() -> None:
    engine = fake_engine(LAYOUTS["BHNC"])
    engine.caches = {name: cache.to(torch.uint8) for name, cache in engine.caches.items()}
    with pytest.raises(UnsupportedEngineError, match="which kvcmas cannot move"):
        access_of(engine)


def test_a_cache_without_a_layer_and_none_at_all() -> None:
    engine = fake_engine(LAYOUTS["BHNC"])
    del engine.layers["model.layers.8.self_attn.attn"]
    with pytest.raises(UnsupportedEngineError, match=r"layers\.8\.self_attn\.attn, but no such"):
        access_of(engine)
    with pytest.raises(UnsupportedEngineError, match="registered no KV cache"):
        KVAccess({}, {}, 8, 11)


def _one_head_for_all(
    cache: Tensor, block: Tensor, offset: Tensor, keys: Tensor, values: Tensor
) -> None:
    cache[block, :, offset] = torch.cat((keys, values), dim=-1)[:, :1]


def _nothing(cache: Tensor, block: Tensor, offset: Tensor, keys: Tensor, values: Tensor) -> None:
    return


def _next_block(cache: Tensor, block: Tensor, offset: Tensor, keys: Tensor, values: Tensor) -> None:
    both = torch.cat((keys, values), dim=-1)
    cache[block, :, offset] = both
    cache[(block + 1) % len(cache), :, offset] = both


def _rounded(cache: Tensor, block: Tensor, offset: Tensor, keys: Tensor, values: Tensor) -> None:
    cache[block, :, offset] = torch.cat((keys, values), dim=-1).half().float()


@pytest.mark.parametrize(
    "place, message",
    [
        (_one_head_for_all, "not all of them were found"),
        (_nothing, "not all of them were found"),
        (_next_block, "written to other blocks"),
        (_rounded, r"keys that were written to layer model\.layers\.8.* not read back the same"),
    ],
)
def test_a_layout_that_is_not_understood(place: Any, message: str) -> None:
    engine = fake_engine(Layout("BHNC", place))
    before = {name: cache.clone() for name, cache in engine.caches.items()}
    with pytest.raises(UnsupportedEngineError, match=f"is not understood.*{message}"):
        access_of(engine)
    assert all(torch.equal(cache, before[name]) for name, cache in engine.caches.items())


def test_one_layer_that_differs_is_noticed() -> None:
    engine = fake_engine(LAYOUTS["BHNC"])
    other = fake_engine(LAYOUTS["keys transposed"])
    name = "model.layers.9.self_attn.attn"
    engine.layers[name].impl = other.layers[name].impl
    with pytest.raises(UnsupportedEngineError, match=r"layer model\.layers\.9.*not read back"):
        access_of(engine)


def test_other_numbers_of_blocks_are_refused() -> None:
    engine = fake_engine(LAYOUTS["BHNC"])
    with pytest.raises(UnsupportedEngineError, match="no axis of it is one of 13 blocks"):
        KVAccess(engine.caches, engine.layers, 8, 13)
