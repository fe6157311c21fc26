"""Work in single layers, by hooks that one pass attaches to the model's decoder layers.

The model drives itself: its own forward runs over all tokens that any layer needs, and before
each layer the hook of `LayerSchedule` keeps those that go through this one:

    rows of the pass      role      span           task
    layer 0               x x x x   . . . . . .    x x
    layer 1 (Layers)      x x x x   x x x x x x    x x    entered by the donor's hidden states
    layer 2               x x x x   . . . . . .    x x
                                    their KV in the cache stays what was reused

So every family of models whose layers take hidden states, mask and rotation can do it, and a pass
without hooks is the same as ever.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial as bound
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvcmas.engines.transformers.cache import PlanCache
from kvcmas.errors import UnsupportedSpanError
from kvcmas.workflow.partial import Layers, Selected
from kvcmas.workflow.plan import Reuse

# Keyword arguments of a layer that have one entry a token, and the axis of it.
_TOKEN_AXES = {"attention_mask": 2, "position_ids": 1, "cache_position": 0}


def layer_modules(model: PreTrainedModel, layers: int) -> Sequence[nn.Module]:
    """The decoder layers of a model, in order.

    Raises:
        UnsupportedSpanError: the model does not keep them in one list.
    """
    found: Any = getattr(model.get_decoder(), "layers", None)
    if not isinstance(found, nn.ModuleList) or len(found) != layers:
        raise UnsupportedSpanError(
            f"{type(model).__name__} keeps no list of {layers} decoder layers, so that layers "
            "cannot be computed one by one; use a method that computes or reuses whole tokens"
        )
    return list(found)


class LayerHooks(ABC):
    """Something that watches or changes what a pass does in each layer.

    narrows: leaves tokens out of layers, which needs a pass with a mask.
    """

    narrows = False

    @abstractmethod
    def expect(self, positions: Tensor) -> None:
        """Where the tokens of the coming pass stand, `[tokens]` int64."""

    @abstractmethod
    def hooks(self, number: int, layer: nn.Module) -> Iterator[RemovableHandle]:
        """Register what layer `number` needs."""

    @contextmanager
    def attach(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Hold the hooks for one pass."""
        handles: list[RemovableHandle] = []
        try:
            for number, layer in enumerate(layers):
                handles += self.hooks(number, layer)
            yield
        finally:
            for handle in handles:
                handle.remove()


class HiddenTap(LayerHooks):
    """Keeps the hidden states that enter some layers.

    hidden: for each of them `[length, width]`, defined where tokens were computed.
    """

    def __init__(self, boundaries: frozenset[int], length: int) -> None:
        self.hidden: dict[int, Tensor] = {}
        self._boundaries, self._length = boundaries, length
        self._positions: Tensor | None = None

    def expect(self, positions: Tensor) -> None:
        """See `LayerHooks`."""
        self._positions = positions

    def hooks(self, number: int, layer: nn.Module) -> Iterator[RemovableHandle]:
        """See `LayerHooks`."""
        if number in self._boundaries:
            yield layer.register_forward_pre_hook(bound(self._keep, number), with_kwargs=True)

    def _keep(self, number: int, layer: nn.Module, args: Any, kwargs: Any) -> None:
        entering = _entering(args, kwargs)[0]
        kept = self.hidden.setdefault(number, entering.new_zeros(self._length, entering.shape[1]))
        kept[self._positions] = entering


class LayerSchedule(LayerHooks):
    """Which tokens of a pass go through which layers. Made for one pass, after the fill.

    Args:
        cache: holds what the method filled for the spans.
        positions: `[tokens]` int64 on the cache's device, of all tokens of the pass, ascending;
            every token of the spans is among them.
        spans: the plan's partial spans.
        entering: by start of the span, `[tokens, width]` hidden states, for those that begin
            behind layer 0.
    """

    narrows = True

    def __init__(
        self,
        cache: PlanCache,
        positions: Tensor,
        spans: Sequence[Reuse],
        entering: dict[int, Tensor],
    ) -> None:
        self._cache, self._positions, self._spans = cache, positions, spans
        self._entering = entering
        self._first = int(positions[0])
        self._filled = int(positions[-1]) + 1
        starts = torch.tensor([span.start for span in spans], device=positions.device)
        first = torch.searchsorted(positions, starts).tolist()
        self._rows = [slice(row, row + len(span)) for row, span in zip(first, spans, strict=True)]
        self._reused = {span.start: self._kv(span).clone() for span in spans if _selects(span)}
        self._chosen: dict[int, Tensor] = {}
        self._active = positions.new_empty(0)
        self._hidden = torch.empty(0)

    def expect(self, positions: Tensor) -> None:
        """Nothing to do: it was made for these positions."""

    def selected(self, span: Reuse) -> Tensor:
        """Which tokens of a `Selected` span went on, `[len(span)]` bool; known after the pass."""
        return self._chosen[span.start]

    def hooks(self, number: int, layer: nn.Module) -> Iterator[RemovableHandle]:
        """See `LayerHooks`."""
        yield layer.register_forward_pre_hook(bound(self._before, number), with_kwargs=True)
        yield layer.register_forward_hook(bound(self._after, number))

    def _before(self, number: int, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = _entering(args, kwargs).clone()
        active = torch.ones_like(self._positions, dtype=torch.bool)
        for span, rows in zip(self._spans, self._rows, strict=True):
            kind = span.partial
            if isinstance(kind, Layers):
                if kind.start == number and number:
                    hidden[0, rows] = self._entering[span.start]
                active[rows] = kind.start <= number < kind.stop
            elif isinstance(kind, Selected) and number >= kind.layers:
                active[rows] = self._chosen[span.start]
        self._hidden, self._active = hidden, active.nonzero()[:, 0]
        self._cache.place(self._positions[self._active], self._first, self._filled)
        given = {name: self._narrowed(name, value) for name, value in kwargs.items()}
        narrow = hidden[:, self._active]
        if "hidden_states" in kwargs:
            return args, {**given, "hidden_states": narrow}
        return (narrow, *args[1:]), given

    def _after(self, number: int, layer: nn.Module, args: Any, output: Any) -> Any:
        computed = output[0] if isinstance(output, tuple) else output
        self._hidden[:, self._active] = computed
        for span in self._spans:
            if isinstance(span.partial, Selected) and number == span.partial.layers - 1:
                self._chosen[span.start] = self._most_deviating(span, span.partial.count)
        return (self._hidden, *output[1:]) if isinstance(output, tuple) else self._hidden

    def _narrowed(self, name: str, value: Any) -> Any:
        if name == "position_embeddings" and value is not None:
            return tuple(part.index_select(1, self._active) for part in value)
        axis = _TOKEN_AXES.get(name)
        if axis is None or not isinstance(value, Tensor):
            return value
        return value.index_select(axis, self._active)

    def _most_deviating(self, span: Reuse, count: int) -> Tensor:
        difference = (self._kv(span).float() - self._reused[span.start].float()).square()
        chosen = torch.zeros(len(span), dtype=torch.bool, device=difference.device)
        chosen[difference.sum((0, 2)).topk(count).indices] = True
        return chosen

    def _kv(self, span: Reuse) -> Tensor:
        """`[2 * kv_heads, tokens, head_dim]` of the layer that is compared."""
        layer = span.partial.layers - 1 if isinstance(span.partial, Selected) else 0
        tokens = slice(span.start, span.stop)
        cache = self._cache
        return torch.cat((cache.key_buffer[layer, :, tokens], cache.value_buffer[layer, :, tokens]))


def _selects(span: Reuse) -> bool:
    return isinstance(span.partial, Selected)


def _entering(args: Any, kwargs: Any) -> Tensor:
    """A layer's hidden states, `[1, tokens, width]`."""
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden
