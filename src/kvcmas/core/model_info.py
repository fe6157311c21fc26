"""What methods and corrections need to know of a model, without the model."""

from __future__ import annotations

from dataclasses import dataclass

from kvcmas.core.rope import Rope


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Shapes and rotation of a model's KV.

    layers, kv_heads, head_dim, value_dim: the axes of `SegmentKV` (besides tokens).
    rope: how the model rotates its keys.
    window: longest prompt plus answer in tokens, or `None` when the model states none.
    fingerprint: digest that differs whenever weights, dtype, rotation or tokenizer differ.
    """

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rope: Rope
    window: int | None
    fingerprint: str

    @property
    def channels(self) -> int:
        """Numbers per token and layer: all heads of a key and of a value."""
        return self.kv_heads * (self.head_dim + self.value_dim)
