"""One forward pass of a transformers model over tokens at any positions of a cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvcmas.engines.transformers.cache import KVShape, PlanCache, Positions
from kvcmas.engines.transformers.layerwise import LayerHooks, layer_modules
from kvcmas.engines.transformers.masks import MaskBuilder
from kvcmas.errors import ConfigError, UnsupportedModelError


class ModelRunner:
    """Runs passes of one model, one at a time: calls from several threads wait for each other.

    Args:
        model: a causal language model in evaluation mode, on one device.

    Raises:
        ConfigError: the model is in training mode.
        UnsupportedModelError: the model cannot take a cache by position (see the message).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if model.training:
            raise ConfigError("the model is in training mode (dropout is on); call model.eval()")
        self.model = model
        self.config: PreTrainedConfig = model.config.get_text_config()
        self.shape = _kv_shape(self.config, model)
        self.masks = MaskBuilder.of(self.config, model.dtype)
        self.vocab = cast(Tensor, model.get_input_embeddings().weight).shape[0]
        self.max_tokens: int | None = getattr(self.config, "max_position_embeddings", None)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = _cache_name(model, parameters)
        self._keeps_logits = "logits_to_keep" in parameters
        self._lock = Lock()

    @property
    def device(self) -> torch.device:
        """Where the model and the caches live."""
        return self.shape.device

    def forward(
        self,
        cache: PlanCache,
        token_ids: Tensor,
        positions: Tensor,
        *,
        filled: int,
        start: int,
        contiguous: bool,
        logits: int = 1,
        hooks: Sequence[LayerHooks] = (),
    ) -> Tensor:
        """Compute tokens and scatter their KV to their positions.

        Args:
            cache: holds KV at every index below `filled` that is not computed here.
            token_ids: `[tokens]` int64 on the model's device.
            positions: `[tokens]` int64, ascending, on the model's device.
            filled: number of indices that hold KV after this pass.
            start: the first position, as a number (reading it from the device would wait).
            contiguous: the positions are `[start, start + tokens)` and end at `filled`.
            logits: how many of the last tokens to return logits for, at least 1.
            hooks: attached to the layers for this pass, in this order.

        Returns:
            `[logits, vocab]` float32.
        """
        where: Positions = positions
        mask = None
        if contiguous:
            where = slice(start, filled)
        else:
            mask = self.masks.build(positions, filled)
        arguments: dict[str, Any] = {self._cache_name: cache}
        if self._keeps_logits:
            arguments["logits_to_keep"] = logits
        with self._lock, torch.no_grad(), ExitStack() as attached:
            for hook in hooks:
                hook.expect(positions)
                attached.enter_context(hook.attach(layer_modules(self.model, self.shape.layers)))
            cache.place(where, start, filled)
            output = self.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                attention_mask=mask,
                use_cache=True,
                **arguments,
            )
        rows: Tensor = output.logits[0, -logits:]
        return rows.float()


def _cache_name(model: PreTrainedModel, parameters: Any) -> str:
    # transformers renamed the argument between 5.19 and 5.24.
    for name in ("past_key_values", "cache"):
        if name in parameters:
            return name
    raise UnsupportedModelError(
        f"{type(model).__name__} takes no key-value cache; a causal language model with one is "
        "needed"
    )


def _kv_shape(config: PreTrainedConfig, model: PreTrainedModel) -> KVShape:
    heads: Any = getattr(config, "num_attention_heads", None)
    kv_heads: Any = getattr(config, "num_key_value_heads", None) or heads
    head_dim: Any = getattr(config, "head_dim", None)
    layers: Any = getattr(config, "num_hidden_layers", None)
    if head_dim is None and isinstance(heads, int):
        head_dim = config.hidden_size // heads
    if not (isinstance(layers, int) and isinstance(kv_heads, int) and isinstance(head_dim, int)):
        raise UnsupportedModelError(
            f"{type(model).__name__} does not have one number of KV heads and one head size for "
            f"all layers (num_key_value_heads={kv_heads!r}, head_dim={head_dim!r}); models whose "
            "layers differ in shape cannot be served"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModelError(
            f"the model is spread over {names}; load it on one device (no device_map)"
        )
    return KVShape(layers, kv_heads, head_dim, model.dtype, devices.pop())
