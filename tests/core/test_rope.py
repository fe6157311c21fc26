"""Properties of moves: they compose, keep norms, and leave untouched what must stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcmas.core.rope import Layout, Rope, RopeTable
from kvcmas.errors import InputError

HEADS, TOKENS, DIM = 2, 5, 12
PAIRS = 4
FREQUENCIES = tuple(torch.tensor([1.0, 0.7, 0.03, -0.002]).tolist())
NEOX = RopeTable(FREQUENCIES, (0,) * PAIRS, Layout.NEOX)
INTERLEAVED = RopeTable(FREQUENCIES, (0,) * PAIRS, Layout.INTERLEAVED)
AXES = RopeTable(FREQUENCIES, (0, 1, 2, 0), Layout.NEOX)

# Layers: partial neox, no rotation, partial interleaved twice.
MIXED = Rope((NEOX, INTERLEAVED), (0, None, 1, 1))

shifts = st.integers(-20000, 20000)
seeds = st.integers(0, 2**31)
quick = settings(max_examples=40, deadline=None)


def random_keys(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, HEADS, TOKENS, DIM, generator=generator).to(dtype)


def bits(keys: Tensor) -> Tensor:
    return keys.contiguous().view(torch.int16 if keys.element_size() == 2 else torch.int32)


@quick
@given(seeds, shifts, shifts)
def test_moves_add_up(seed: int, first: int, second: int) -> None:
    keys = random_keys(seed)
    twice = MIXED.move(MIXED.move(keys, first), second)
    torch.testing.assert_close(twice, MIXED.move(keys, first + second), atol=5e-6, rtol=0)


@quick
@given(seeds, shifts)
def test_a_move_keeps_the_norm_of_every_key(seed: int, shift: int) -> None:
    keys = random_keys(seed)
    moved = MIXED.move(keys, shift)
    torch.testing.assert_close(moved.norm(dim=-1), keys.norm(dim=-1), atol=1e-5, rtol=0)


@quick
@given(seeds, st.lists(st.integers(0, 30000), min_size=TOKENS, max_size=TOKENS), shifts)
def test_rotations_to_a_position_agree_with_moves(seed: int, places: list[int], by: int) -> None:
    bare, positions = random_keys(seed), torch.tensor([places])
    keys = MIXED.rotate(bare, positions)
    torch.testing.assert_close(MIXED.unrotate(keys, positions), bare, atol=5e-6, rtol=0)
    moved = MIXED.move(keys, by, positions=positions)
    torch.testing.assert_close(moved, MIXED.rotate(bare, positions + by), atol=5e-6, rtol=0)


@quick
@given(seeds, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_shift_zero_is_bit_identical(seed: int, dtype: torch.dtype) -> None:
    keys = random_keys(seed, dtype)
    keys[0, 0, 0, :3] = torch.tensor([-0.0, torch.inf, torch.nan])
    zeros = torch.zeros(1, TOKENS, dtype=torch.int64)
    for moved in (
        MIXED.move(keys, 0),
        MIXED.move(keys, zeros),
        MIXED.move(keys, zeros[:, 0], positions=zeros + 7),
        MIXED.unrotate(keys, zeros),
    ):
        assert torch.equal(bits(moved), bits(keys))
        assert moved.data_ptr() != keys.data_ptr()


def test_one_pair_by_hand() -> None:
    keys = torch.arange(1.0, 7.0).reshape(1, 1, 1, 6)
    half_turn = torch.pi / 2
    neox = Rope((RopeTable((half_turn, 0.0), (0, 0), Layout.NEOX),), (0,))
    # Channels 0 and 2 turn by 90 degrees, 1 and 3 by nothing, 4 and 5 do not take part.
    expected = torch.tensor([-3.0, 2, 1, 4, 5, 6]).reshape(1, 1, 1, 6)
    torch.testing.assert_close(neox.move(keys, 1), expected, atol=1e-6, rtol=0)
    pairs = Rope((RopeTable((half_turn, 0.0), (0, 0), Layout.INTERLEAVED),), (0,))
    expected = torch.tensor([-2.0, 1, 3, 4, 5, 6]).reshape(1, 1, 1, 6)
    torch.testing.assert_close(pairs.move(keys, 1), expected, atol=1e-6, rtol=0)


def test_layers_and_channels_without_rotation_stay_bit_identical() -> None:
    keys = random_keys(0)
    moved = MIXED.move(keys, 12345)
    assert torch.equal(bits(moved[1]), bits(keys[1]))
    assert torch.equal(bits(moved[..., 2 * PAIRS :]), bits(keys[..., 2 * PAIRS :]))
    assert not torch.equal(moved[0], keys[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("tokens", [TOKENS, 9000])
def test_every_way_to_write_gives_the_same_keys(dtype: torch.dtype, tokens: int) -> None:
    # 9000 tokens of 4 heads are cut into blocks; 5 of 2 are not.
    heads = HEADS if tokens == TOKENS else 4
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(4, heads, tokens, DIM, generator=generator).to(dtype)
    original = keys.clone()
    positions = torch.arange(tokens)[None] + 40
    moved = MIXED.move(keys, -3, positions=positions)
    out = torch.full_like(keys, torch.nan)
    assert MIXED.move(keys, -3, positions=positions, out=out) is out
    assert torch.equal(out, moved)
    # A view into a larger buffer, tokens first in memory, as an engine's cache may have it.
    buffer = torch.zeros(4, tokens + 3, heads, DIM, dtype=dtype).transpose(1, 2)
    MIXED.move(keys, -3, positions=positions, out=buffer[:, :, 2:-1])
    assert torch.equal(buffer[:, :, 2:-1], moved)
    assert not buffer[:, :, :2].any()
    rotation = MIXED.rotation(-3, positions=positions)
    for layer in range(4):
        one = rotation.apply(keys[layer : layer + 1], layers=[layer])
        assert torch.equal(one[0], moved[layer])
    some = keys[[2, 0]]
    assert torch.equal(rotation.apply(some, layers=[2, 0]), moved[[2, 0]])
    assert torch.equal(keys, original)
    assert MIXED.move(keys, -3, positions=positions, out=keys) is keys
    assert torch.equal(keys, moved)


def test_float64_keys_are_computed_in_float64() -> None:
    keys = random_keys(3, torch.float64)
    there_and_back = MIXED.move(MIXED.move(keys, 77), -77)
    assert (there_and_back - keys).abs().max() < 5e-7
    assert MIXED.move(keys, 77).dtype == torch.float64


def test_each_token_may_move_by_its_own_shift() -> None:
    keys = random_keys(4)
    by = torch.tensor([[5, 0, -7, 300, 20000]])
    moved = MIXED.move(keys, by)
    for token, shift in enumerate(by[0].tolist()):
        alone = MIXED.move(keys[:, :, token : token + 1], shift)
        torch.testing.assert_close(moved[:, :, token : token + 1], alone, atol=1e-6, rtol=0)


def test_axes_move_their_own_pairs() -> None:
    rope = Rope((AXES,), (0,) * 4)
    keys = random_keys(5)
    moved = rope.move(keys, torch.tensor([0, 9, 0]))
    changed = (moved != keys).any(dim=0).any(dim=0).any(dim=0)
    assert changed.nonzero().flatten().tolist() == [1, 1 + PAIRS]
    # One axis stands for all three.
    text = torch.arange(TOKENS)[None]
    assert torch.equal(rope.unrotate(keys, text), rope.unrotate(keys, text.repeat(3, 1)))


def test_a_zero_dimensional_shift_is_a_number() -> None:
    keys = random_keys(6)
    assert torch.equal(MIXED.move(keys, torch.tensor(3)), MIXED.move(keys, 3))


def test_no_tokens_are_no_work() -> None:
    keys = random_keys(7)[:, :, :0]
    empty = torch.zeros(1, 0, dtype=torch.int64)
    assert MIXED.move(keys, 3).shape == keys.shape
    assert MIXED.unrotate(keys, empty).shape == keys.shape


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_keys_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match="dequantise"):
        MIXED.move(random_keys(0).to(dtype), 3)


def test_shapes_that_do_not_fit_are_refused() -> None:
    keys = random_keys(0)
    places = torch.arange(TOKENS)[None]
    with pytest.raises(InputError, match="3 layers"):
        MIXED.move(keys, 1, layers=[0, 1, 2])
    with pytest.raises(InputError, match="4 layers"):
        MIXED.move(keys[0], 1)
    with pytest.raises(InputError, match=r"layers \[7\]"):
        MIXED.move(keys[:1], 1, layers=[7])
    with pytest.raises(InputError, match="5 keys, but angles for 4 tokens"):
        MIXED.move(keys, 1, positions=places[:, :4])
    with pytest.raises(InputError, match="8 channels rotate, keys have 6"):
        MIXED.move(keys[..., :6], 1)
    with pytest.raises(InputError, match="must be integers"):
        MIXED.unrotate(keys, places.float())
    with pytest.raises(InputError, match="1 axes"):
        MIXED.unrotate(keys, places.repeat(3, 1))
    with pytest.raises(InputError, match=r"\[axes, tokens\]"):
        MIXED.unrotate(keys, places[0])
    with pytest.raises(InputError, match="out is"):
        MIXED.move(keys, 1, out=keys.double())
