"""Agents that share a tiny model, one engine and one method."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers import SamplingParams, TransformersEngine, model_info
from kvcmas.engines.transformers.record import RequestRecord, SpanRecord
from kvcmas.engines.transformers.results import Result, Scored
from kvcmas.methods.library_method import LibraryMethod
from kvcmas.methods.registry import create
from kvcmas.workflow.prompt import Prompt

from ..engines.fake_methods import DenseMethod
from ..engines.tiny import random_ids, tiny_model

BOS = 1
ROLE, TASK = random_ids(20, 101), random_ids(9, 102)
OTHER_ROLE, OTHER_TASK = random_ids(40, 103), random_ids(9, 104)
DOCUMENT = random_ids(100, 105)
ANSWER = random_ids(6, 106)
"""A continuation to be scored."""


class Team:
    """An engine with a method; requests are numbered."""

    def __init__(
        self, method: str, device: torch.device, family: str = "llama", **options: Any
    ) -> None:
        self.model = tiny_model(family, device)
        made = create(method, model_info(self.model), **options)
        if not isinstance(made, LibraryMethod):
            raise TypeError(f"{method} keeps no library")
        self.method = made
        self.library = made.library
        self.engine = TransformersEngine(self.model, None, made)
        self._plain = TransformersEngine(self.model, None, DenseMethod())
        self._asked = 0

    def prompt(
        self, ids: list[int], agent: str = "planner", tenant: str = "", dial: str | None = None
    ) -> Prompt:
        self._asked += 1
        return Prompt(np.array(ids, dtype=np.int64), agent, str(self._asked), tenant, dial)

    def ask(
        self, ids: list[int], agent: str = "planner", tokens: int = 4, **options: Any
    ) -> Result:
        """Generate greedily, past any end token."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return self.engine.generate(self.prompt(ids, agent, **options), params)

    def score(self, ids: list[int], agent: str = "planner", **options: Any) -> Scored:
        """Logits of the fixed answer."""
        return self.engine.score(self.prompt(ids, agent, **options), ANSWER)

    def dense(self, ids: list[int]) -> Scored:
        """Logits and KV of a run without sharing."""
        return self._plain.score(ids, ANSWER)

    def agrees(self, scored: Scored, ids: list[int]) -> bool:
        """Whether logits are those of a dense run, to 1e-4 of the largest."""
        expected = self.dense(ids).logits
        return bool((scored.logits - expected).abs().max() <= 1e-4 * expected.abs().max())

    def settled(self) -> bool:
        """No request holds anything, and the library is consistent."""
        self.library.check_integrity()
        return self.library.pinned() == 0


def reused(record: RequestRecord) -> list[SpanRecord]:
    """The reused spans of a record."""
    return [span for span in record.spans if span.kind == "reuse"]


def same_kv(one: SegmentKV, other: SegmentKV) -> bool:
    """Bit for bit."""
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def model_kv(model: Any, ids: list[int], first_position: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values `[layers, kv_heads, tokens, head_dim]` of the model without kvcmas."""
    positions = torch.arange(len(ids), device=model.device) + first_position
    with torch.no_grad():
        output = model(
            torch.tensor([ids], device=model.device), position_ids=positions[None], use_cache=True
        )
    layers = output.past_key_values.layers
    return (
        torch.stack([layer.keys[0] for layer in layers]),
        torch.stack([layer.values[0] for layer in layers]),
    )
