"""Tiny random models of four families, and a tokenizer of single bytes."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 257
EOS = 256
WINDOW = 24
LIMIT = 512

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LIMIT,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    # Large weights: with the usual 0.02 every token would be nearly as likely as any other, and
    # nothing that a test changes would show.
    "initializer_range": 0.15,
}
GEMMA = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}

FAMILIES: dict[str, tuple[type[PreTrainedModel], type[Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_hidden_layers": 3}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"num_hidden_layers": 2}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"num_hidden_layers": 2}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"num_hidden_layers": 6, "sliding_window": WINDOW, **GEMMA},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"num_hidden_layers": 2, "sliding_window": 24}),
}
SLIDING = ("gemma3", "mistral")


def tiny_model(
    family: str, device: torch.device, attention: str = "sdpa", **changes: Any
) -> PreTrainedModel:
    """A random model in evaluation mode, float32, the same for each call."""
    model_class, config_class, own = FAMILIES[family]
    config = config_class(**{**SHAPE, **own, **changes})
    torch.manual_seed(0)
    model: PreTrainedModel = model_class._from_config(config, attn_implementation=attention)
    torch.nn.Module.to(model, device)
    model.eval()
    return model


def random_ids(tokens: int, seed: int = 1) -> list[int]:
    """Token ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, EOS, (tokens,), generator=generator).tolist()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, as byte-level BPE without merges; `<eos>` is the only special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
