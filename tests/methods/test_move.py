"""Moved donors against recomputation at the new position."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcmas.core.rope import Rope
from kvcmas.core.segment import SegmentKV
from kvcmas.errors import InputError
from kvcmas.methods.move import fill_moved

from ..engines.tiny import random_ids, tiny_model
from .team import model_kv

TOKENS = 20
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": YARN,
    "llama3": LLAMA3,
}
FAMILIES = ["llama", "qwen2", "qwen3", "gemma3", "mistral", *SCALED]


def model_for(kind: str, device: torch.device) -> Any:
    if kind not in SCALED:
        return tiny_model(kind, device)
    rope = {"rope_theta": 10000.0, **SCALED[kind]}
    return tiny_model("llama", device, rope_parameters=rope)


def donor_of(model: Any, ids: list[int]) -> SegmentKV:
    keys, values = model_kv(model, ids)
    positions = torch.arange(len(ids), device=keys.device)
    return SegmentKV(keys, values, torch.tensor(ids, device=keys.device), positions[None])


def empty(donor: SegmentKV, start: int, stop: int, first_position: int) -> SegmentKV:
    """Buffers for the donor's tokens, strided as an engine's are, at other positions."""
    part = donor.slice(start, stop)
    shape = (*part.keys.shape[:2], len(part) + 7, part.keys.shape[3])
    keys = torch.full(shape, torch.nan, device=part.keys.device)[:, :, 3 : 3 + len(part)]
    positions = torch.arange(len(part), device=part.keys.device)[None] + first_position
    return SegmentKV(keys, keys.clone(), part.token_ids, positions)


@pytest.mark.parametrize("shift", [1, 100, 470])
@pytest.mark.parametrize("kind", FAMILIES)
def test_equals_recomputation(kind: str, shift: int, device: torch.device) -> None:
    """Attention depends on distances only, so the same tokens further on have the same values."""
    model = model_for(kind, device)
    ids = random_ids(TOKENS)
    donor = donor_of(model, ids)
    out = empty(donor, 5, TOKENS, shift + 5)
    fill_moved(Rope.from_config(model.config), donor, 5, out)
    keys, values = model_kv(model, ids, shift)
    assert (out.keys - keys[:, :, 5:]).abs().max() <= 1e-4 * keys.abs().max()
    assert (out.values - values[:, :, 5:]).abs().max() <= 1e-4 * values.abs().max()


def test_unmoved_is_bit_identical(device: torch.device) -> None:
    model = tiny_model("llama", device)
    donor = donor_of(model, random_ids(TOKENS))
    out = empty(donor, 4, 12, 4)
    fill_moved(Rope.from_config(model.config), donor, 4, out)
    assert torch.equal(out.keys, donor.keys[:, :, 4:12])
    assert torch.equal(out.values, donor.values[:, :, 4:12])


def test_shifts_that_differ_between_tokens(device: torch.device) -> None:
    model = tiny_model("llama", device)
    rope = Rope.from_config(model.config)
    donor = donor_of(model, random_ids(TOKENS))
    out = empty(donor, 0, TOKENS, 0)
    out.positions[0, 10:] += 33
    fill_moved(rope, donor, 0, out)
    whole = empty(donor, 0, TOKENS, 33)
    fill_moved(rope, donor, 0, whole)
    assert torch.equal(out.keys[:, :, :10], donor.keys[:, :, :10])
    torch.testing.assert_close(out.keys[:, :, 10:], whole.keys[:, :, 10:], rtol=0, atol=1e-6)


def test_beyond_the_donor(device: torch.device) -> None:
    donor = donor_of(tiny_model("llama", device), random_ids(TOKENS))
    rope = Rope.from_config(tiny_model("llama", device).config)
    with pytest.raises(InputError, match=r"\[15, 25\)"):
        fill_moved(rope, donor, 15, empty(donor, 0, 10, 0))
