"""Requests shaped like vLLM's, a block hash of our own, and a coordinator without an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from kvcmas.engines.vllm.coordinator import Coordinator
from kvcmas.engines.vllm.directory import Directory
from kvcmas.engines.vllm.options import VllmOptions
from kvcmas.engines.vllm.roles import RoleNames
from kvcmas.engines.vllm.tally import Tally
from kvcmas.workflow.prompt import TokenIds

BLOCK = 8
METHOD: dict[str, Any] = {
    "min_length": 16,
    "min_prefix": 8,
    "cold_tokens": 0,
    "audit": 0.0,
    "head": 8,
}


def hasher(parent: Any, tokens: Sequence[int], extra: tuple[Any, ...] | None) -> str:
    """A block hash as vLLM makes it: of its parent, its tokens and extra keys."""
    text = repr((parent, list(map(int, tokens)), extra))
    return blake2b(text.encode(), digest_size=8).hexdigest()


def ids(seed: int, count: int) -> list[int]:
    """Token ids that nothing else shares by chance."""
    generator = np.random.default_rng(seed)
    return [int(token) for token in generator.integers(1000, 1_000_000, count)]


def array(tokens: Sequence[int]) -> TokenIds:
    return np.array(tokens, dtype=np.int64)


@dataclass
class Params:
    """Sampling parameters."""

    prompt_logprobs: int | None = None
    seed: int | None = None
    temperature: float = 0.0
    n: int = 1


@dataclass
class PrefillStats:
    """What vLLM counts of a prefill."""

    told: dict[str, int] = field(default_factory=dict)

    def set(self, **numbers: int) -> None:
        self.told = numbers


@dataclass(eq=False)
class FakeRequest:
    """The part of vLLM's request that the coordinator reads."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    lora_request: Any = None
    sampling_params: Any = field(default_factory=Params)
    pooling_params: Any = None
    mm_features: list[Any] = field(default_factory=list)
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    prompt_is_token_ids: Any = None
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    prefill_stats: Any = field(default_factory=PrefillStats)
    block_hashes: list[Any] = field(default_factory=list)
    all_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids or ())
        self.hash_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or ())

    def append(self, token: int) -> None:
        """A token was sampled."""
        self.all_token_ids.append(token)
        self.hash_blocks()

    def hash_blocks(self) -> None:
        """Hashes of full blocks that have none yet, each behind the one before it."""
        for block in range(len(self.block_hashes), self.num_tokens // BLOCK):
            tokens = self.all_token_ids[block * BLOCK : (block + 1) * BLOCK]
            parent = self.block_hashes[-1] if block else None
            salt = (self.cache_salt,) if self.cache_salt and not block else None
            self.block_hashes.append(hasher(parent, tokens, salt))


def request(name: str, tokens: Sequence[int], agent: str | None = None, **more: Any) -> FakeRequest:
    """A request; `agent` and hints go the way that clients send them."""
    hints = {key: more.pop(key) for key in ("dial", "reuse", "warm") if key in more}
    if agent is not None:
        hints["agent"] = agent
    params = {"kvcmas": hints} if hints else None
    return FakeRequest(name, list(tokens), kv_transfer_params=params, **more)


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def no_hit(request: Any) -> int:
    """Nothing in vLLM's own prefix cache."""
    return 0


def coordinator(
    *,
    method: Mapping[str, Any] | None = None,
    clock: Callable[[], float] | None = None,
    token_bytes: int = 1,
    holes: bool = True,
    **options: Any,
) -> Coordinator:
    """A coordinator of one rank; `method` in place of single numbers of METHOD."""
    given = VllmOptions(method={**METHOD, **(method or {})}, **options)
    clock = clock or Clock()
    directory = Directory(given.to_config(), token_bytes, 1, given.tenant_bytes, clock)
    return Coordinator(
        given,
        directory,
        RoleNames(),
        block_size=BLOCK,
        hasher=hasher,
        stats=Tally(),
        holes=holes,
        clock=clock,
    )
