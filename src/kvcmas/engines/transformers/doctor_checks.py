"""The comparisons that the doctor makes between kvcmas and the model itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcmas.core.rope import Rope
from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers.cache import PlanCache
from kvcmas.engines.transformers.doctor_method import OwnKV
from kvcmas.engines.transformers.doctor_report import Check, CheckName, worse
from kvcmas.engines.transformers.engine import TransformersEngine
from kvcmas.methods.move import fill_moved

ANSWER = 8
"""Tokens behind a prompt whose logits are compared."""

# Measured on SmolLM2 (30 layers, random tokens, 2000 of them, shifts to 5000), KV and logits:
# float32 3e-5 and 5e-5, float16 4e-3 and 2e-2, bfloat16 3e-2 and 0.2. A wrong frequency shows as
# 0.1 to 1 in every layer.
_KV_TOLERANCES = MappingProxyType({torch.float16: 0.01, torch.bfloat16: 0.08})
_LOGITS_TOLERANCES = MappingProxyType({torch.float16: 0.05, torch.bfloat16: 0.4})
_FLOAT32_TOLERANCE = 1e-4


class Examination:
    """Compares one model with itself, prompt by prompt.

    Raises:
        UnsupportedModelError, ConfigError: as `TransformersEngine`.
    """

    def __init__(self, model: PreTrainedModel, rope: Rope, progress: Callable[[str], None]) -> None:
        self.model, self.rope, self.progress = model, rope, progress
        self.method = OwnKV()
        self.engine = TransformersEngine(model, None, self.method)

    def run(self, ids: Tensor, shifts: Sequence[int]) -> Iterator[Check]:
        """All checks of one prompt.

        Args:
            ids: `[tokens]` int64 on the CPU: the prompt, and `ANSWER` tokens behind it.
            shifts: positions by which its keys are moved.
        """
        length = ids.shape[0] - ANSWER
        prompt, answer = ids[:length], ids[length:]
        self.progress(f"{length} tokens: full prefill")
        dense = self.engine.score(prompt, answer)
        plain = self._plain_logits(ids[:-1])
        yield self._logits("dense logits", length, plain, dense.logits)
        kv = dense.kv.slice(0, length)
        self.progress(f"{length} tokens: parts of them reused")
        with self.method.holding(kv):
            reused = self.engine.score(prompt, answer)
        yield self._logits("reused logits", length, dense.logits, reused.logits)
        again = reused.kv.slice(0, length)
        errors = zip(
            layer_errors(kv.keys, again.keys), layer_errors(kv.values, again.values), strict=True
        )
        yield self._layers(
            "reused KV", length, None, tuple(max(pair, key=worse) for pair in errors)
        )
        for shift in shifts:
            self.progress(f"{length} tokens: computed {shift} positions further on")
            exact = self._computed_at(kv.token_ids, kv.positions + shift)
            moved = _empty_like(exact)
            fill_moved(self.rope, kv, 0, moved)
            keys = layer_errors(exact.keys, moved.keys)
            yield self._layers("moved keys", length, shift, keys)
            values = layer_errors(exact.values, moved.values)
            yield self._layers("moved values", length, shift, values)

    def _plain_logits(self, ids: Tensor) -> Tensor:
        """`[ANSWER, vocab]` float32 of the model as it is, without cache and engine."""
        arguments: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            arguments["logits_to_keep"] = ANSWER
        with torch.no_grad():
            row = ids[None].to(self.engine.runner.device)
            logits = self.model(input_ids=row, use_cache=False, **arguments).logits
        rows: Tensor = logits[0, -ANSWER:].float()
        return rows

    def _computed_at(self, token_ids: Tensor, positions: Tensor) -> SegmentKV:
        """KV of a full prefill at other positions."""
        runner, length = self.engine.runner, token_ids.shape[0]
        cache = PlanCache(runner.shape, length)
        runner.forward(cache, token_ids, positions[0], filled=length, start=0, contiguous=True)
        return SegmentKV(cache.key_buffer, cache.value_buffer, token_ids, positions)

    def _logits(self, name: CheckName, length: int, exact: Tensor, other: Tensor) -> Check:
        tolerance = _LOGITS_TOLERANCES.get(self.model.dtype, _FLOAT32_TOLERANCE)
        return Check.of(name, length, logits_error(exact, other), tolerance)

    def _layers(
        self, name: CheckName, length: int, shift: int | None, errors: tuple[float, ...]
    ) -> Check:
        tolerance = _KV_TOLERANCES.get(self.model.dtype, _FLOAT32_TOLERANCE)
        return Check.of(name, length, errors, tolerance, shift)


def layer_errors(exact: Tensor, other: Tensor) -> tuple[float, ...]:
    """For each layer the norm of the difference over the norm of `exact`.

    Args:
        exact, other: `[layers, kv_heads, tokens, dim]`.
    """
    return tuple(
        _relative(mine.float(), theirs.float()) for mine, theirs in zip(exact, other, strict=True)
    )


def logits_error(exact: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm of `exact` without its mean (softmax ignores it).

    Args:
        exact, other: `[tokens, vocab]` float32.
    """
    return _relative(exact - exact.mean(-1, keepdim=True), other - other.mean(-1, keepdim=True))


def _relative(exact: Tensor, other: Tensor) -> float:
    difference = float(torch.linalg.vector_norm(exact - other))
    return difference / norm if (norm := float(torch.linalg.vector_norm(exact))) else difference


def _empty_like(segment: SegmentKV) -> SegmentKV:
    return SegmentKV(
        torch.empty_like(segment.keys),
        torch.empty_like(segment.values),
        segment.token_ids,
        segment.positions,
    )
