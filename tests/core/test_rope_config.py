"""What `Rope.from_config` reads, and what it refuses by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, Gemma3Config, LlamaConfig, Qwen2VLConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvcmas.core.rope import Layout, Rope
from kvcmas.core.rope.families import FAMILIES, REFUSED
from kvcmas.errors import ConfigError, UnsupportedRopeError

LONGROPE = {
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 512,
    "factor": 4.0,
}


def config(model_type: str = "llama", **changes: Any) -> SimpleNamespace:
    """A configuration as plain attributes, as core sees it."""
    values: dict[str, Any] = {
        "model_type": model_type,
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return SimpleNamespace(**(values | changes))


def rope_type(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **values}


def test_frequencies_of_the_default_type() -> None:
    rope = Rope.from_config(config())
    (table,) = rope.tables
    expected = [10000.0 ** (-pair / 8) for pair in range(8)]
    assert table.frequencies == pytest.approx(expected, rel=1e-6)
    assert (table.layout, table.rotary_dim, rope.axes) == (Layout.NEOX, 16, 1)
    assert rope.layers == (0, 0, 0, 0)


def test_linear_scaling_divides_frequencies() -> None:
    plain = Rope.from_config(config()).tables[0].frequencies
    scaled = Rope.from_config(config(rope_parameters=rope_type("linear", factor=4.0)))
    assert scaled.tables[0].frequencies == pytest.approx([f / 4 for f in plain])


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    values = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters = rope_type("llama3", factor=8.0, original_max_position_embeddings=512, **values)
    plain = Rope.from_config(config()).tables[0].frequencies
    scaled = Rope.from_config(config(rope_parameters=parameters)).tables[0].frequencies
    wavelengths = [6.283185 / f for f in plain]
    for before, after, wavelength in zip(plain, scaled, wavelengths, strict=True):
        if wavelength < 512 / 4:
            assert after == before
        elif wavelength > 512:
            assert after == pytest.approx(before / 8)
        else:
            assert before / 8 < after < before


def test_proportional_leaves_the_last_pairs_unrotated() -> None:
    parameters = rope_type("proportional", partial_rotary_factor=0.25)
    (table,) = Rope.from_config(config("gemma4_text", rope_parameters=parameters)).tables
    assert table.rotary_dim == 16
    assert table.frequencies[2:] == (0.0,) * 6
    assert table.frequencies[1] == pytest.approx(10000.0 ** (-1 / 8))


def test_partial_rotation_counts_channels() -> None:
    parameters = rope_type("default", partial_rotary_factor=0.25)
    for name in ("gpt_neox", "phi", "stablelm", "glm"):
        (table,) = Rope.from_config(config(name, rope_parameters=parameters)).tables
        assert table.rotary_dim == 4
    with pytest.raises(UnsupportedRopeError, match=r"partial_rotary_factor=0\.25"):
        Rope.from_config(config("llama", rope_parameters=parameters))


def test_a_negative_angle_is_a_negative_frequency() -> None:
    plain, nanochat = Rope.from_config(config()), Rope.from_config(config("nanochat"))
    assert nanochat.tables[0].frequencies == tuple(-f for f in plain.tables[0].frequencies)


def test_axes_by_section_and_by_stride() -> None:
    parameters = rope_type("default", mrope_section=[4, 2, 2])
    sections = Rope.from_config(config("qwen2_vl_text", rope_parameters=parameters)).tables[0]
    strided = Rope.from_config(config("qwen3_vl_text", rope_parameters=parameters)).tables[0]
    assert sections.axes == (0, 0, 0, 0, 1, 1, 2, 2)
    assert strided.axes == (0, 1, 2, 0, 1, 2, 0, 0)
    with pytest.raises(ConfigError, match="add up to 8"):
        wrong = rope_type("default", mrope_section=[4, 4, 4])
        Rope.from_config(config("qwen2_vl_text", rope_parameters=wrong))
    with pytest.raises(UnsupportedRopeError, match="mrope_section"):
        Rope.from_config(config("qwen2", rope_parameters=parameters))


def test_gemma3_has_a_table_for_each_kind_of_layer() -> None:
    full = Gemma3Config(text_config={"num_hidden_layers": 12})
    rope = Rope.from_config(full)
    assert rope == Rope.from_config(full.text_config)
    assert rope.layers == (0, 0, 0, 0, 0, 1) * 2
    local, wide = rope.tables
    assert local.frequencies[1] == pytest.approx(10000.0 ** (-1 / 128))
    assert wide.frequencies[1] == pytest.approx(1000000.0 ** (-1 / 128))


def test_a_vision_language_configuration_is_read_through_its_text_part() -> None:
    rope = Rope.from_config(Qwen2VLConfig())
    assert rope.axes == 3


def test_equal_configurations_are_equal_and_others_are_not() -> None:
    one = Rope.from_config(config())
    assert one == Rope.from_config(config("mistral"))
    assert hash(one) == hash(Rope.from_config(config("mistral")))
    other = Rope.from_config(config(rope_parameters=rope_type("default") | {"rope_theta": 5e5}))
    assert one != other
    assert one != Rope.from_config(config("cohere"))


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_frequencies_that_depend_on_the_length_are_refused(kind: str) -> None:
    parameters = rope_type(kind, **LONGROPE)
    with pytest.raises(UnsupportedRopeError, match=f"{kind}.*length"):
        Rope.from_config(config("phi3", rope_parameters=parameters))


def test_one_layer_kind_that_depends_on_the_length_is_enough_to_refuse() -> None:
    parameters = {
        "sliding_attention": rope_type("default"),
        "full_attention": rope_type("dynamic", factor=2.0),
    }
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    with pytest.raises(UnsupportedRopeError, match="dynamic"):
        Rope.from_config(config("gemma3_text", rope_parameters=parameters, layer_types=kinds))


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "mpt", "t5", "deepseek_v2", "falcon"])
def test_models_without_movable_keys_are_refused(name: str) -> None:
    changes: dict[str, Any] = {"alibi": True} if name == "falcon" else {}
    with pytest.raises(UnsupportedRopeError, match=name):
        Rope.from_config(CONFIG_MAPPING[name](**changes))


def test_latent_attention_does_not_pass_under_another_name() -> None:
    with pytest.raises(UnsupportedRopeError, match="MLA"):
        Rope.from_config(config("new", kv_lora_rank=512), model_type="llama")


def test_an_unknown_model_type_is_refused_unless_it_is_named() -> None:
    with pytest.raises(UnsupportedRopeError, match=r"'llamas'.*'llama'\?.*model_type"):
        Rope.from_config(config("llamas"))
    assert Rope.from_config(config("llamas"), model_type="llama") == Rope.from_config(config())
    with pytest.raises(UnsupportedRopeError, match="not known"):
        Rope.from_config(SimpleNamespace(num_hidden_layers=2))


def test_no_type_is_both_known_and_refused() -> None:
    assert not FAMILIES.keys() & REFUSED.keys()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rope_parameters": None}, UnsupportedRopeError, "no rope_parameters"),
        ({"rope_parameters": {"rope_type": "default"}}, ConfigError, "'rope_theta'"),
        ({"rope_parameters": rope_type("linear")}, ConfigError, "'factor', got None"),
        ({"rope_parameters": rope_type("linear", factor="4")}, ConfigError, "'factor', got '4'"),
        ({"rope_parameters": rope_type("axial")}, UnsupportedRopeError, "'axial'.*not known"),
        ({"rope_parameters": rope_type("mrope")}, UnsupportedRopeError, "'mrope'.*not known"),
    ],
)
def test_incomplete_configurations(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Rope.from_config(config(**changes))


def test_a_model_whose_layers_never_rotate_is_refused() -> None:
    kinds = ["full_attention"] * 4
    with pytest.raises(UnsupportedRopeError, match="no layer"):
        Rope.from_config(config("cohere2", layer_types=kinds))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_frequencies_equal_those_of_the_model_bit_for_bit(kind: str) -> None:
    # A unit in the last place is 1e-3 of a radian at position 20000.
    extra: dict[str, Any] = {
        "linear": {"factor": 3.0},
        "yarn": {"factor": 3.0, "original_max_position_embeddings": 700},
        "llama3": {
            "factor": 3.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 700,
        },
    }[kind]
    theirs = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=2100,
        rope_parameters=rope_type(kind, **extra),
    )
    ours = Rope.from_config(theirs).tables[0].frequencies
    model_frequencies = LlamaRotaryEmbedding(theirs).inv_freq
    assert torch.equal(torch.tensor(ours), model_frequencies)
