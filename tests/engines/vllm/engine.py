"""A real engine with kvcmas on CPU, small enough for tests. One in a process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kvcmas.engines.transformers.gguf import convert_gguf
from kvcmas.engines.transformers.sources import resolve
from kvcmas.engines.vllm.records import VllmRecord
from kvcmas.methods.kvcmas.planner import Planned
from kvcmas.methods.tiling import plan_of
from kvcmas.workflow.plan import Plan, Reuse

BLOCK = 32
LENGTH = 450
SAME = 1e-5
"""Log-probabilities of one prompt alone that differ by less are the same; up to 480 tokens the
difference is 0.0."""
NEAR = 5e-5
"""The same for other batches than before: vLLM's kernels round otherwise for other numbers of
rows, which makes up to 2.5e-5, also when only its own prefix cache is used."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
HOLES = "kvcmas.engines.vllm.scheduler.KvcmasScheduler"
ASYNC_HOLES = "kvcmas.engines.vllm.scheduler.KvcmasAsyncScheduler"

PLANNER = "You are the planner of the team. Make a plan before anything is written."
CRITIC = "You are the critic. Look for mistakes in what others wrote, and be strict. Never praise."
WRITER = "You write."


@dataclass(frozen=True)
class Ask:
    """One request. plan: what it reuses, instead of what would be found."""

    ids: Sequence[int]
    plan: Plan | None = None
    salt: str | None = None
    hints: Any = None
    tokens: int = 6
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came of it. log_probs: of the 5 best tokens at each step. output: vLLM's own."""

    ids: list[int]
    log_probs: list[dict[int, float]]
    cached: int
    record: VllmRecord
    output: Any

    def difference(self, other: Answer) -> float:
        """Largest difference of a log-probability; the same tokens are required."""
        assert self.ids == other.ids
        return max(
            abs(value - theirs[token])
            for mine, theirs in zip(self.log_probs, other.log_probs, strict=True)
            for token, value in mine.items()
            if token in theirs
        )


class Server:
    """vLLM in this process: its parts, and requests that are run to their end."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.coordinator = self.scheduler.connector.coordinator
        self.steps: list[dict[str, int]] = []
        self.preempted: list[str] = []
        self._names = 0

    @property
    def worker(self) -> Any:
        """The worker's side, which is in this process too."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def donors(self) -> list[str]:
        return [info.id for info in self.coordinator.directory.library.store.infos()]

    def chat(self, role: str, text: str, task: str) -> list[int]:
        """Token ids of a conversation's first turn."""
        messages = [
            {"role": "system", "content": role},
            {"role": "user", "content": f"{text}\n\n{task}"},
        ]
        tokenizer = self.llm.get_tokenizer()
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        )

    def submit(self, ask: Ask) -> str:
        """Queue a request; returns its id in the scheduler."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompt: dict[str, Any] = {"prompt_token_ids": list(ask.ids)}
        if ask.salt is not None:
            prompt["cache_salt"] = ask.salt
        settings: dict[str, Any] = {
            "temperature": 0,
            "logprobs": 5,
            "max_tokens": ask.tokens,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        if ask.hints is not None:
            settings["extra_args"] = {"kv_transfer_params": {"kvcmas": ask.hints}}
        self._names += 1
        name: str = self.engine.add_request(
            f"ask-{self._names}", prompt, SamplingParams(**(settings | dict(ask.more)))
        )
        if ask.plan is not None:
            mine = [one for one in self.coordinator.requests if one.endswith(name)]
            assert mine
            self.coordinator.presets.update({one: Planned(ask.plan, {}) for one in mine})
        return name

    def run(self, *asks: Ask) -> list[Answer]:
        """Run requests together, until nothing of them is left in the engine."""
        self.steps.clear()
        self.preempted.clear()
        for ask in asks:
            self.submit(ask)
        return self.finish()

    def finish(self) -> list[Answer]:
        """Go on until all requests have ended; their answers in the order of submission."""
        outputs: dict[int, Any] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    outputs[int(output.request_id.removeprefix("ask-"))] = output
        self.settle()
        self.coordinator.presets.clear()  # those of requests that are served exactly
        return [_answer(outputs[name]) for name in sorted(outputs)]

    def one(self, ids: Sequence[int], plan: Plan | None = None, **more: Any) -> Answer:
        """Run one request alone; `more` are fields of `Ask`."""
        (answer,) = self.run(Ask(ids, plan, **more))
        return answer

    def settle(self) -> None:
        """Go on until what finished requests left behind is captured, and learned from."""
        for _ in range(4):
            if self.scheduler.has_requests():
                self.core.step_fn()
        alone = self.scheduler.vllm_config.parallel_config.world_size == 1
        if alone and self.worker is not None:  # there is none where nothing can be reused
            assert self.worker.drain(60)

    def forget_blocks(self) -> None:
        """Empty vLLM's own prefix cache; donors stay."""
        assert self.llm.reset_prefix_cache()

    @property
    def scheduled(self) -> int:
        """Tokens of all rows in the steps of the last `run`."""
        return sum(sum(step.values()) for step in self.steps)

    @contextmanager
    def corrupted(self, segment: str, start: int, stop: int) -> Iterator[None]:
        """Meanwhile these tokens of a donor hold other keys and values."""
        donor = self.worker._pool.peek(segment)
        kept = donor.keys.clone(), donor.values.clone()
        for tensor in (donor.keys, donor.values):
            tensor[:, :, start:stop] *= -1.5
        try:
            yield
        finally:
            for tensor, old in zip((donor.keys, donor.values), kept, strict=True):
                tensor.copy_(old)

    def check_idle(self, free_blocks: int) -> None:
        """Nothing is left of any request."""
        assert self.free_blocks == free_blocks
        assert not self.coordinator.requests
        assert not self.coordinator.presets
        library = self.coordinator.directory.library
        assert not library.pinned()
        library.check_integrity()
        assert not self.scheduler.requests


def _answer(output: Any) -> Answer:
    (first, *_) = output.outputs
    record = VllmRecord.from_params(output.kv_transfer_params)
    assert record is not None
    return Answer(
        list(first.token_ids),
        [{token: one.logprob for token, one in step.items()} for step in first.logprobs or ()],
        output.num_cached_tokens,
        record,
        output,
    )


def model_folder() -> Path:
    """The demo's model as a folder that vLLM reads."""
    origin = resolve("demo")
    assert origin.gguf is not None
    folder = convert_gguf(origin.gguf).folder
    assert folder is not None
    return folder


@contextmanager
def serving(
    options: Mapping[str, Any] | None = None,
    *,
    scheduler: str | None = HOLES,
    holes: bool = True,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Iterator[Server]:
    """An engine with options of kvcmas. scheduler: `None` for vLLM's own.

    holes: whether a scheduler of kvcmas is expected to pass its self-test.
    """
    pytest.importorskip("vllm")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, **(environment or {})}.items():
            patch.setitem(os.environ, name, value)
        from vllm import LLM
        from vllm.config import KVTransferConfig

        settings: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": 2048,
            "async_scheduling": False,
            "disable_log_stats": False,
        }
        if scheduler is not None:
            settings["scheduler_cls"] = scheduler
        llm = LLM(
            str(model_folder()),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvcmasConnector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=dict(options or {}),
            ),
            **{**settings, **arguments},
        )
        server = Server(llm)
        _watch(server, patch)
        assert server.coordinator.holes == (holes and scheduler is not None)
        yield server
        server.engine.engine_core.shutdown()


def _watch(server: Server, patch: pytest.MonkeyPatch) -> None:
    """Note how many tokens of which row each step computes, and what is preempted."""
    schedule = server.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        server.steps.append(dict(output.num_scheduled_tokens))
        return output

    patch.setattr(server.scheduler, "schedule", watched)
    preempt = server.scheduler._preempt_request

    def preempted(request: Any, *args: Any, **kwargs: Any) -> None:
        server.preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    patch.setattr(server.scheduler, "_preempt_request", preempted)


def text(number: int) -> str:
    """A report of about 330 tokens; there are 8."""
    folder = files("kvcmas.bench.demo") / "data" / "earlier"
    names = sorted(one.name for one in folder.iterdir())
    return (folder / names[number]).read_text(encoding="utf-8").strip()


def own(segment: str, length: int, *spans: tuple[int, int], **more: Any) -> Plan:
    """A plan that fills these spans with the prompt's own KV, which a donor holds as a whole."""
    return plan_of(length, [Reuse(start, stop, segment, start, **more) for start, stop in spans])
