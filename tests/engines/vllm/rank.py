"""One rank with a fake cache, and the exact KV that a tiny model gives it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvcmas.core.model_info import ModelInfo
from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers import model_info
from kvcmas.engines.vllm.interfaces import Donors
from kvcmas.engines.vllm.messages import BlockIds, Capture, Lesson, Load, Source, StepWork
from kvcmas.engines.vllm.worker import WorkerSide
from kvcmas.methods.kvcmas import KvcmasConfig

from ...methods.kvcmas_team import SMALL, document, prompt_of
from ...methods.team import model_kv
from ..tiny import tiny_model
from .fake_cache import FakeCache, FakePool

ROLE = 20
TEXT = 100
"""Tokens before a document, and of it."""


@cache
def llama() -> Any:
    return tiny_model("llama", torch.device("cpu"))


@cache
def llama_info() -> ModelInfo:
    return model_info(llama())


def small_config(**options: Any) -> KvcmasConfig:
    return KvcmasConfig(**{**SMALL, **options})


def dense_kv(ids: list[int], dtype: torch.dtype = torch.float32) -> SegmentKV:
    """What a full prefill gives."""
    keys, values = model_kv(llama(), ids)
    positions = torch.arange(len(ids))[None]
    return SegmentKV(keys.to(dtype), values.to(dtype), torch.tensor(ids), positions)


class Rank:
    """A worker side on the heads `[first, first + heads)` of the tiny model.

    pool: in place of `fake`.
    """

    def __init__(
        self,
        pool: Donors | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        first: int = 0,
        heads: int = 2,
        number: int = 0,
        **options: Any,
    ) -> None:
        self.heads, self.dtype = slice(first, first + heads), dtype
        self.info = replace(llama_info(), kv_heads=heads)
        self.cache = FakeCache(self.info.layers, heads, self.info.head_dim, dtype)
        self.fake = FakePool()
        self.pool: Donors = self.fake if pool is None else pool
        self.worker = WorkerSide(self.cache, self.pool, self.info, small_config(**options), number)

    def mine(self, states: Tensor) -> Tensor:
        """The heads of this rank."""
        return states[:, self.heads]

    def prefill(self, kv: SegmentKV) -> BlockIds:
        """Blocks that hold exact KV."""
        blocks = self.cache.allocate(len(kv))
        self.cache.write(blocks, 0, self.mine(kv.keys), self.mine(kv.values))
        return blocks

    def capture(self, name: str, agent: str, kv: SegmentKV, **options: Any) -> None:
        """An agent's whole prompt becomes a donor."""
        blocks = self.prefill(kv)
        self.worker.after_forward(StepWork(captures=[capture(name, agent, kv, blocks, **options)]))
        self.cache.free(blocks)

    def load(self, source: Source) -> tuple[Tensor, Tensor]:
        """What a request's blocks hold at a source's positions."""
        blocks = self.cache.allocate(source.stop)
        self.worker.before_forward(StepWork(loads=[Load("request", source, blocks)]))
        loaded = self.cache.read(blocks, source.start, source.stop)
        self.cache.free(blocks)
        return loaded

    def lesson(self, source: Source, kv: SegmentKV, whole: bool = True) -> None:
        """A reader computed a source's tokens exactly."""
        blocks = self.prefill(kv)
        self.worker.after_forward(StepWork(lessons=[Lesson("lesson", source, whole, blocks)]))
        self.cache.free(blocks)

    def teach(self, count: int, readers: str = "b", first: int = 0) -> None:
        """Documents that `a` is the first to read, and readers compute exactly; then learn."""
        for number in range(first, first + count):
            self.capture(f"a{number}", "a", dense_kv(prompt_of("a", document(number)), self.dtype))
            for reader in readers:
                ids = prompt_of(reader, document(number))
                self.lesson(source_of(f"a{number}", reader), dense_kv(ids, self.dtype))
        assert self.worker.drain(60)


def capture(name: str, agent: str, kv: SegmentKV, blocks: BlockIds, **options: Any) -> Capture:
    made = Capture(
        request_id="request",
        segment=name,
        tenant="",
        agent=agent,
        start=0,
        stop=len(kv),
        token_ids=kv.token_ids.numpy(),
        exact=True,
        block_ids=blocks,
    )
    return replace(made, **options)


def source_of(
    segment: str, reader: str = "b", start: int = ROLE, stop: int = ROLE + TEXT, **options: Any
) -> Source:
    """A document behind a role of the same length as the donor's, unless said otherwise."""
    made = Source("", segment, start, start, stop, reader, ROLE, corrected=True)
    return replace(made, **options)


def taught_rank() -> Rank:
    """A rank that corrects `b`, with a new document of `a`."""
    rank = Rank()
    rank.teach(8)
    rank.capture("new", "a", dense_kv(prompt_of("a", document(40))))
    assert rank.worker.drain(60)
    return rank
