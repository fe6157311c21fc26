"""Many random requests of several tenants: nothing breaks, leaks, or crosses a tenant's border.

The cache is so small that requests lose their blocks and donors are evicted.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvcmas.bench.roles import Role
from kvcmas.bench.vllm.answers import Answer, largest_difference
from kvcmas.bench.vllm.inprocess import Ask, InProcess
from kvcmas.bench.vllm.job import Job
from kvcmas.bench.vllm.soak_plan import SoakRequest, soak_plan
from kvcmas.bench.vllm.texts import Texts

TENANTS = ("red", "green", "blue")
_BLOCKS = 110
_DONOR_BYTES = 128 << 20
_PASSAGES = 90
_PASSAGE_TOKENS = (40, 130)
_ROLE_WORDS = 40
_LOGPROBS = 5
_EXACT = {"reuse": False}


def run(job: Job) -> dict[str, Any]:
    """What was left behind, and which answers were not as they should be."""
    engine = InProcess(
        job.settings.model,
        {
            "dial": "fast",
            "device_bytes": _DONOR_BYTES,
            "host_bytes": _DONOR_BYTES,
            "tenant_bytes": _DONOR_BYTES,
        },
        max_model_len=1024,
        num_gpu_blocks_override=_BLOCKS,
    )
    return Soak(job, engine).run()


@dataclass(slots=True)
class _Seen:
    """What was seen on the way."""

    answers: dict[int, Answer] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    foreign: dict[tuple[str, int], int] = field(default_factory=dict)
    most: int = 0


class Soak:
    """One engine, and the requests."""

    def __init__(self, job: Job, engine: InProcess) -> None:
        self._job, self._engine = job, engine
        self._texts = Texts(job.settings, engine.tokenizer)
        draw = random.Random(job.settings.seed)
        self._passages = passages(self._texts, draw)
        self._plan = soak_plan(
            job.settings.soak_requests, len(self._passages), TENANTS, job.settings.seed
        )
        self._roles = {
            agent: Role(f"agent {agent}", self._texts.words(draw, _ROLE_WORDS).strip(), "Go on.")
            for agent in sorted({request.agent for request in self._plan})
        }
        self._seen = _Seen()

    def run(self) -> dict[str, Any]:
        """Everything."""
        engine, plan = self._engine, self._plan
        free = engine.free_blocks
        self._work()
        engine.settle()
        engine.coordinator.directory.library.check_integrity()
        leaked = free - engine.free_blocks
        unequal, worst = self._check_plain()
        strange = sum(
            answer.cached for number, answer in self._seen.answers.items() if plan[number].first
        )
        foreign = sum(self._seen.foreign.values())
        answers = self._seen.answers.values()
        return {
            "leaked_blocks": leaked + (free - engine.free_blocks) * (leaked == 0),
            "cross_tenant_reuse": strange + foreign,
            "soak_requests": len(plan),
            "soak_answered": len(self._seen.answers),
            "soak_aborted": len(self._seen.aborted),
            "soak_most_at_once": self._seen.most,
            "soak_preemptions": sum(answer.preemptions for answer in answers),
            "soak_reused_tokens": sum(answer.reused or 0 for answer in answers),
            "soak_first_of_tenant": sum(
                plan[number].first and not plan[number].plain for number in self._seen.answers
            ),
            "soak_copied": sum(plan[number].copied for number in self._seen.answers),
            "soak_left_tracked": len(engine.coordinator.requests),
            "soak_left_pinned": engine.coordinator.directory.library.pinned(),
            "soak_learning_failed": engine.worker.failure is not None,
            "soak_plain": sum(plan[number].plain for number in self._seen.answers),
            "soak_plain_unequal": len(unequal),
            "soak_plain_max_dlogprob": worst,
            "soak_plain_rows": unequal,
        }

    def _work(self) -> None:
        engine, plan = self._engine, self._plan
        flying: dict[str, int] = {}
        age: dict[str, int] = {}
        coming, gap = 0, 0
        self._job.report("soak", 0, len(plan))
        while coming < len(plan) or flying:
            while coming < len(plan) and len(flying) < self._job.settings.soak_beside and gap <= 0:
                name = engine.start(self._ask(plan[coming]))
                flying[name], age[name] = coming, 0
                gap = plan[coming].gap
                coming += 1
            self._seen.most = max(self._seen.most, len(flying))
            gap -= 1
            for name in [name for name, number in flying.items() if self._due(number, age[name])]:
                engine.abort(name)
                self._seen.aborted.add(flying.pop(name))
            done = engine.step()
            self._look()
            for name, answer in done.items():
                if name in flying:
                    self._seen.answers[flying.pop(name)] = answer
            for name in flying:
                age[name] += 1
            if done:
                self._job.report("soak", len(plan) - (len(plan) - coming) - len(flying), len(plan))

    def _due(self, number: int, age: int) -> bool:
        after = self._plan[number].abort_after
        return after is not None and age >= after

    def _look(self) -> None:
        """Whether a request takes KV of another tenant."""
        directory = self._engine.coordinator.directory
        for name, tracked in self._engine.coordinator.requests.items():
            if tracked.planned is None:
                continue
            for span in tracked.planned.plan.reused():
                donor = directory.library.segment_info(span.segment)
                if donor is not None and donor.tenant != tracked.prompt.tenant:
                    self._seen.foreign[name, span.start] = len(span)

    def _ask(self, request: SoakRequest) -> Ask:
        return Ask(
            self._ids(request),
            request.tokens,
            _LOGPROBS if request.plain else None,
            hints=request.hints,
            salt=request.tenant,
            params={"ignore_eos": True},
        )

    def _ids(self, request: SoakRequest) -> list[int]:
        text = "\n\n".join(self._passages[number] for number in request.passages)
        return self._texts.prompt(self._roles[request.agent], text)

    def _check_plain(self) -> tuple[list[dict[str, Any]], float]:
        """Every plain answer beside that of a request that reads no cache at all."""
        unequal: list[dict[str, Any]] = []
        worst = 0.0
        numbers = [number for number in sorted(self._seen.answers) if self._plan[number].plain]
        self._job.report("soak: references", 0, len(numbers))
        for done, number in enumerate(numbers, 1):
            request, answer = self._plan[number], self._seen.answers[number]
            (reference,) = self._engine.ask(
                Ask(
                    self._ids(request),
                    request.tokens,
                    _LOGPROBS,
                    hints=_EXACT,
                    salt="reference",
                    params={"ignore_eos": True, "skip_reading_prefix_cache": True},
                )
            )
            if reference.tokens == answer.tokens:
                worst = max(worst, largest_difference(reference, answer))
            else:
                unequal.append(
                    {"number": number, "expected": reference.tokens, "got": answer.tokens}
                )
            self._job.report("soak: references", done, len(numbers))
        return unequal, worst


def passages(texts: Texts, draw: random.Random) -> list[str]:
    """Texts of different lengths, no two of them of one paragraph."""
    found: list[str] = []
    for text in _paragraphs(texts):
        if len(found) == _PASSAGES:
            break
        found.append(texts.cut(text, draw.randint(*_PASSAGE_TOKENS)).strip())
    return found


def _paragraphs(texts: Texts) -> Iterable[str]:
    for context in texts.contexts:
        yield from (part for part in context.text.split("\n\n") if len(part) > 200)
