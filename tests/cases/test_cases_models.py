"""Every kind of rotation and attention, end to end: reuse far away equals a run without it."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from kvcmas.engines.transformers import model_info
from kvcmas.engines.transformers.inputs import unpad
from kvcmas.errors import UnsupportedRopeError

from ..engines.tiny import SHAPE, WINDOW, random_ids, tiny_model
from .chats import Chats, context_free, keys_of, moved_runs, relative

LONGEST = 4096
DOCUMENT, TASK, QUESTION = random_ids(120, 1), random_ids(9, 2), random_ids(9, 5)
PLANNER = random_ids(20, 3)
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}
SLIDING_LAST: dict[str, Any] = {"layer_types": ["full_attention", *["sliding_attention"] * 2] * 2}


def model_of(kind: str, device: torch.device) -> PreTrainedModel:
    """A context-free model of a kind: a family, a scaling, or a partial rotation."""
    changes: dict[str, Any] = {"max_position_embeddings": LONGEST}
    if kind in SCALED:
        changes["rope_parameters"] = {"rope_theta": 10000.0, **SCALED[kind]}
        return context_free(tiny_model("llama", device, **changes))
    if kind in ("glm", "stablelm"):
        shape = {**SHAPE, **changes, "num_hidden_layers": 2}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**shape))
        return context_free(model.to(device).eval())
    if kind == "gemma3, a sliding layer last":
        return context_free(tiny_model("gemma3", device, **changes, **SLIDING_LAST))
    return context_free(tiny_model(kind, device, **changes))


@pytest.mark.parametrize(
    ("kind", "method", "shift"),
    [
        ("llama", "kvcmas", 1),
        ("llama", "kvcmas", 1000),
        ("linear", "kvcmas", 200),
        ("yarn", "kvcmas", 3000),
        ("yarn", "fullshared", 1),
        ("llama3", "kvcmas", 1000),
        ("llama3", "fullshared", 1),
        ("qwen2", "kvcmas", 200),
        ("qwen3", "kvcmas", 200),
        ("qwen3", "fullshared", 1000),
        ("gemma3", "kvcmas", 200),
        ("gemma3", "kvcmas", 3000),
        ("gemma3, a sliding layer last", "kvcmas", 200),
        ("gemma3, a sliding layer last", "fullshared", 3000),
        ("mistral", "kvcmas", 200),
        ("glm", "kvcmas", 200),
        ("stablelm", "kvcmas", 200),
    ],
)
def test_a_moved_segment_equals_its_recomputation(
    kind: str, method: str, shift: int, device: torch.device
) -> None:
    """Cases 10, 11, 13 and 14; the segment is five times as long as a sliding window."""
    team = Chats(method, device, model=model_of(kind, device))
    first = team.score(PLANNER + DOCUMENT + TASK, "a")
    start = len(PLANNER) + shift
    ids = random_ids(start, 4) + DOCUMENT + QUESTION
    scored = team.score(ids, "b")
    assert moved_runs(scored.record) == [(start, start + len(DOCUMENT))]
    assert scored.record.reused >= 0.7 * len(DOCUMENT)
    assert len(DOCUMENT) > 4 * WINDOW
    assert team.error(scored, ids) < 1e-3
    # The check can fail: left where they were, the keys would be wrong.
    unmoved = keys_of(first.kv, len(PLANNER), len(PLANNER) + len(DOCUMENT))
    assert relative(unmoved, keys_of(scored.kv, start, start + len(DOCUMENT))) > 0.05


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_length_are_refused_by_name(
    kind: str, device: torch.device
) -> None:
    """Case 10: before any pass of the model."""
    own = {"factor": 2.0, "original_max_position_embeddings": 512}
    if kind == "longrope":
        own |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}  # type: ignore[dict-item]
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **own}
    model = tiny_model("llama", device, rope_parameters=parameters)
    with pytest.raises(UnsupportedRopeError, match=f"{kind}.*length"):
        model_info(model)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("method", ["kvcmas", "fullshared"])
def test_segments_in_another_order(kind: str, method: str, device: torch.device) -> None:
    """Case 6."""
    one, two = random_ids(80, 11), random_ids(70, 12)
    team = Chats(method, device, model=model_of(kind, device))
    team.score(PLANNER + one + two + TASK, "a")
    ids = random_ids(31, 13) + two + one + QUESTION
    scored = team.score(ids, "b")
    assert moved_runs(scored.record) == [(31, 101), (101, 181)]
    assert team.error(scored, ids) < 1e-4
    assert team.settled()


@pytest.mark.parametrize("method", ["kvcmas", "fullshared"])
@pytest.mark.parametrize("lone", [[1, *DOCUMENT], DOCUMENT], ids=["begin token", "none"])
def test_a_lone_document_at_offset_300(method: str, lone: list[int], device: torch.device) -> None:
    """Case 3: the first token of a prompt is never reused elsewhere, nor replaced."""
    team = Chats(method, device, model=model_of("llama", device))
    team.score(lone, "a")
    ids = [1, *random_ids(299, 14), *DOCUMENT, *QUESTION]
    assert ids.count(1) == 1
    scored = team.score(ids, "b")
    start = 300 if lone[0] == 1 else 301
    assert moved_runs(scored.record) == [(start, 420)]
    assert scored.kv.token_ids[: len(ids)].tolist() == ids
    assert team.error(scored, ids) < 1e-4
    back = team.score([1, *DOCUMENT, *QUESTION], "c")
    assert back.record.spans[0].start == 0
    assert team.error(back, [1, *DOCUMENT, *QUESTION]) < 1e-4


@pytest.mark.parametrize("method", ["kvcmas", "fullshared"])
def test_left_padded_rows(method: str, device: torch.device) -> None:
    """Case 28: positions come from the mask; equal to the padded batch within 1e-4."""
    team = Chats(method, device, model=model_of("llama", device))
    team.score(PLANNER + DOCUMENT + TASK, "a")
    rows = [random_ids(33, 21) + DOCUMENT + QUESTION, DOCUMENT[:50] + TASK, TASK[:1]]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor(
        [[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device
    )
    model: Any = team.model
    with torch.no_grad():
        places = (mask.cumsum(1) - 1).clamp_min(0)
        batch = model(input_ids=ids, attention_mask=mask, position_ids=places).logits[:, -1]
    numbers = count()
    for row, own, expected in zip(unpad(ids, mask), rows, batch, strict=True):
        assert row.tolist() == own
        scored = team.engine.prefill(team.prompt(row, f"reader {next(numbers)}"))
        assert relative(scored.logits[0], expected) < 1e-4
        assert scored.record.reused > 20 or len(own) < 10
