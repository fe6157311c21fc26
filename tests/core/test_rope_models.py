"""Moved keys against keys that tiny transformers models compute at the target position.

The weights behind attention are zero, so that hidden states, and with them the keys before
rotation, are the same at every position; what differs is the rotation alone, in every layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel

from kvcmas.core.rope import Rope

TOKENS = 10
# Old position of the first token, and the shift.
MOVES = [(200, 1), (200, 1000), (200, 20000), (3000, 1), (3000, 20000), (3000, -2500), (900, -1)]

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32768,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def scaled(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SECTIONS = {"mrope_section": [2, 3, 3]}
PARTIAL_SECTIONS = {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
TWO_TABLES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}

DROP: Any = object()

# name: model type, changes to SIZES, the table of each layer (None: no rotation)
ONE: list[int | None] = [0] * 6
LAST_OF_SIX: list[int | None] = [0, 0, 0, 0, 0, 1]
NOT_THE_FOURTH: list[int | None] = [0, 0, 0, None, 0, 0]
KINDS: dict[str, tuple[str, dict[str, Any], list[int | None]]] = {
    "llama": ("llama", {}, ONE),
    "linear": ("llama", scaled("linear", factor=4.0), ONE),
    "llama3": (
        "llama",
        scaled("llama3", original_max_position_embeddings=1024, **LLAMA3),
        ONE,
    ),
    "yarn": ("llama", scaled("yarn", factor=4.0, original_max_position_embeddings=8192), ONE),
    "yarn with all options": (
        "qwen2",
        scaled(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=8192,
            attention_factor=1.3,
            beta_fast=20,
            beta_slow=2,
            truncate=False,
        ),
        ONE,
    ),
    "qwen2": ("qwen2", {"head_dim": DROP}, ONE),
    "qwen3": ("qwen3", {}, ONE),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, ONE),
    "nanochat": ("nanochat", {}, ONE),
    "gemma3": ("gemma3_text", {"sliding_window": 4, "rope_parameters": TWO_TABLES}, LAST_OF_SIX),
    "gemma4": (
        "gemma4_text",
        {"global_head_dim": 32, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8},
        LAST_OF_SIX,
    ),
    "phi": ("phi", {"head_dim": DROP}, ONE),
    "stablelm": ("stablelm", {"head_dim": DROP}, ONE),
    "gpt_neox": ("gpt_neox", {"head_dim": DROP, "num_key_value_heads": DROP}, ONE),
    "cohere": ("cohere", {"head_dim": DROP}, ONE),
    "glm": ("glm", {}, ONE),
    "gptj": (
        "gptj",
        {
            "num_key_value_heads": DROP,
            "head_dim": DROP,
            "intermediate_size": DROP,
            "rotary_dim": 8,
        },
        ONE,
    ),
    "cohere2": ("cohere2", {}, NOT_THE_FOURTH),
    "smollm3": ("smollm3", {"head_dim": DROP}, NOT_THE_FOURTH),
    "llama4": ("llama4_text", {"num_local_experts": 2}, NOT_THE_FOURTH),
    "exaone4": ("exaone4", {"sliding_window": 4}, NOT_THE_FOURTH),
    "exaone4 without window": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 6},
        ONE,
    ),
    "qwen2_vl": ("qwen2_vl_text", {"head_dim": DROP, **scaled("default", **SECTIONS)}, ONE),
    "qwen3_vl": ("qwen3_vl_text", scaled("default", **SECTIONS), ONE),
    "glm4v": ("glm4v_text", {"head_dim": DROP, **scaled("default", **PARTIAL_SECTIONS)}, ONE),
}


def build(name: str, *, silent_attention: bool = True) -> tuple[PreTrainedModel, Rope]:
    model_type, changes, _ = KINDS[name]
    sizes = {key: value for key, value in (SIZES | changes).items() if value is not DROP}
    torch.manual_seed(0)
    model = AutoModel.from_config(CONFIG_MAPPING[model_type](**sizes)).eval()
    behind_attention = ("o_proj", "dense", "out_proj")
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        if silent_attention and last in behind_attention and hasattr(module, "weight"):
            for parameter in module.parameters():
                parameter.data.zero_()
        elif "norm" in last:
            for parameter in module.parameters():
                parameter.data.add_(torch.rand_like(parameter))
    return model, Rope.from_config(model.config)


def keys_at(model: PreTrainedModel, positions: Tensor) -> list[Tensor]:
    """Per layer `[1, kv_heads, tokens, head_dim]`; a window may leave fewer tokens."""
    ids = torch.arange(3, 3 + TOKENS)[None]
    text = positions[0][None] if len(positions) == 1 else positions[:, None]
    with torch.no_grad():
        output = model(input_ids=ids, position_ids=text, use_cache=True)
    return [layer.keys for layer in output.past_key_values.layers]


def positions_of(rope: Rope, start: int) -> Tensor:
    return (start + torch.arange(TOKENS)).repeat(rope.axes, 1)


def worst(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest difference between two keys, relative to the largest norm of a key."""
    return max(float((a - b).norm(dim=-1).max() / b.norm(dim=-1).max()) for a, b in pairs)


@pytest.mark.parametrize("name", KINDS)
def test_moved_keys_equal_keys_computed_at_the_target(name: str) -> None:
    model, rope = build(name)
    assert list(rope.layers) == KINDS[name][2]
    for start, shift in MOVES:
        if name == "gptj" and start + shift > 2000:
            continue
        old = positions_of(rope, start)
        before, after = keys_at(model, old), keys_at(model, old + shift)
        unmoved = worst((a, b) for a, b in zip(before, after, strict=True))
        assert unmoved > 0.1
        moved = [
            rope.move(keys, shift, positions=old[:, -keys.shape[2] :], layers=[layer])
            for layer, keys in enumerate(before)
        ]
        assert worst(zip(moved, after, strict=True)) < 1e-6
        # Without the old positions: exact angles, off by the model's own rounding.
        exact = [rope.move(keys, shift, layers=[layer]) for layer, keys in enumerate(before)]
        assert worst(zip(exact, after, strict=True)) < 1e-6 + 2.0**-23 * (start + abs(shift))


@pytest.mark.parametrize("name", ["llama", "yarn", "glm", "gemma3", "qwen3_vl"])
def test_unrotated_keys_equal_keys_computed_at_position_zero(name: str) -> None:
    model, rope = build(name)
    old = positions_of(rope, 3000)
    start = keys_at(model, torch.zeros_like(old))
    for layer, keys in enumerate(keys_at(model, old)):
        places = old[:, -keys.shape[2] :]
        bare = rope.unrotate(keys, places, layers=[layer])
        assert worst([(bare, start[layer])]) < 1e-6
        assert worst([(rope.rotate(bare, places, layers=[layer]), keys)]) < 1e-6


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v"])
def test_each_axis_moves_its_own_frequencies(name: str) -> None:
    model, rope = build(name)
    assert rope.axes == 3
    # Text, an image of 2 x 3 patches at one time, text.
    height, width = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
    image = 2 + torch.stack([torch.zeros_like(height), height, width])
    old = torch.cat([torch.arange(2).repeat(3, 1), image, torch.arange(5, 7).repeat(3, 1)], dim=1)
    old = old + 200
    every_token = torch.arange(3 * TOKENS).reshape(3, TOKENS) * 37
    for shift in (torch.tensor([500, -100, 3]), every_token, torch.tensor([9])):
        new = old + (shift[:, None] if shift.ndim == 1 else shift)
        before, after = torch.cat(keys_at(model, old)), torch.cat(keys_at(model, new))
        assert worst([(rope.move(before, shift, positions=old), after)]) < 1e-6
        assert worst([(rope.move(before, shift), after)]) < 2e-4


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "cohere", "smollm3"])
@pytest.mark.parametrize("start", [200, 3000])
def test_the_same_prompt_elsewhere_has_the_moved_keys(name: str, start: int) -> None:
    # Attention at work: scores depend on distances only, so all layers agree, but for the
    # rounding of the model's angles at other positions.
    model, rope = build(name, silent_attention=False)
    old = positions_of(rope, start)
    before, after = keys_at(model, old), keys_at(model, old + 1000)
    moved = [
        rope.move(keys, 1000, positions=old[:, -keys.shape[2] :], layers=[layer])
        for layer, keys in enumerate(before)
    ]
    assert worst(zip(moved, after, strict=True)) < 1e-4


def test_gemma3_keys_moved_by_the_other_table_are_wrong() -> None:
    model, rope = build("gemma3")
    one_table = Rope(rope.tables, (0,) * len(rope.layers))
    for start in (200, 3000):
        old = positions_of(rope, start)
        before, after = keys_at(model, old)[-1], keys_at(model, old + 1000)[-1]
        moved = one_table.move(before, 1000, positions=old, layers=[5])
        assert worst([(moved, after)]) > 0.3


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)]
)
@pytest.mark.parametrize("name", ["llama", "cohere"])
def test_half_precision_keys_are_rounded_once(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    # Half a unit in the last place from storing the old key, half from storing the new one.
    model, rope = build(name)
    old = positions_of(rope, 200)
    before, after = torch.cat(keys_at(model, old)), torch.cat(keys_at(model, old + 1000))
    moved = rope.move(before.to(dtype), 1000, positions=old)
    assert moved.dtype == dtype
    assert worst([(moved.float(), after)]) < tolerance


def test_on_the_device(device: torch.device) -> None:
    for name in ("llama", "cohere", "gemma3", "qwen3_vl"):
        model, rope = build(name)
        old = positions_of(rope, 3000)
        before = [keys[:, :, -3:] for keys in keys_at(model, old)]
        after = [keys[:, :, -3:] for keys in keys_at(model, old + 1000)]
        for positions in (old[:, -3:], old[:, -3:].to(device)):
            moved = rope.move(torch.cat(before).to(device), 1000, positions=positions)
            assert moved.device.type == device.type
            assert worst([(moved.cpu(), torch.cat(after))]) < 2e-6
