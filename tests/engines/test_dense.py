"""A plan of computed spans only is what transformers does by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcmas.engines.transformers.engine import TransformersEngine
from kvcmas.engines.transformers.sampling import SamplingParams
from kvcmas.workflow.plan import Compute, Plan
from kvcmas.workflow.prompt import Prompt

from .fake_methods import DenseMethod
from .tiny import FAMILIES, LIMIT, SLIDING, WINDOW, random_ids, tiny_model

ATTENTION = ("sdpa", "eager")
CASES = [(family, attention) for family in FAMILIES for attention in ATTENTION]


def reference(model: Any, ids: list[int]) -> tuple[torch.Tensor, Any]:
    """Logits of the last token, and the cache, of a plain forward pass."""
    with torch.no_grad():
        output = model(torch.tensor([ids], device=model.device), use_cache=True, logits_to_keep=1)
    # The output's field was renamed between transformers 5.19 and 5.24.
    return output.logits[0, -1], output["cache" if "cache" in output else "past_key_values"]


@pytest.mark.parametrize(("family", "attention"), CASES)
@pytest.mark.parametrize("tokens", [1, WINDOW, 67])
def test_first_prefill_is_bit_identical(
    family: str, attention: str, tokens: int, device: torch.device
) -> None:
    model, ids = tiny_model(family, device, attention), random_ids(tokens)
    expected, cache = reference(model, ids)
    # Free room in the buffers, which makes the views of what is filled non-contiguous.
    method = DenseMethod()
    engine = TransformersEngine(model, None, method)
    result = engine.generate(ids, SamplingParams(max_tokens=9, ignore_eos=True))
    assert result.token_ids[0] == int(expected.argmax())
    prefill = TransformersEngine(model, None, DenseMethod()).prefill(ids)
    assert torch.equal(prefill.logits[0], expected)
    assert method.last.computed == ((0, tokens + 8),)
    assert method.last.exact
    for layer, reference_layer in enumerate(cache.layers):
        keys, values = reference_layer.keys, reference_layer.values
        kept = keys.shape[2]
        # transformers keeps the window of a sliding layer only.
        assert kept == tokens or family in SLIDING
        for kv in (prefill.kv, method.last.kv.slice(0, tokens)):
            assert torch.equal(kv.keys[layer, :, tokens - kept :], keys[0])
            assert torch.equal(kv.values[layer, :, tokens - kept :], values[0])


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_generation_equals_generate(family: str, attention: str, device: torch.device) -> None:
    model, ids = tiny_model(family, device, attention), random_ids(41)
    plain: Any = model
    output = plain.generate(
        torch.tensor([ids], device=device),
        max_new_tokens=32,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    expected = output.sequences[0, 41:].tolist()
    engine = TransformersEngine(model, None, DenseMethod())
    result = engine.generate(ids, SamplingParams(max_tokens=32))
    assert list(result.token_ids) == expected
    scored = engine.score(ids, expected)
    logits = torch.cat(list(output.logits))
    assert scored.logits.dtype == torch.float32
    torch.testing.assert_close(scored.logits, logits, atol=1e-4, rtol=0)


class SplitMethod(DenseMethod):
    """Several computed spans in a row."""

    def plan(self, prompt: Prompt) -> Plan:
        return Plan(len(prompt), (Compute(0, 5), Compute(5, 6), Compute(6, len(prompt))))


def test_computed_spans_in_a_row_are_one_pass(device: torch.device) -> None:
    model, ids = tiny_model("gemma3", device), random_ids(50)
    whole = TransformersEngine(model, None, DenseMethod()).prefill(ids)
    split = TransformersEngine(model, None, SplitMethod()).prefill(ids)
    assert torch.equal(whole.logits, split.logits)
    assert torch.equal(whole.kv.keys, split.kv.keys)
    assert split.record.passes == 1
    assert [span.computed for span in split.record.spans] == [5, 1, 44]


def test_score_agrees_with_a_whole_forward(device: torch.device) -> None:
    model, ids = tiny_model("gemma3", device), random_ids(60)
    engine = TransformersEngine(model, None, DenseMethod())
    with torch.no_grad():
        expected = model(torch.tensor([ids], device=device)).logits[0]
    scored = engine.score(ids[:33], ids[33:])
    assert scored.logits.shape == (27, model.config.vocab_size)
    torch.testing.assert_close(scored.logits, expected[32:59], atol=1e-4, rtol=0)
    assert len(scored.kv) == 59
    assert engine.score(ids[:33], ids[33:34]).logits.shape[0] == 1


def test_prompt_up_to_the_window(device: torch.device) -> None:
    engine = TransformersEngine(tiny_model("llama", device), None, DenseMethod())
    result = engine.generate(random_ids(LIMIT - 1), SamplingParams(max_tokens=1))
    assert len(result.token_ids) == 1
