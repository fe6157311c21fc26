"""Which models can share KV: read from the configuration, before any weight is loaded.

Shared KV must be movable to another position and usable by another prompt. That holds for causal
models whose layers keep one key and one value per token and head, and whose keys carry a rotary
position. Everything else is refused by name. Whether the rotary embedding itself can be moved is
decided where moves are made (`kvcmas.core.rope`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvcmas.errors import UnsupportedModelError

FULL = "full_attention"
SLIDING = "sliding_attention"
ATTENTION = ("sdpa", "eager")

# Families whose reused KV this project's own tests compare with recomputation.
TESTED = frozenset({"llama", "qwen2", "qwen3", "gemma3_text"})

_LAYER_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "chunked_attention": "chunked attention (a token sees only its own chunk)",
        "linear_attention": "linear or recurrent attention (a state instead of KV per token)",
        "recurrent": "recurrent layers (a state instead of KV per token)",
        "mamba": "recurrent layers (a state instead of KV per token)",
        "conv": "convolution layers (a state instead of KV per token)",
        "hybrid": "hybrid layers (attention next to a recurrent state)",
        "hybrid_sliding": "hybrid layers (attention next to a recurrent state)",
        "indexed_attention": "indexed sparse attention (a second cache of index keys)",
        "minimax_m3_sparse": "indexed sparse attention (a second cache of index keys)",
        "compressed_sparse_attention": "compressed attention (one entry for several tokens)",
        "heavily_compressed_attention": "compressed attention (one entry for several tokens)",
    }
)
# Settings that only models with recurrent or convolution layers have.
_RECURRENT_SETTINGS = (
    *("mamba_d_state", "mamba_num_heads", "ssm_state_size", "state_size", "conv_L_cache"),
    *("conv1d_width", "lru_width", "linear_conv_kernel_dim", "chunkwise_kernel"),
)
_RECURRENT_TYPES = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "zaya"})
# Some layers of these rotate nothing, which their configuration does not say layer by layer.
_UNROTATED_TYPES = frozenset(
    {"afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "granite_swa", "granitemoe_swa"}
)
# These scale each dimension of a key after its rotation, so the cached key is not a rotated key.
_NORM_AFTER_ROPE_TYPES = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe"})
_ENCODER_SETTINGS = (
    *("vision_config", "audio_config", "vq_config", "audio_encoder_config", "patch_size"),
)


@dataclass(frozen=True, slots=True)
class Support:
    """What a model's attention looks like, and why it cannot be served (if it cannot).

    layer_types: `"full_attention"` or `"sliding_attention"` for each layer; other names only in
        models that are refused. Empty when the configuration does not tell.
    window: longest prompt with its answer, in tokens (`max_position_embeddings`); 0 if unknown.
    sliding_window: tokens that a sliding layer sees, itself included; `None` without such layers.
    dtype: of the weights, for example `"float32"`; empty if the configuration does not tell.
    attention: the attention implementation, `"sdpa"` or `"eager"`; `None` if not chosen yet.
    multimodal: the model also takes images or sound (here it is used with text alone).
    tested: the family belongs to those that the project's own tests cover.
    reasons: why the model is refused; empty if it is supported.
    """

    model_type: str
    architecture: str
    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    window: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    dtype: str
    attention: str | None
    multimodal: bool
    tested: bool
    reasons: tuple[str, ...] = ()

    @property
    def supported(self) -> bool:
        """Nothing speaks against sharing this model's KV."""
        return not self.reasons


def inspect_support(
    model: PreTrainedModel | PreTrainedConfig,
    *,
    text_only: bool = False,
    attention: str | None = None,
    quantized_cache: bool = False,
) -> Support:
    """Describe a model; `reasons` says what speaks against it. Raises nothing.

    text_only: accept a model that also takes images or sound, to be used with text alone.
    attention: the attention implementation that will be used; `None` reads the model's own.
    quantized_cache: a quantised KV cache is asked for (it cannot be rotated as stored).
    """
    config = model.config if isinstance(model, PreTrainedModel) else model
    text = config.get_text_config(decoder=True)
    attention = attention or getattr(config, "_attn_implementation", None)
    if isinstance(model, PreTrainedModel):
        generation = getattr(model, "generation_config", None)
        quantized_cache |= getattr(generation, "cache_implementation", None) == "quantized"
    multimodal = any(_get(config, name) is not None for name in _ENCODER_SETTINGS)
    reasons = list(_model_reasons(config, text, multimodal and not text_only))
    if attention is not None and attention not in ATTENTION:
        reasons.append(
            f"attention implementation {attention!r} (expected {' or '.join(ATTENTION)}: a plan "
            "with holes needs an explicit mask)"
        )
    if quantized_cache:
        reasons.append("a quantised KV cache (its keys cannot be rotated as stored)")
    names = config.architectures or [type(config).__name__]
    architecture = type(model).__name__ if isinstance(model, PreTrainedModel) else names[0]
    dtype = model.dtype if isinstance(model, PreTrainedModel) else config.dtype or text.dtype
    heads = _int(text, "num_attention_heads")
    layer_types = _layer_types(text)
    return Support(
        model_type=config.model_type,
        architecture=architecture,
        layers=_int(text, "num_hidden_layers"),
        attention_heads=heads,
        kv_heads=_kv_heads(text, heads),
        head_dim=_int(text, "head_dim") or (_int(text, "hidden_size") // heads if heads else 0),
        window=_int(text, "max_position_embeddings"),
        layer_types=layer_types,
        sliding_window=_int(text, "sliding_window") if SLIDING in layer_types else None,
        dtype=str(dtype or "").removeprefix("torch."),
        attention=attention,
        multimodal=multimodal,
        tested=text.model_type in TESTED,
        reasons=tuple(reasons),
    )


def check_supported(
    model: PreTrainedModel | PreTrainedConfig,
    *,
    text_only: bool = False,
    attention: str | None = None,
    quantized_cache: bool = False,
) -> Support:
    """`inspect_support`, but a model that cannot share KV is refused.

    Raises UnsupportedModelError with every reason, before any compute.
    """
    support = inspect_support(
        model, text_only=text_only, attention=attention, quantized_cache=quantized_cache
    )
    if not support.supported:
        raise UnsupportedModelError(
            f"{support.architecture} (model type {support.model_type!r}) is not supported: "
            f"{'; '.join(support.reasons)}. kvcmas needs a causal model that keeps one rotated key "
            "and one value per token, head and layer (Llama, Mistral, Qwen2, Qwen3, Gemma-3, ...)"
        )
    return support


def _model_reasons(
    config: PreTrainedConfig, text: PreTrainedConfig, refuse_multimodal: bool
) -> Iterator[str]:
    if refuse_multimodal:
        yield "images and sound are not supported as yet (text_only=True uses it with text alone)"
    if config.is_encoder_decoder:
        yield "encoder-decoder (the context's KV lives in cross-attention)"
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield "not a causal language model of transformers"
    if _get(text, "cross_attention_layers") or _get(text, "add_cross_attention"):
        yield "cross-attention layers"
    if _get(text, "use_bidirectional_attention"):
        yield "bidirectional attention (a token's KV depends on what follows)"
    yield from _layer_reasons(text)
    yield from _position_reasons(text)
    yield from _shape_reasons(text)


def _layer_reasons(text: PreTrainedConfig) -> Iterator[str]:
    if _get(text, "kv_lora_rank"):
        yield "multi-head latent attention, MLA (kv_lora_rank: compressed KV)"
    kinds = sorted(set(_declared_layer_types(text)) - {FULL, SLIDING, "attention"})
    yield from dict.fromkeys(
        _LAYER_KINDS.get(kind, f"layers of an unknown kind {kind!r}") for kind in kinds
    )
    recurrent = text.model_type in _RECURRENT_TYPES
    if not kinds and (recurrent or any(_get(text, name) for name in _RECURRENT_SETTINGS)):
        yield "recurrent or convolution layers (a state instead of KV per token)"
    if _get(text, "index_topk_blocks") or text.model_type == "doge":
        yield "attention that picks tokens or blocks by their content"
    if SLIDING in _layer_types(text) and not _int(text, "sliding_window"):
        yield "sliding-window layers without the window's size (sliding_window)"


def _position_reasons(text: PreTrainedConfig) -> Iterator[str]:
    if _get(text, "alibi"):
        yield "ALiBi positions instead of a rotary embedding"
    elif not _rotary(text):
        yield "no rotary positions (the configuration has no rope_parameters)"
    elif _get(text, "position_embedding_type") == "nope":
        yield "layers without positions (position_embedding_type 'nope')"
    # 1 marks a layer with a rotary embedding, 0 one without.
    if not all(_get(text, "no_rope_layers") or [1]) or text.model_type in _UNROTATED_TYPES:
        yield "some layers have no rotary positions"
    if text.model_type in _NORM_AFTER_ROPE_TYPES:
        yield "keys are normalised after their rotation"


def _rotary(text: PreTrainedConfig) -> bool:
    # A config.json may carry settings that its model never reads, so the class has to declare it.
    declared = any(field.name == "rope_parameters" for field in fields(text))
    return declared and bool(_get(text, "rope_parameters"))


def _shape_reasons(text: PreTrainedConfig) -> Iterator[str]:
    if _get(text, "num_kv_shared_layers") or _get(text, "use_cla"):
        yield "layers that share the KV of other layers"
    if not _int(text, "num_hidden_layers") or not _int(text, "num_attention_heads"):
        yield "the configuration does not tell its number of layers or heads"
    kv_heads = _get(text, "num_key_value_heads")
    per_layer = text.is_heterogeneous or isinstance(kv_heads, list | tuple)
    if per_layer or _get(text, "global_head_dim"):
        yield "head shapes that differ from layer to layer"
    head_dim, value_dim = _int(text, "head_dim"), _int(text, "v_head_dim")
    if not _get(text, "kv_lora_rank") and value_dim and head_dim and value_dim != head_dim:
        yield f"values of another size than keys ({value_dim} and {head_dim})"


def _declared_layer_types(text: PreTrainedConfig) -> tuple[str, ...]:
    declared = _get(text, "layer_types") or _get(text, "layers_block_type") or ()
    return tuple(str(kind) for kind in declared)


def _layer_types(text: PreTrainedConfig) -> tuple[str, ...]:
    declared = _declared_layer_types(text)
    if declared:
        return declared
    # Without a list, one window (Mistral, Phi-3, ...) holds for all layers, unless switched off.
    sliding = _int(text, "sliding_window") and _get(text, "use_sliding_window", True)
    return (SLIDING if sliding else FULL,) * _int(text, "num_hidden_layers")


def _kv_heads(text: PreTrainedConfig, heads: int) -> int:
    if _get(text, "multi_query") and not _get(text, "new_decoder_architecture"):
        return 1
    return _int(text, "num_key_value_heads") or _int(text, "num_kv_heads") or heads


def _get(config: PreTrainedConfig, name: str, default: Any = None) -> Any:
    # transformers refuses to read a setting that differs between layers; that is its own reason.
    if config.is_heterogeneous and name in (config.per_layer_attributes or ()):
        return default
    return getattr(config, name, default)


def _int(config: PreTrainedConfig, name: str) -> int:
    value = _get(config, name)
    return value if isinstance(value, int) else 0
