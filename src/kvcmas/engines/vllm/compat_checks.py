"""What of vLLM is not public and needed to try it out: by the self-test and by the doctor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvcmas.engines.vllm.compat import Request, attention_layers


def synthetic_request(name: str, token_ids: list[int], block_size: int) -> Request:
    """A request that no client made, for one sampled token. Its block hashes are made up."""

    def hashes(request: Any) -> list[bytes]:
        done, full = len(request.block_hashes), request.num_tokens // block_size
        return [f"{name}:{block}".encode() for block in range(done, full)]

    return Request(
        request_id=name,
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False
        ),
        pooling_params=None,
        block_hasher=hashes,
    )


def model_answer(sampled: dict[str, list[int]], released: set[str]) -> ModelRunnerOutput:
    """What a model runner returns for a step: tokens by row, and requests with blocks to free."""
    names = list(sampled)
    transfer = KVConnectorOutput(finished_sending=released) if released else None
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=list(sampled.values()),
        kv_connector_output=transfer,
    )


def make_engine(arguments: Sequence[str]) -> Any:
    """An engine in this process, from flags as on vLLM's command line."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm"))
    parsed = parser.parse_args(list(arguments))
    return LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed))


def scheduler_of(engine: Any) -> Any:
    """The scheduler of an engine in this process."""
    return engine.engine_core.engine_core.scheduler


def greedy(tokens: int, hints: dict[str, Any]) -> SamplingParams:
    """Sampling of exactly so many most likely tokens, with the 20 best log-probabilities."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        logprobs=20,
        detokenize=False,
        extra_args={"kv_transfer_params": hints},
    )


def kv_caches_here(
    vllm_config: Any, kv_cache_config: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """KV caches and attention layers by name; empty when the worker is in another process."""
    layers = attention_layers(vllm_config)
    (group,) = kv_cache_config.kv_cache_groups
    caches = {}
    for name in group.layer_names:
        cache = getattr(layers.get(name), "kv_cache", None)
        if not isinstance(cache, torch.Tensor) or not cache.numel():
            return {}, {}
        caches[name] = cache
    return caches, layers


def ordinary_tokens(engine: Any) -> list[int]:
    """The vocabulary without control tokens, or all of it when there is no tokenizer."""
    model = engine.model_config
    size = int(model.get_vocab_size())
    if model.skip_tokenizer_init:
        return list(range(size))
    tokenizer = cached_tokenizer_from_config(model)
    special = {int(token) for token in tokenizer.all_special_ids}
    return [token for token in range(min(size, len(tokenizer))) if token not in special]
