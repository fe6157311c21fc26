"""Whether a plan of computed spans only is the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvcmas.engines.transformers import LoadedModel, SamplingParams, TransformersEngine
from kvcmas.methods import Method
from kvcmas.workflow.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Exactness:
    """error: largest absolute difference of logits. same_tokens: as `model.generate` gives."""

    error: float
    same_tokens: bool


def measure_exactness(
    loaded: LoadedModel, method: Method, prompt: Prompt, tokens: int
) -> Exactness:
    """Answer a prompt greedily by the engine with a method, and by transformers alone.

    method: holds nothing of the prompt, so it plans computed spans only; used for nothing else.
    The logits are compared on the answer that `model.generate` gives.
    """
    model: Any = loaded.model
    engine = TransformersEngine(model, loaded.tokenizer, method)
    result = engine.generate(prompt, SamplingParams(max_tokens=tokens))
    ids = torch.from_numpy(prompt.token_ids)[None].to(model.device)
    with torch.inference_mode():
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    answer = whole.sequences[0, ids.shape[1] :].tolist()
    expected = torch.cat(list(whole.logits)).float()
    # The prompt is its own exact prefix by now: its KV is the one that the engine computed.
    logits = engine.score(prompt, answer).logits
    return Exactness(
        error=float((logits - expected).abs().max()),
        same_tokens=tuple(answer) == result.token_ids,
    )
