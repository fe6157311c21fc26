"""The rotary tables of a model, read from its configuration.

The formulas are those of transformers' `modeling_rope_utils`, evaluated in float32 in the same
order: at position 20000 one unit in the last place of a frequency is 1e-3 of a radian.

Sources: RoPE (Su et al., arXiv 2104.09864), position interpolation (Chen et al., arXiv
2306.15595), YaRN (Peng et al., arXiv 2309.00071), M-RoPE (Wang et al., arXiv 2409.12191).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kvcmas.core.rope.families import AxisRule, LayerRule, Layout, RopeFamily
from kvcmas.errors import ConfigError, UnsupportedRopeError

LENGTH_DEPENDENT = frozenset({"dynamic", "longrope", "su"})


@dataclass(frozen=True, slots=True)
class RopeTable:
    """How one kind of layer rotates the leading `2 * len(frequencies)` channels of a key.

    Args:
        frequencies: radians per position, one per pair of channels (float32 values).
        axes: the axis of the position that turns each pair, as long as `frequencies`.
        layout: which channels form a pair.
    """

    frequencies: tuple[float, ...]
    axes: tuple[int, ...]
    layout: Layout

    @property
    def rotary_dim(self) -> int:
        """Number of channels that rotate; the ones behind them stay as they are."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True, slots=True)
class _Source:
    """A layer's `rope_parameters`, with what they fall back on."""

    parameters: Mapping[str, Any]
    config: Any
    nested: bool
    dim: int
    head_dim: int

    def number(self, name: str, default: float | None = None) -> float:
        value = self.parameters.get(name)
        if value is None:
            value = getattr(self.config, name, None)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"rope_parameters of type {self.parameters.get('rope_type')!r} need a number "
                f"{name!r}, got {value!r}; complete the model's configuration"
            )
        return value

    @property
    def trained_length(self) -> float:
        name = "original_max_position_embeddings"
        return self.number(name, getattr(self.config, "max_position_embeddings", None))


def _base(source: _Source) -> Tensor:
    exponents = torch.arange(0, source.dim, 2, dtype=torch.float32) / source.dim
    return torch.reciprocal(source.number("rope_theta") ** exponents)


def _linear(source: _Source) -> Tensor:
    return _base(source) / source.number("factor")


def _proportional(source: _Source) -> Tensor:
    # The whole head takes part; the pairs beyond the rotated share have frequency zero.
    share = source.number("partial_rotary_factor", 1.0)
    frequencies = _base(source)
    frequencies[int(share * source.head_dim // 2) :] = 0.0
    return frequencies / source.number("factor", 1.0)


def _llama3(source: _Source) -> Tensor:
    frequencies = _base(source)
    factor, length = source.number("factor"), source.trained_length
    low, high = source.number("low_freq_factor"), source.number("high_freq_factor")
    wavelengths = 2 * math.pi / frequencies
    blend = (length / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > length / low, frequencies / factor, blended)
    return torch.where(wavelengths < length / high, frequencies, scaled)


def _yarn(source: _Source) -> Tensor:
    # `attention_factor` scales cos and sin alike, so it multiplies a key and cancels in a move.
    dim, theta, length = source.dim, source.number("rope_theta"), source.trained_length
    factor = source.parameters.get("factor")
    if factor is None:
        factor = source.number("max_position_embeddings") / length

    def pair_that_turns(times: float) -> float:
        return (dim * math.log(length / (times * 2 * math.pi))) / (2 * math.log(theta))

    first = pair_that_turns(source.parameters.get("beta_fast") or 32)
    last = pair_that_turns(source.parameters.get("beta_slow") or 1)
    # transformers looks for this switch beside the nested tables, hence never finds it there.
    if source.nested or source.parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if first != last else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    periods = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kept = 1 - ramp
    return (1.0 / (factor * periods)) * (1 - kept) + (1.0 / periods) * kept


_FREQUENCIES: Mapping[str, Callable[[_Source], Tensor]] = MappingProxyType(
    {
        "default": _base,
        "linear": _linear,
        "llama3": _llama3,
        "yarn": _yarn,
        "proportional": _proportional,
    }
)


def _frequencies(source: _Source, family: RopeFamily, model_type: str) -> Tensor:
    kind = source.parameters.get("rope_type") or source.parameters.get("type") or "default"
    if kind == "mrope" and family.axes is not AxisRule.TEXT:
        kind = "default"
    if kind in LENGTH_DEPENDENT:
        raise UnsupportedRopeError(
            f"rope type {kind!r} of model type {model_type!r} changes its frequencies with the "
            "length of the prompt, so a key cannot be moved to another position; use a fixed "
            "scaling (default, linear, llama3, yarn) or run this model without reuse"
        )
    if kind not in _FREQUENCIES:
        raise UnsupportedRopeError(
            f"rope type {kind!r} of model type {model_type!r} is not known; known: "
            + ", ".join(sorted(_FREQUENCIES))
        )
    return _FREQUENCIES[kind](source)


def _source(config: Any, family: RopeFamily, model_type: str, layer_type: str | None) -> _Source:
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    if family.rotary_dim:
        dim = getattr(config, "rotary_dim", None)
        return _Source({"rope_theta": 10000.0}, config, False, dim or head_dim, head_dim)
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping) or not parameters:
        raise UnsupportedRopeError(
            f"the configuration of model type {model_type!r} has no rope_parameters, so it has "
            "no rotary embedding, or comes from a transformers older than 5"
        )
    nested = layer_type in parameters
    if nested:
        parameters = parameters[layer_type]
    share = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    whole = share is None or share == 1 or parameters.get("rope_type") == "proportional"
    if not whole and not family.partial:
        raise UnsupportedRopeError(
            f"model type {model_type!r} rotates whole heads, but its configuration asks for "
            f"partial_rotary_factor={share}; remove it from the configuration"
        )
    dim = head_dim if whole else int(head_dim * share)
    return _Source(parameters, config, nested, dim, head_dim)


def _axes(source: _Source, family: RopeFamily, model_type: str, pairs: int) -> tuple[int, ...]:
    section = source.parameters.get("mrope_section")
    if family.axes is AxisRule.TEXT:
        if section is not None:
            raise UnsupportedRopeError(
                f"model type {model_type!r} is known with one position axis, but its "
                f"configuration has mrope_section={section}"
            )
        return (0,) * pairs
    lengths = tuple(section or family.mrope_section)
    if len(lengths) != 3 or (family.axes is AxisRule.SECTIONS and sum(lengths) != pairs):
        raise ConfigError(
            f"mrope_section must be three lengths that add up to {pairs} pairs, got {lengths}"
        )
    if family.axes is AxisRule.SECTIONS:
        return tuple(axis for axis, length in enumerate(lengths) for _ in range(length))
    return tuple(i % 3 if i < 3 * lengths[i % 3] else 0 for i in range(pairs))


def _rotates(config: Any, rule: LayerRule, layer: int, layer_type: str | None) -> bool:
    if rule is LayerRule.ALL:
        return True
    if rule is LayerRule.LISTED:
        return bool(config.no_rope_layers[layer])
    if rule is LayerRule.SLIDING_IF_ANY and getattr(config, "sliding_window", None) is None:
        return True
    return layer_type == "sliding_attention"


def read_tables(
    config: Any, family: RopeFamily, model_type: str
) -> tuple[tuple[RopeTable, ...], tuple[int | None, ...]]:
    """The distinct tables of a model, and for each layer the index of its table.

    A layer that does not rotate has None. Raises as `Rope.from_config` does.
    """
    tables: dict[RopeTable, int] = {}
    layers: list[int | None] = []
    layer_types = getattr(config, "layer_types", None)
    sign = -1.0 if family.clockwise else 1.0
    for layer in range(config.num_hidden_layers):
        layer_type = layer_types[layer] if layer_types is not None else None
        own = config.per_layer_config[layer] if _is_heterogeneous(config) else config
        parameters = getattr(own, "rope_parameters", None)
        unused = isinstance(parameters, Mapping) and parameters.get(layer_type, {}) is None
        if unused or not _rotates(config, family.layers, layer, layer_type):
            layers.append(None)
            continue
        source = _source(own, family, model_type, layer_type)
        frequencies = tuple((sign * _frequencies(source, family, model_type)).tolist())
        axes = _axes(source, family, model_type, len(frequencies))
        table = RopeTable(frequencies, axes, family.layout)
        if table.rotary_dim > source.head_dim:
            raise ConfigError(
                f"{table.rotary_dim} rotated channels do not fit a head of {source.head_dim}"
            )
        layers.append(tables.setdefault(table, len(tables)))
    return tuple(tables), tuple(layers)


def _is_heterogeneous(config: Any) -> bool:
    """Whether layers have configurations of their own (head sizes that differ by layer)."""
    return bool(getattr(config, "is_heterogeneous", False))
