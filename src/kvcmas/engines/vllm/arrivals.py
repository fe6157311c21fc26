"""A request as it arrives: who asks, for which tenant, and whether anything may be reused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from kvcmas.engines.vllm.hints import Hints, read_hints
from kvcmas.engines.vllm.options import VllmOptions
from kvcmas.engines.vllm.roles import RoleNames
from kvcmas.engines.vllm.tracked import Tracked
from kvcmas.methods.kvcmas.config import EXACT
from kvcmas.workflow.prompt import Prompt

_MARK = "\x01"  # begins the names of tenants that are not a salt alone


def tracked_of(
    request: Any,
    options: VllmOptions,
    roles: RoleNames,
    refused: str | None,
    *,
    on_cpu: bool = False,
) -> Tracked | None:
    """What is kept of a request; `None` when its prompt is not made of tokens.

    refused: why nothing is reused in this engine at all.
    on_cpu: the model runs on CPUs, where vLLM cannot set a seeded generator back.
    """
    if request.prompt_token_ids is None or request.prompt_is_token_ids is not None:
        return None
    hints = read_hints(request.kv_transfer_params)
    ids = np.array(request.prompt_token_ids, dtype=np.int64)
    exact_tenant = (request.cache_salt or "") in options.exact_tenants
    prompt = Prompt(
        ids,
        agent=hints.agent or roles.name(ids),
        request_id=request.request_id,
        tenant=tenant_of(request),
        dial=EXACT if exact_tenant else hints.dial or options.dial,
    )
    all_exact = exact_tenant or (options.dial == EXACT and prompt.dial == EXACT)
    other = request.pooling_params is not None or request.mm_features or request.resumable
    return Tracked(
        request,
        prompt,
        hints,
        refused or _why_exact(request, hints, on_cpu),
        keeps_nothing=bool(refused or other or all_exact),
        notes=list(hints.problems),
    )


def tenant_of(request: Any) -> str:
    """Requests of different salts, and of different adapters, share nothing."""
    salt, adapter = request.cache_salt or "", request.lora_request
    if adapter is not None:
        return _MARK + json.dumps([salt, adapter.lora_name, adapter.lora_path])
    return _MARK + json.dumps([salt]) if salt.startswith(_MARK) else salt


def _why_exact(request: Any, hints: Hints, on_cpu: bool) -> str | None:
    params = request.sampling_params
    if not hints.reads:
        return "the request asked for no reuse"
    if request.pooling_params is not None or params is None:
        return "not a generation: served exactly"
    if request.mm_features:
        return "images are not shared yet: served exactly"
    if params.prompt_logprobs is not None:
        return "log-probabilities of the prompt need every token computed"
    if request.skip_reading_prefix_cache:
        return "the request does not read the prefix cache"
    if request.resumable:
        return "streaming input is served exactly"
    # vLLM samples in every step of a prefill and sets the generator back in all but the last;
    # torch's generators on CPUs cannot do that, and the engine would end. Measured heads take
    # a step of their own.
    if on_cpu and params.seed is not None and params.temperature > 0:
        return "a seeded request is served exactly on CPUs: vLLM needs its prefill in one step"
    return None
