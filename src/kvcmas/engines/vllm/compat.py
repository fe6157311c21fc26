"""Everything of vLLM that is not public, and the check that it is still as it was.

vLLM marks its connector and scheduler interfaces as experimental. All imports of private names
stand here (in `compat_checks` those for trying vLLM out), and `scheduler_problems` compares them
with what this package was written against.

    connector path   (KVConnectorBase_V1)   reuse in one run behind the prompt's beginning
    scheduler path   (Scheduler subclass)   reuse anywhere: needs what is checked below
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from packaging.version import InvalidVersion, Version
from vllm import SamplingParams
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvcmas.engines.vllm.roles import RoleNames
from kvcmas.errors import UnsupportedError
from kvcmas.workflow.prompt import TokenIds

__all__ = [
    "TESTED",
    "AsyncScheduler",
    "EngineCoreOutputs",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorWorkerMetadata",
    "ModelRunnerOutput",
    "NewRequestData",
    "Request",
    "RequestStatus",
    "Scheduler",
    "SchedulerOutput",
    "attention_layers",
    "block_hasher",
    "bytes_per_token",
    "check_version",
    "handed_over",
    "on_cpu",
    "rider_request",
    "role_names",
    "scheduler_problems",
    "take_back",
    "tensor_rank",
    "unsupported",
    "vllm_version",
]

TESTED = ("0.32.0",)
"""Versions of vLLM that the whole test suite was run with."""

_SERIES = ((0, 32), (0, 33))


def check_version(version: str = vllm_version) -> None:
    """Raise UnsupportedError for a vLLM whose interfaces nobody has looked at."""
    try:
        series = Version(version).release[:2]
    except InvalidVersion:
        series = ()
    if series not in _SERIES:
        known = ", ".join(".".join(map(str, one)) + ".x" for one in _SERIES)
        raise UnsupportedError(
            f"this kvcmas works with vLLM {known} (tested with {', '.join(TESTED)}), found "
            f"{version}; install a known version, or serve without kvcmas"
        )


def scheduler_problems(scheduler: type[Scheduler] = Scheduler) -> list[str]:
    """What differs from the scheduler that this package extends; empty when nothing does."""
    expected = {
        "_reserve_prefill_lookahead": ["self", "request", "num_computed_tokens", "num_new_tokens"],
        "_build_kv_connector_meta": ["self", "connector", "scheduler_output"],
        "_update_after_schedule": ["self", "scheduler_output"],
        "_preempt_request": ["self", "request", "timestamp", "drop_stale_output"],
        "update_from_output": ["self", "scheduler_output", "model_runner_output"],
    }
    problems = []
    for name, parameters in expected.items():
        method = getattr(scheduler, name, None)
        if method is None:
            problems.append(f"Scheduler.{name} is missing")
        elif (found := list(inspect.signature(method).parameters)) != parameters:
            problems.append(f"Scheduler.{name} takes {found}, expected {parameters}")
    if problems:
        return problems
    source = inspect.getsource(scheduler.schedule)
    order = [
        "token_budget = self.max_num_scheduled_tokens",
        "self._reserve_prefill_lookahead(",
        "num_running >= self.max_num_active_reqs",
        "self.connector.get_num_new_matched_tokens(",
        "self._reserve_prefill_lookahead(",
        "self.connector.update_state_after_alloc(",
        "self._build_kv_connector_meta(",
        "self._update_after_schedule(",
    ]
    position = 0
    for step in order:
        position = source.find(step, position)
        if position < 0:
            problems.append(f"Scheduler.schedule does not call {step!r} where it was expected")
            break
        position += len(step)
    fields = inspect.signature(SchedulerOutput).parameters
    problems += [
        f"SchedulerOutput has no {name}"
        for name in ("has_sync_kv_loads", "num_scheduled_tokens", "total_num_scheduled_tokens")
        if name not in fields
    ]
    updates = inspect.getsource(scheduler.update_from_output)
    if "if request is None or request.is_finished():" not in updates:
        problems.append("Scheduler.update_from_output no longer skips rows that it does not know")
    if "sampled_token_ids[req_index] if sampled_token_ids else []" not in updates:
        problems.append("Scheduler.update_from_output takes sampled tokens from somewhere else")
    return problems


def unsupported(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why nothing can be reused under a configuration, or `None`."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        return f"the model's KV cache is not one group of full attention: {', '.join(kinds)}"
    spec = groups[0].kv_cache_spec
    if getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        return "the model attends to a window only"
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallel is not supported"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        return "context parallel is not supported"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "context parallel is not supported"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is not supported"
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off, and approximate blocks could not be told from exact ones"
    return None


def bytes_per_token(kv_cache_config: Any) -> int:
    """Bytes of one token's KV in all layers of one rank."""
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    return int(spec.page_size_bytes // spec.block_size * len(group.layer_names))


def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """The model's attention layers by name, as the KV caches are named."""
    return dict(vllm_config.compilation_config.static_forward_context)


def block_hasher(vllm_config: Any) -> Callable[[Any, Any, tuple[Any, ...] | None], Any]:
    """vLLM's own function from a parent hash, a block's tokens and extra keys to a hash."""
    function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)

    def hasher(parent: Any, token_ids: Any, extra: tuple[Any, ...] | None) -> Any:
        return hash_block_tokens(function, parent, token_ids, extra)

    return hasher


def rider_request(
    request: Request, name: str, block_ids: tuple[list[int], ...], start: int
) -> NewRequestData:
    """A row of the batch that computes a piece of a request's prompt, and nothing else.

    It stands for no request: the workers forget it behind the step, and what they sample for it
    is dropped by the scheduler, which knows no request of that name.
    """
    return NewRequestData(
        req_id=name,
        prompt_token_ids=list(request.prompt_token_ids or ()),
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
        pooling_params=None,
        block_ids=block_ids,
        num_computed_tokens=start,
        lora_request=request.lora_request,
        prefill_token_ids=list(request.all_token_ids),
    )


def handed_over(
    request: Request, block_ids: tuple[list[int], ...], uses_mrope: bool
) -> NewRequestData:
    """A running request as a new one, for a model runner that keeps positions on the device."""
    return NewRequestData.from_request(
        request, block_ids, list(request.all_token_ids), uses_mrope=uses_mrope
    )


def take_back(request: Request, output: ModelRunnerOutput) -> None:
    """Drop what was sampled for a request in a synchronous step: its prefill is not over.

    As after a failed load, the workers drop it when they see how many tokens were generated.
    """
    if output.sampled_token_ids:
        output.sampled_token_ids[output.req_id_to_index[request.request_id]] = []
    request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)


def on_cpu() -> bool:
    """Whether the model runs on CPUs."""
    return bool(current_platform.is_cpu())


def tensor_rank() -> int:
    """This worker's place among the tensor parallel ranks."""
    return int(get_tensor_model_parallel_rank())


def role_names(vllm_config: Any) -> RoleNames:
    """Names agents with the model's own tokenizer and chat template, as far as there are any."""
    model = vllm_config.model_config
    if model.skip_tokenizer_init:
        return RoleNames()
    tokenizer = cached_tokenizer_from_config(model)
    return RoleNames(_end_ids(tokenizer), _default_prefix(tokenizer))


def _end_ids(tokenizer: Any) -> list[int]:
    """Special tokens that may end a message: all but those that begin or fill something."""
    ids = [int(token) for token in tokenizer.all_special_ids]
    other = ("start", "begin", "bos", "<s>", "pad", "unk")
    names = map(str, tokenizer.convert_ids_to_tokens(ids))
    return [
        token
        for token, name in zip(ids, names, strict=True)
        if not any(word in name.lower() for word in other)
    ]


def _default_prefix(tokenizer: Any) -> TokenIds | None:
    """What the template puts in front of a conversation without a system message."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    one, other = (
        np.array(
            tokenizer.apply_chat_template([{"role": "user", "content": text}], return_dict=False)
        )
        for text in ("0", "A")
    )
    length = min(len(one), len(other))
    return one[: int(np.argmax(one[:length] != other[:length]))]
