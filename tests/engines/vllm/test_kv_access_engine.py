"""The paged KV cache of a real engine on CPU, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcmas.engines.vllm.kv_access import KVAccess

from .engine import model_folder

# Importing vLLM warns about its dependencies.
pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

BLOCK_SIZE = 32
TEXT = "The council of the valley met on Tuesday to discuss the bridge over the river. " * 6


@pytest.fixture(scope="module", name="model_folder")
def _model_folder() -> Path:
    return model_folder()


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Any]:
    pytest.importorskip("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        llm = LLM(
            str(model_folder),
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            max_model_len=1024,
        )
        yield llm.llm_engine


@pytest.fixture(scope="module")
def ids(model_folder: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    return list(tokenizer(TEXT)["input_ids"])


def prefill(engine: Any, ids: list[int], name: str) -> tuple[int, ...]:
    """Run one step of a request; it goes on, so its blocks stay."""
    from vllm import SamplingParams

    engine.add_request(name, {"prompt_token_ids": ids}, SamplingParams(max_tokens=8, temperature=0))
    engine.step()
    scheduler = engine.engine_core.engine_core.scheduler
    (running,) = scheduler.running
    (blocks,) = scheduler.kv_cache_manager.get_block_ids(running.request_id)
    return tuple(blocks)


def finish(engine: Any) -> list[int]:
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return list(outputs[-1].outputs[0].token_ids)


@torch.no_grad()
def exact(model_folder: Path, ids: list[int]) -> tuple[Tensor, Tensor]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    cache = model(torch.tensor([ids]), use_cache=True).past_key_values
    keys = torch.cat([layer.keys for layer in cache.layers])
    values = torch.cat([layer.values for layer in cache.layers])
    return keys, values


def test_a_prompt_is_read_and_written(engine: Any, model_folder: Path, ids: list[int]) -> None:
    context = engine.vllm_config.compilation_config.static_forward_context
    caches = {name: layer.kv_cache for name, layer in context.items()}
    access = KVAccess(caches, context, BLOCK_SIZE, engine.vllm_config.cache_config.num_gpu_blocks)
    assert (access.layers, access.kv_heads, access.head_dim) == (30, 3, 64)
    assert len(ids) % BLOCK_SIZE and len(ids) > 2 * BLOCK_SIZE

    blocks = prefill(engine, ids, "first")
    keys, values = access.read(blocks, 0, len(ids))
    exact_keys, exact_values = exact(model_folder, ids)
    assert keys.shape == exact_keys.shape
    torch.testing.assert_close(keys, exact_keys, atol=1e-4, rtol=0)
    torch.testing.assert_close(values, exact_values, atol=1e-4, rtol=0)
    answer = finish(engine)

    # What was read, put into the blocks of a request whose own KV was overwritten, gives the
    # same answer; a part of it in the middle of blocks leaves everything else alone.
    engine.reset_prefix_cache()
    blocks = prefill(engine, ids, "second")
    access.write(blocks, 0, torch.zeros_like(keys), torch.zeros_like(values))
    assert not access.read(blocks, 0, len(ids))[0].any()
    access.write(blocks, 0, keys, values)
    access.write(blocks, 37, keys[:, :, 37:70], values[:, :, 37:70])
    for given, back in zip((keys, values), access.read(blocks, 0, len(ids)), strict=True):
        assert torch.equal(given, back)
    assert finish(engine) == answer
    assert len(answer) == 8
