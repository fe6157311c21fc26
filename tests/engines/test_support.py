"""Which models are refused, by what name, and what is known of those that are served."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from kvcmas.engines.transformers.support import FULL, SLIDING, check_supported, inspect_support
from kvcmas.errors import UnsupportedModelError

from .small_files import small_model


def config_of(model_type: str, **settings: Any) -> PreTrainedConfig:
    config = AutoConfig.for_model(model_type, **settings)
    assert isinstance(config, PreTrainedConfig)
    return config


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("t5", "encoder-decoder"),
        ("bart", "encoder-decoder"),
        ("deepseek_v2", "MLA (kv_lora_rank"),
        ("deepseek_v3", "MLA (kv_lora_rank"),
        ("mamba", "recurrent"),
        ("mamba2", "recurrent"),
        ("rwkv", "recurrent"),
        ("jamba", "linear or recurrent attention"),
        ("bamba", "linear or recurrent attention"),
        ("recurrent_gemma", "recurrent layers"),
        ("qwen3_next", "linear or recurrent attention"),
        ("lfm2", "recurrent or convolution layers"),
        ("falcon_h1", "hybrid layers"),
        ("gpt2", "no rotary positions"),
        ("opt", "no rotary positions"),
        ("bloom", "no rotary positions"),
        ("bert", "no rotary positions"),
        ("llama4_text", "chunked attention"),
        ("smollm3", "some layers have no rotary positions"),
        ("cohere2", "some layers have no rotary positions"),
        ("gemma3n_text", "layers that share the KV of other layers"),
        ("gemma4_text", "head shapes that differ from layer to layer"),
        ("hunyuan_v1_dense", "keys are normalised after their rotation"),
        ("mimo_v2_flash", "values of another size than keys (128 and 192)"),
        ("llava", "images and sound are not supported as yet"),
        ("qwen2_vl", "images and sound are not supported as yet"),
        ("vit", "not a causal language model"),
    ],
)
def test_refused_by_name(model_type: str, reason: str) -> None:
    config = config_of(model_type)
    assert any(reason in found for found in inspect_support(config).reasons)
    with pytest.raises(UnsupportedModelError) as error:
        check_supported(config)
    assert reason in str(error.value)
    assert f"model type {model_type!r}" in str(error.value)


def test_alibi_and_bidirectional_attention_are_refused() -> None:
    assert inspect_support(config_of("falcon")).supported
    assert inspect_support(config_of("falcon", alibi=True)).reasons == (
        "ALiBi positions instead of a rotary embedding",
    )
    both_ways = Gemma3TextConfig(use_bidirectional_attention=True)
    assert "bidirectional attention" in inspect_support(both_ways).reasons[0]


def test_a_setting_that_the_model_never_reads_gives_it_no_rotary_positions() -> None:
    stray = {"rope_type": "default", "rope_theta": 10000.0}
    reasons = inspect_support(config_of("gpt2", rope_parameters=stray)).reasons
    assert reasons == ("no rotary positions (the configuration has no rope_parameters)",)


def test_every_reason_is_named() -> None:
    config = config_of("deepseek_v3", layer_types=["full_attention"] * 60 + ["conv"])
    with pytest.raises(UnsupportedModelError, match=r"MLA .*; convolution layers"):
        check_supported(config, quantized_cache=True)


def test_layers_of_a_kind_that_is_not_known_are_refused() -> None:
    config: Any = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "spiral_attention"]
    with pytest.raises(UnsupportedModelError, match="unknown kind 'spiral_attention'"):
        check_supported(config)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention", "paged|sdpa"])
def test_attention_without_an_explicit_mask_is_refused(implementation: str) -> None:
    with pytest.raises(UnsupportedModelError, match="expected sdpa or eager"):
        check_supported(LlamaConfig(), attention=implementation)


def test_quantised_cache_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="quantised KV cache"):
        check_supported(LlamaConfig(), quantized_cache=True)
    model = small_model()
    model.generation_config = GenerationConfig(cache_implementation="quantized")
    with pytest.raises(UnsupportedModelError, match="quantised KV cache"):
        check_supported(model)


def test_llama_is_described() -> None:
    support = check_supported(small_model())
    assert support.supported
    assert support.tested
    assert (support.model_type, support.architecture) == ("llama", "LlamaForCausalLM")
    assert (support.layers, support.attention_heads, support.kv_heads) == (2, 4, 2)
    assert (support.head_dim, support.window, support.dtype) == (8, 128, "float32")
    assert (support.layer_types, support.sliding_window) == ((FULL, FULL), None)
    assert support.attention == "sdpa"


def test_one_key_head_of_falcon() -> None:
    assert inspect_support(config_of("falcon", multi_query=True)).kv_heads == 1


@pytest.mark.parametrize(
    ("config", "sliding_layers", "window"),
    [
        (LlamaConfig(num_hidden_layers=4), [], None),
        (MistralConfig(num_hidden_layers=3, sliding_window=64), [0, 1, 2], 64),
        (MistralConfig(num_hidden_layers=3, sliding_window=None), [], None),
        (Phi3Config(num_hidden_layers=2, sliding_window=2047), [0, 1], 2047),
        (Qwen2Config(num_hidden_layers=4, sliding_window=64, use_sliding_window=False), [], None),
        (
            Qwen2Config(
                num_hidden_layers=4,
                sliding_window=64,
                use_sliding_window=True,
                max_window_layers=3,
            ),
            [3],
            64,
        ),
        (Qwen3Config(num_hidden_layers=2), [], None),
        (Gemma3TextConfig(num_hidden_layers=6, sliding_window=32), [0, 1, 2, 3, 4], 32),
    ],
)
def test_sliding_layers(
    config: PreTrainedConfig, sliding_layers: list[int], window: int | None
) -> None:
    support = check_supported(config)
    assert len(support.layer_types) == support.layers
    found = [layer for layer, kind in enumerate(support.layer_types) if kind == SLIDING]
    assert (found, support.sliding_window) == (sliding_layers, window)


def test_a_model_with_eyes_is_served_for_text_when_asked() -> None:
    config = config_of("gemma3")
    with pytest.raises(UnsupportedModelError, match="text_only=True uses it with text alone"):
        check_supported(config)
    support = check_supported(config, text_only=True)
    assert support.multimodal
    assert support.layers == config.get_text_config().num_hidden_layers
    assert SLIDING in support.layer_types


def test_families_that_only_the_doctor_has_seen_are_not_called_tested() -> None:
    assert not inspect_support(config_of("olmo2")).tested
    assert inspect_support(config_of("olmo2")).supported
