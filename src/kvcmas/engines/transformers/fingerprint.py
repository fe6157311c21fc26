"""What makes two models the same model: named fields, so that a mismatch can be named.

KV and corrections of one model are garbage to another. The weights' checksum reads every bit of
every tensor, so one changed weight changes it; it is made of integer sums, so that the number of
threads and the device do not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcmas.engines.transformers.support import inspect_support
from kvcmas.errors import StateMismatchError, UnsupportedModelError

_BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # elements summed at once: bounds the temporary memory on a device
_SAMPLES = 64

# Settings that change neither weights nor what the layers compute.
_VOLATILE = frozenset(
    {
        *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"),
        *("_attn_implementation", "attn_implementation", "use_cache", "return_dict"),
        *("output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "chunk_size_feed_forward"),
        "initializer_range",
    }
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that decides the KV of a given prompt, as plain values.

    rope: the rotary parameters as JSON. config: digest of all settings that matter to compute.
    weights, tokenizer: digests. adapter: names and digest of the active adapters, or empty.
    """

    architecture: str
    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    rope: str
    config: str
    weights: str
    tokenizer: str
    adapter: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 over all fields, 64 hexadecimal digits."""
        return _sha256(_canonical(asdict(self)))

    def differences(self, other: Fingerprint | Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the fields in which `other` (or its dictionary) differs or lacks a value."""
        theirs = asdict(other) if isinstance(other, Fingerprint) else other
        names = (field.name for field in fields(self))
        return tuple(name for name in names if theirs.get(name) != getattr(self, name))

    def require(self, other: Fingerprint | Mapping[str, Any], what: str = "saved states") -> None:
        """Raise StateMismatchError naming the fields unless `other` is this very model."""
        names = self.differences(other)
        if names:
            theirs = asdict(other) if isinstance(other, Fingerprint) else other
            pairs = ", ".join(
                f"{name} ({_short(theirs.get(name))} instead of {_short(getattr(self, name))})"
                for name in names
            )
            raise StateMismatchError(
                f"{what} belong to another model: different {pairs}; "
                "use them with the model that made them, or learn new ones"
            )


def fingerprint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> Fingerprint:
    """Identify a loaded model. Reads all weights once (well under a second per GB).

    Raises UnsupportedModelError if weights are not in memory (offloaded to disk or "meta").
    """
    support = inspect_support(model)
    text = model.config.get_text_config(decoder=True)
    return Fingerprint(
        architecture=type(model).__name__,
        layers=support.layers,
        attention_heads=support.attention_heads,
        kv_heads=support.kv_heads,
        head_dim=support.head_dim,
        vocab_size=int(getattr(text, "vocab_size", 0) or 0),
        dtype=str(model.dtype).removeprefix("torch."),
        rope=_canonical(getattr(text, "rope_parameters", None)),
        config=_sha256(_canonical(_settings(model.config.to_dict()))),
        weights=weights_digest(model),
        tokenizer="" if tokenizer is None else tokenizer_digest(tokenizer),
        adapter=_adapter(model),
    )


def weights_digest(model: PreTrainedModel) -> str:
    """Digest of names, shapes, dtypes and every bit of a model's parameters and saved buffers."""
    digest = hashlib.sha256()
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.device.type == "meta":
            raise UnsupportedModelError(
                f"the weights of {name!r} are not in memory; load the model on one device without "
                "offloading"
            )
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue  # tied weights: once is enough
        seen.add(key)
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        digest.update(_checksum(tensor).encode())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of all that turns text into ids; padding and truncation settings do not count."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        parts: Any = [tokenizer.get_vocab(), tokenizer.special_tokens_map]
    else:
        parts = json.loads(backend.to_str())
        parts.pop("padding", None)
        parts.pop("truncation", None)
    return _sha256(_canonical([type(tokenizer).__name__, parts]))


def _checksum(tensor: Tensor) -> str:
    """Sums over all bits (exact, modulo 2^64, so in any order) and some values in their places."""
    bits = tensor.detach().contiguous().view(-1).view(_BIT_TYPES[tensor.element_size()])
    total = 0
    for index, chunk in enumerate(torch.split(bits, _CHUNK)):
        total += (index * 2 + 1) * int(chunk.sum(dtype=torch.int64).item())
    stride = max(1, bits.numel() // _SAMPLES)
    return f"{total % (1 << 64):016x}|{bits[::stride].tolist()}"


def _adapter(model: PreTrainedModel) -> str:
    configs = getattr(model, "peft_config", None)
    if not configs:
        return ""
    settings = {name: config.to_dict() for name, config in configs.items()}
    return f"{','.join(sorted(settings))}:{_sha256(_canonical(settings))[:16]}"


def _settings(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _settings(value) for key, value in config.items() if key not in _VOLATILE}
    return config


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value: object) -> object:
    # A set prints in another order in every process.
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:20]}..."
