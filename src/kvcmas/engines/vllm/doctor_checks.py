"""The comparisons that the doctor makes in a running vLLM engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Any

import torch

from kvcmas.engines.vllm.compat import scheduler_problems
from kvcmas.engines.vllm.compat_checks import (
    greedy,
    kv_caches_here,
    ordinary_tokens,
    scheduler_of,
)
from kvcmas.engines.vllm.coordinator import Coordinator
from kvcmas.engines.vllm.doctor_memory import free_bytes, memory_notes
from kvcmas.engines.vllm.doctor_report import CheckName, VllmCheck, VllmReport
from kvcmas.engines.vllm.kv_access import KVAccess
from kvcmas.engines.vllm.names import PARAMS_KEY
from kvcmas.engines.vllm.selftest import try_holes
from kvcmas.errors import UnsupportedEngineError
from kvcmas.methods.kvcmas.planner import Planned
from kvcmas.methods.tiling import plan_of
from kvcmas.workflow.plan import Plan, Reuse

ANSWER = 8
"""Tokens that are generated and compared."""

LONGEST, SHORTEST = 480, 64
"""Tokens of the prompts. Beyond about 600, vLLM's own CPU kernels differ by the chunk's size."""

_TOLERANCES = MappingProxyType({torch.float32: 1e-4})
_HALF = 1e-2
_NOISE = 4  # times what vLLM alone shows

Parts = tuple[tuple[float, float], ...]
_ONE: Parts = ((0.12, 0.93),)
_THREE: Parts = ((0.1, 0.3), (0.4, 0.61), (0.7, 0.95))


@dataclass(frozen=True, slots=True)
class Answer:
    """Generated tokens, and log-probabilities of the best ones at each step."""

    ids: tuple[int, ...]
    log_probs: tuple[dict[int, float], ...]


def difference(one: Answer, other: Answer) -> float:
    """Largest difference of a log-probability, up to the first token that differs.

    The tokens behind it have another context. Of a token that only one of them lists, at least
    the difference to the other's least likely one counts.
    """
    largest = 0.0
    pairs = zip(one.ids, other.ids, one.log_probs, other.log_probs, strict=False)
    for mine, theirs, ours, others in pairs:
        for here, there in ((ours, others), (others, ours)):
            best = sorted(here, key=lambda token: -here[token])[:5]
            for token in best:
                known = there.get(token)
                gap = here[token] - (min(there.values()) if known is None else known)
                # Written so that what is not a number counts as a difference.
                largest = max(largest, abs(gap) if abs(gap) >= 0 else inf)
        if mine != theirs:
            break
    return largest


class Examination:
    """One engine with kvcmas, whose scheduler is in this process."""

    def __init__(self, engine: Any, seed: int, progress: Callable[[str], None]) -> None:
        self.engine, self.seed, self.progress = engine, seed, progress
        self.scheduler = scheduler_of(engine)
        self.config = self.scheduler.vllm_config
        self.coordinator: Coordinator = self.scheduler.connector.coordinator
        self._asked = 0

    def run(self, report: VllmReport) -> VllmReport:
        """All that can be said of the engine."""
        described = self._describe(report)
        if self.coordinator.refused is not None:
            reasons = (self.coordinator.refused,)
            return described.model_copy(update={"verdict": "unsupported", "reasons": reasons})
        checks = [*self._scheduler_checks()]
        notes = list(memory_notes(self.coordinator.options, described.free_bytes, described.device))
        layout = self._layout()
        if layout is None:
            notes.append("each rank has tried its own KV layout at its start; not tried again here")
        else:
            checks.append(layout)
        noise = None
        if self.coordinator.holes:
            noise, compared = self._compare()
            checks += compared
        else:
            notes.append(
                "prefills with holes are off, so they were not compared; one run behind a prompt's "
                "beginning is reused all the same"
            )
        if not described.tested:
            notes.append(f"the project's own tests were not run with vLLM {described.vllm}")
        return described.model_copy(
            update={
                "verdict": "supported" if all(check.passed for check in checks) else "wrong",
                "checks": tuple(checks),
                "notes": tuple(notes),
                "noise": noise,
            }
        )

    def _describe(self, report: VllmReport) -> VllmReport:
        model, cache = self.config.model_config, self.config.cache_config
        parallel = self.config.parallel_config
        options = self.coordinator.options
        device = str(self.config.device_config.device_type)
        return report.model_copy(
            update={
                "architecture": str(model.architecture),
                "model_type": str(model.hf_text_config.model_type),
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": device,
                "scheduler": type(self.scheduler).__name__,
                "ranks": int(parallel.world_size),
                "layers": int(model.get_num_layers(parallel)),
                "kv_heads": int(model.get_num_kv_heads(parallel)),
                "head_dim": int(model.get_head_size()),
                "block_size": int(cache.block_size),
                "window": int(model.max_model_len),
                "cache_tokens": int(cache.num_gpu_blocks) * int(cache.block_size),
                "donor_bytes": options.device_bytes + options.host_bytes,
                "free_bytes": free_bytes(device),
            }
        )

    def _scheduler_checks(self) -> Iterator[VllmCheck]:
        self.progress("the scheduler is tried out")
        problems = scheduler_problems()
        yield VllmCheck(name="scheduler", passed=not problems, detail="; ".join(problems))
        started = time.perf_counter()
        problem = try_holes(self.scheduler)
        took = f"{(time.perf_counter() - started) * 1000:.0f} ms"
        yield VllmCheck(name="self-test", passed=problem is None, detail=problem or took)

    def _layout(self) -> VllmCheck | None:
        """Write random KV to the last two blocks, which nobody uses, read it back, restore them."""
        self.progress("KV is written and read back")
        caches, layers = kv_caches_here(self.config, self.scheduler.kv_cache_config)
        if not caches:
            return None
        size, blocks = (
            self.config.cache_config.block_size,
            self.scheduler.kv_cache_config.num_blocks,
        )
        access = KVAccess(caches, layers, size, blocks)
        ids, start, stop = [blocks - 1, blocks - 2], size // 2, 2 * size - 1
        saved = access.read(ids, 0, 2 * size)
        generator = torch.Generator().manual_seed(self.seed)
        shape = (2, access.layers, access.kv_heads, stop - start, access.head_dim)
        sent = torch.randn(shape, generator=generator).to(access.device, access.dtype)
        access.write(ids, start, sent[0], sent[1])
        got = torch.stack(access.read(ids, start, stop))
        access.write(ids, 0, *saved)
        return VllmCheck.of("KV layout", float((got - sent).abs().max()), 0.0)

    def _compare(self) -> tuple[float, list[VllmCheck]]:
        """vLLM's own noise, and prompts with holes against plain ones."""
        length = min(LONGEST, self.config.model_config.max_model_len - ANSWER - 1)
        if length < SHORTEST:
            raise UnsupportedEngineError(
                f"the engine's window is {length + ANSWER + 1} tokens, too short to examine; give "
                f"--max-model-len of at least {SHORTEST + ANSWER + 1}"
            )
        tokens = ordinary_tokens(self.engine)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(len(tokens), (2, length), generator=generator)
        mine, other = ([tokens[i] for i in row] for row in drawn.tolist())
        self.progress(f"plain prompts of {length} tokens")
        foreign = self._donor(other)
        before, own = self._plain(mine), self._newest(length)
        cached = self._plain(mine)
        noise = difference(before, cached)
        base = _TOLERANCES.get(self.config.model_config.dtype, _HALF)
        tolerance = max(base, _NOISE * noise)

        def check(name: CheckName, parts: Parts, donor: str, shows: bool = False) -> VllmCheck:
            self.progress(name)
            self._forget_blocks()
            return self._check(
                name, before, self._run(mine, _plan(length, parts, donor)), tolerance, shows
            )

        checks = [
            check("one hole", _ONE, own),
            check("three holes", _THREE, own),
            check("wrong donor", _ONE, foreign, shows=True),
        ]
        # Not forgetting the blocks: those of the wrong donor must not answer a plain request.
        self.progress("plain again")
        checks.append(self._check("plain again", before, self._plain(mine), tolerance))
        return noise, checks

    def _check(
        self, name: CheckName, before: Answer, now: Answer, tolerance: float, shows: bool = False
    ) -> VllmCheck:
        same = before.ids == now.ids
        detail = "" if same or shows else "other tokens are generated"
        error = difference(before, now)
        check = VllmCheck.of(name, error, tolerance, detail, shows=shows)
        # Between two tokens that are equally likely, half precision may choose either.
        if not same and not shows and self.config.model_config.dtype == torch.float32:
            return check.model_copy(update={"passed": False})
        return check

    # requests ----------------------------------------------------------------------------------

    def _donor(self, ids: Sequence[int]) -> str:
        self._plain(ids)
        return self._newest(len(ids))

    def _newest(self, length: int) -> str:
        """The donor that a plain prompt became."""
        infos = [
            info
            for info in self.coordinator.directory.library.store.infos()
            if info.exact and info.start == 0
        ]
        if not infos:
            raise UnsupportedEngineError(
                f"a prompt of {length} tokens did not become a donor; give donors more memory"
            )
        return max(infos, key=lambda info: info.created).id

    def _plain(self, ids: Sequence[int]) -> Answer:
        return self._run(ids, None)

    def _run(self, ids: Sequence[int], plan: Plan | None) -> Answer:
        """Run one request to the end of all that it leaves behind."""
        hints = {} if plan is not None else {"reuse": False}
        self._asked += 1
        known = set(self.coordinator.requests)
        prompt = {"prompt_token_ids": list(ids)}
        params = greedy(ANSWER, {PARAMS_KEY: hints})
        self.engine.add_request(f"kvcmas-doctor-{self._asked}", prompt, params)
        if plan is not None:
            (name,) = set(self.coordinator.requests) - known
            self.coordinator.presets[name] = Planned(plan, {})
        answer = None
        while self.engine.has_unfinished_requests() or self.scheduler.has_requests():
            for output in self.engine.step():
                if output.finished:
                    (first,) = output.outputs
                    answer = Answer(
                        tuple(first.token_ids),
                        tuple({t: one.logprob for t, one in s.items()} for s in first.logprobs),
                    )
        if answer is None:
            raise UnsupportedEngineError("a request ended without an answer; see vLLM's log")
        return answer

    def _forget_blocks(self) -> None:
        if not self.engine.reset_prefix_cache():
            raise UnsupportedEngineError(
                "blocks are still in use although every request has ended; see vLLM's log"
            )


def _plan(length: int, parts: Parts, donor: str) -> Plan:
    """Take these parts of the prompt from the same positions of a donor."""
    ranges = [(int(length * start), int(length * stop)) for start, stop in parts]
    return plan_of(length, [Reuse(start, stop, donor, start) for start, stop in ranges])
