"""What cannot be served is refused before the model runs, or before it is even loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from kvcmas.engines.transformers import SamplingParams, load
from kvcmas.errors import ConfigError, PromptError, UnsupportedModelError, WorkflowError
from kvcmas.methods.registry import create
from kvcmas.workflow.agents import Agent
from kvcmas.workflow.workflow import Workflow

from ..engines.small_files import chat_tokenizer
from ..engines.tiny import LIMIT, random_ids, tiny_model
from .chats import Chats, context_free, moved_runs

DOCUMENT = random_ids(LIMIT - 40, 1)


@pytest.mark.parametrize("method", ["kvcmas", "fullshared", "nonshared"])
@pytest.mark.parametrize("total", [LIMIT - 1, LIMIT, LIMIT + 1])
@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_segment_that_fits_its_donor_alone(
    total: int, most: int, method: str, device: torch.device
) -> None:
    """Case 9: role and segment fill the window up to one token less, wholly, and one too many."""
    options: dict[str, Any] = {"cold_tokens": 0} if method == "kvcmas" else {}
    chats = Chats(method, device, model=context_free(tiny_model("llama", device)), **options)
    chats.score(random_ids(20, 2) + DOCUMENT, "a")
    before = chats.library.store.infos()
    ids = random_ids(total - len(DOCUMENT), 3) + DOCUMENT
    prompt = chats.prompt(ids, "b")
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    with chats.counting() as passes:
        if total + most > LIMIT:
            message = rf"{total} prompt tokens .* the model's window is {LIMIT}"
            with pytest.raises(PromptError, match=message):
                chats.engine.generate(prompt, params)
            with pytest.raises(PromptError, match=message):
                chats.engine.stream(prompt, params)
            assert passes == []
            assert chats.library.store.infos() == before
        else:
            result = chats.engine.generate(prompt, params)
            assert len(result.token_ids) == most
            start = total - len(DOCUMENT)
            expected = [] if method == "nonshared" else [(start, total - 1)]
            assert moved_runs(result.record) == expected
    assert chats.settled()


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v3", "MLA"),
        ("qwen3_next", "linear or recurrent attention"),
        ("mamba", "recurrent"),
        ("t5", "encoder-decoder"),
        ("bert", "no rotary positions"),
        ("llama4_text", "chunked attention"),
    ],
)
def test_models_that_cannot_be_served(model_type: str, reason: str, tmp_path: Path) -> None:
    """From a folder whose weights would fail to load: they are not even read."""
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(UnsupportedModelError) as error:
        load(str(tmp_path))
    assert reason in str(error.value)
    assert model_type in str(error.value)


def test_a_kind_of_model_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mystery"}))
    chat_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(UnsupportedModelError, match="transformers knows no such architecture"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ([Agent("a", reads=("b",)), Agent("b", reads=("a",))], "in a cycle: a reads b reads a"),
        ([Agent("planner"), Agent("critic", reads=("planer",))], "did you mean 'planner'"),
        ([Agent("planner"), Agent("critic", recalls=("nobody",))], "recalls lists 'nobody'"),
    ],
)
def test_workflows_that_cannot_run(agents: list[Agent], message: str) -> None:
    """A workflow is checked when it is made, so none of these ever reaches an engine."""
    with pytest.raises(WorkflowError, match=message):
        Workflow(tuple(agents), context=("A text.",))


def test_a_method_that_nobody_knows(device: torch.device) -> None:
    chats = Chats("kvcmas", device)
    with pytest.raises(ConfigError, match="did you mean 'kvcmas'"):
        create("kvcmass", chats.library.info)
