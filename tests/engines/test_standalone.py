"""Runs that a method wants encoded by themselves."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers import Cancellation, TransformersEngine
from kvcmas.errors import CancelledError
from kvcmas.workflow.prompt import Prompt, TokenIds

from ..methods.team import model_kv
from .fake_methods import DenseMethod
from .tiny import random_ids, tiny_model

PROMPT = Prompt(np.array(random_ids(50, 1)), "reader", "one")
RUNS = [np.array(random_ids(length, length)) for length in (1, 20, 33)]


class Wanting(DenseMethod):
    """Wants the runs one after the other."""

    name: ClassVar[str] = "wanting"

    def __init__(self, cancel: Cancellation | None = None) -> None:
        super().__init__()
        self.got: list[SegmentKV] = []
        self.cancel = cancel

    def wants(self, prompt: Prompt) -> tuple[TokenIds, ...]:
        self.calls.append("wants")
        return tuple(RUNS[len(self.got) : len(self.got) + 1])

    def encoded(self, prompt: Prompt, token_ids: TokenIds, kv: SegmentKV) -> None:
        self.calls.append("encoded")
        assert kv.token_ids.tolist() == token_ids.tolist()
        self.got.append(kv.clone())
        if self.cancel is not None:
            self.cancel.cancel()


def test_encoded_before_the_plan_and_charged(device: torch.device) -> None:
    model = tiny_model("llama", device)
    method = Wanting()
    record = TransformersEngine(model, None, method).prefill(PROMPT).record
    assert method.calls == [*("wants", "encoded") * 3, "wants", "plan", "finish"]
    for ids, kv in zip(RUNS, method.got, strict=True):
        keys, values = model_kv(model, ids.tolist())
        torch.testing.assert_close(kv.keys, keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(kv.values, values, rtol=1e-5, atol=1e-5)
        assert kv.positions.tolist() == [list(range(len(ids)))]
    assert (record.encoded, record.computed) == (1 + 20 + 33, 50)
    assert 0 < record.encode_s < record.ttft_s
    assert record.other_s >= 0


def test_others_are_not_asked(device: torch.device) -> None:
    method = DenseMethod()
    record = TransformersEngine(tiny_model("llama", device), None, method).prefill(PROMPT).record
    assert method.calls == ["plan", "finish"]
    assert record.encoded == 0


def test_cancelled_between_two_runs(device: torch.device) -> None:
    cancel = Cancellation()
    method = Wanting(cancel)
    engine = TransformersEngine(tiny_model("llama", device), None, method)
    with pytest.raises(CancelledError):
        engine.prefill(PROMPT, cancel=cancel)
    assert method.calls == ["wants", "encoded", "wants", "finish"]
    assert method.outcomes == [None]
