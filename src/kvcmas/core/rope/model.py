"""The rotary embedding of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from kvcmas.core.rope.families import FAMILIES, REFUSED, RopeFamily
from kvcmas.core.rope.rotation import Rotation, Turn
from kvcmas.core.rope.tables import RopeTable, read_tables
from kvcmas.errors import InputError, UnsupportedRopeError


@dataclass(frozen=True, slots=True)
class Rope:
    """Moves keys of one model between positions.

    A move is a pure rotation: what a model does to a key besides (QK-norm, the attention factor
    of YaRN) was done before it was stored, and stays. Two instances are equal when they move
    keys alike.

    Args:
        tables: the distinct ways in which layers rotate.
        layers: for each layer of the model the index into `tables`, None where keys carry no
            position.
    """

    tables: tuple[RopeTable, ...]
    layers: tuple[int | None, ...]

    @classmethod
    def from_config(cls, config: Any, *, model_type: str | None = None) -> Rope:
        """Read the rotary embedding from a transformers configuration.

        Args:
            config: an object with the attributes of a `PreTrainedConfig` (`rope_parameters`,
                `num_hidden_layers`, ...). Of a vision-language model, the whole configuration or
                its `text_config`.
            model_type: the known type whose code rotates keys as this model's does, in place of
                `config.model_type`. Check the result against the model (`kvcmas doctor`).

        Raises:
            UnsupportedRopeError: the model type is not known to rotate keys, or rotates them in
                a way that cannot be undone, or its frequencies depend on the prompt's length.
            ConfigError: the configuration lacks a value, or contradicts itself.
        """
        config = getattr(config, "text_config", None) or config
        name = str(model_type or getattr(config, "model_type", None) or "")
        family = _family(config, name)
        tables, layers = read_tables(config, family, name)
        if not tables:
            raise UnsupportedRopeError(f"no layer of model type {name!r} rotates its keys")
        return cls(tables, layers)

    @property
    def axes(self) -> int:
        """Axes of a position: 1 for text, 3 for M-RoPE (time, height, width)."""
        return 3 if any(any(table.axes) for table in self.tables) else 1

    def rotation(
        self,
        shift: int | Tensor,
        *,
        positions: Tensor | None = None,
        device: torch.device | None = None,
    ) -> Rotation:
        """Prepare a move, to apply it to several layers one by one.

        Args: as for `move`; `device` is where the keys are.
        """
        if isinstance(shift, Tensor):
            shift = int(shift) if shift.ndim == 0 else self._checked(shift, "shift", (1, 2))
        if positions is not None:
            positions = self._checked(positions, "positions", (2,))
        if not (shift.any() if isinstance(shift, Tensor) else shift):
            return Rotation((), (None,) * len(self.layers))
        turns = tuple(Turn.of(table, shift, positions, device) for table in self.tables)
        return Rotation(turns, self.layers)

    def move(
        self,
        keys: Tensor,
        shift: int | Tensor,
        *,
        positions: Tensor | None = None,
        layers: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Keys as the model would have stored them `shift` positions further on.

        Args:
            keys: `[layers, kv_heads, tokens, head_dim]`, rotated at their old positions.
            shift: new minus old position: one for all, or int64 `[axes]`, or `[axes, tokens]`;
                a leading size of 1 counts for every axis. 0 gives bit-identical keys.
            positions: the old positions, int64 `[axes, tokens]`. The model rounds its angles to
                float32; with the old positions the move repeats that rounding and agrees with
                recomputation to less than 1e-6 of the key's norm anywhere. Without them the
                angles are exact, and differ from the model's by up to 6e-5 of the norm at
                position 1000, 1e-3 at 20000. Costs up to half as much again, as every token
                has its own angles.
            layers: the model's layers that `keys` holds; all by default.
            out: where to write (see `Rotation.apply`); `keys` itself for a move in place.

        Returns:
            `out`, or a new tensor. Computed in float32, rounded once to the dtype of `keys`.

        Raises:
            InputError: shapes, dtypes or axes do not fit.
        """
        rotation = self.rotation(shift, positions=positions, device=keys.device)
        return rotation.apply(keys, layers=layers, out=out)

    def unrotate(
        self,
        keys: Tensor,
        positions: Tensor,
        *,
        layers: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Keys as the model would have stored them at position 0.

        YaRN's attention factor, which the model multiplies into every rotated key, stays in.
        `positions` is int64 `[axes, tokens]`; everything else as in `move`.
        """
        shift = -self._checked(positions, "positions", (2,))
        return self.move(keys, shift, positions=positions, layers=layers, out=out)

    def rotate(
        self,
        keys: Tensor,
        positions: Tensor,
        *,
        layers: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The inverse of `unrotate`: keys at position 0, rotated to `positions`."""
        origin = torch.zeros_like(positions)
        return self.move(keys, positions, positions=origin, layers=layers, out=out)

    def _checked(self, value: Tensor, name: str, ndims: tuple[int, ...]) -> Tensor:
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise InputError(f"{name} must be integers, got {value.dtype}")
        if value.ndim not in ndims or value.shape[0] not in (1, self.axes):
            raise InputError(
                f"{name} must be [axes, tokens]{' or [axes]' if 1 in ndims else ''} with "
                f"{self.axes} axes, got {tuple(value.shape)}"
            )
        return value.expand(self.axes, *value.shape[1:])


def _family(config: Any, name: str) -> RopeFamily:
    if getattr(config, "kv_lora_rank", None) or getattr(config, "qk_rope_head_dim", None):
        reason = "it keeps latent KV (MLA), of which only a part is rotated"
    elif getattr(config, "alibi", False):
        reason = "it biases attention by distance (ALiBi) and has no rotary embedding"
    elif name in REFUSED:
        reason = REFUSED[name]
    elif name in FAMILIES:
        return FAMILIES[name]
    else:
        near = get_close_matches(name, FAMILIES, n=1)
        reason = (
            "how it rotates keys is not known; if it does so as a known type"
            + (f" ({near[0]!r}?)" if near else "")
            + ", pass that one as model_type and check with `kvcmas doctor`"
        )
    raise UnsupportedRopeError(f"model type {name!r}: {reason}")
