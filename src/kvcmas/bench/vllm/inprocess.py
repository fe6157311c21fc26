"""vLLM's engine in this process: step by step, with its scheduler and blocks in sight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcmas.bench.vllm.answers import Answer
from kvcmas.engines.vllm.coordinator import Coordinator
from kvcmas.engines.vllm.names import CONNECTOR, CONNECTOR_MODULE, PARAMS_KEY, SCHEDULER
from kvcmas.engines.vllm.records import VllmRecord
from kvcmas.engines.vllm.tracked import Tracked
from kvcmas.methods.kvcmas.planner import Planned

LOGPROBS = 20
_BLOCK = 32
_SETTLE_STEPS = 6


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. hints: of kvcmas. salt: names the tenant. preset: a plan to follow.

    params: more fields of vLLM's `SamplingParams`. extra: more of its `extra_args`.
    """

    ids: Sequence[int]
    tokens: int = 8
    logprobs: int | None = LOGPROBS
    hints: Mapping[str, Any] | None = None
    salt: str | None = None
    preset: Planned | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


class InProcess:
    """One engine, greedy.

    Args:
        options: of kvcmas; `None` for vLLM alone.
        more: further arguments of `vllm.LLM`.
    """

    def __init__(self, model: str, options: Mapping[str, Any] | None = None, **more: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        arguments: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": _BLOCK,
            "max_model_len": 4096,
            "max_logprobs": LOGPROBS,
            "async_scheduling": False,
            **more,
        }
        if options is not None:
            arguments["scheduler_cls"] = SCHEDULER
            arguments["kv_transfer_config"] = KVTransferConfig(
                kv_connector=CONNECTOR,
                kv_connector_module_path=CONNECTOR_MODULE,
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=dict(options),
            )
        self.llm = LLM(model, **arguments)
        self._asked = 0
        self._own: dict[str, str] = {}
        self._preempted: dict[str, int] = {}

    # looking in --------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler, or kvcmas's."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def coordinator(self) -> Coordinator:
        """kvcmas's side of the scheduler."""
        coordinator: Coordinator = self.scheduler.connector.coordinator
        return coordinator

    @property
    def worker(self) -> Any:
        """kvcmas's side of the worker."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker

    @property
    def tokenizer(self) -> Any:
        """The model's."""
        return self.llm.get_tokenizer()

    @property
    def pool(self) -> Any:
        """vLLM's blocks."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return int(self.pool.get_num_free_blocks())

    def tracked(self, name: str) -> Tracked | None:
        """What kvcmas knows of a request in flight."""
        return self.coordinator.requests.get(self._own.get(name, ""))

    def generated(self, name: str) -> int:
        """Tokens that a request in flight has generated."""
        return int(self.scheduler.requests[self._own[name]].num_output_tokens)

    def budget(self, tokens: int | None = None) -> int:
        """Most tokens of a step; gives the old number, and sets a new one."""
        old = int(self.scheduler.max_num_scheduled_tokens)
        if tokens is not None:
            self.scheduler.max_num_scheduled_tokens = tokens
        return old

    # working -----------------------------------------------------------------------------------

    def start(self, ask: Ask) -> str:
        """Hand in a request; nothing is computed before `step`."""
        from vllm import SamplingParams

        self._asked += 1
        name = f"bench-{self._asked}"
        extra = dict(ask.extra)
        if ask.hints is not None:
            extra["kv_transfer_params"] = {PARAMS_KEY: dict(ask.hints)}
        params = SamplingParams(
            temperature=0.0,
            max_tokens=ask.tokens,
            logprobs=ask.logprobs,
            extra_args=extra or None,
            **ask.params,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(ask.ids)}
        if ask.salt is not None:
            prompt["cache_salt"] = ask.salt
        before = set(self.scheduler.requests)
        self.llm.llm_engine.add_request(name, prompt, params)
        (own,) = set(self.scheduler.requests) - before
        self._own[name], self._preempted[name] = own, 0
        if ask.preset is not None:
            self.coordinator.presets[own] = ask.preset
        return name

    def step(self) -> dict[str, Answer]:
        """One step of the engine; the requests that ended in it."""
        outputs = self.llm.llm_engine.step()
        for name in self._preempted:
            request = self.scheduler.requests.get(self._own[name])
            if request is not None:
                self._preempted[name] = request.num_preemptions
        return {output.request_id: self._answer(output) for output in outputs if output.finished}

    @property
    def busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def finish(self) -> dict[str, Answer]:
        """Step until all requests are answered and nothing is held for captures."""
        answers: dict[str, Answer] = {}
        while self.busy:
            answers |= self.step()
        self.settle()
        return answers

    def settle(self) -> None:
        """Step on until captures behind the last answers are done."""
        core = self.llm.llm_engine.engine_core.engine_core
        for _ in range(_SETTLE_STEPS):
            if self.scheduler.has_requests():
                core.step_fn()

    def ask(self, *asks: Ask, meanwhile: Callable[[], None] | None = None) -> list[Answer]:
        """Answers to requests that are handed in at once.

        meanwhile: called behind every step.
        """
        names = [self.start(ask) for ask in asks]
        answers: dict[str, Answer] = {}
        while self.busy:
            answers |= self.step()
            if meanwhile is not None:
                meanwhile()
        self.settle()
        return [answers[name] for name in names]

    def abort(self, name: str) -> None:
        """Give a request up."""
        self.llm.llm_engine.abort_request([name])
        self._own.pop(name, None)
        self._preempted.pop(name, None)

    def forget_prefixes(self) -> None:
        """Empty vLLM's own prefix cache; donors stay."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM's prefix cache is in use")

    def _answer(self, output: Any) -> Answer:
        one = output.outputs[0]
        record = VllmRecord.from_params(output.kv_transfer_params)
        self._own.pop(output.request_id, None)
        return Answer(
            tokens=tuple(one.token_ids),
            logprobs=tuple(
                {int(token): float(known.logprob) for token, known in row.items()}
                for row in one.logprobs or ()
            ),
            cached=int(output.num_cached_tokens or 0),
            computed=record.computed if record is not None else None,
            reused=record.reused if record is not None else None,
            preemptions=self._preempted.pop(output.request_id, 0),
        )
