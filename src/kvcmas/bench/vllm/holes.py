"""Prefills with holes: a prompt gets its own true KV in them, so its answer must not change.

Compared with the same requests in the same company without holes: whole, in chunks, beside plain
requests, and when the request loses its blocks and starts again. vLLM's own answers differ in their
last bits with the number of rows that a step computes (on CPUs a single row takes another kernel),
so the prompt is also answered without holes in several other cuts, and the nearest one counts; how
far these are from each other, and how far the case is from its own company, is told beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvcmas.bench.vllm.answers import Answer, largest_difference
from kvcmas.bench.vllm.inprocess import Ask, InProcess
from kvcmas.bench.vllm.job import Job
from kvcmas.bench.vllm.spans import Case, cases, chosen_cases
from kvcmas.bench.vllm.texts import Texts
from kvcmas.methods.kvcmas.planner import Planned

CHUNK = 40
_LAST_ROWS = (1, 3, 9)
_COMPANY = 256  # tokens of a step with others: vLLM's own last bits differ in larger steps
_MANY = ("one", "three", "eight", "landmarks")
_EXACT = {"reuse": False}


def run(job: Job) -> dict[str, Any]:
    """Largest difference of log-probabilities over all cases, each case, and vLLM's own noise."""
    engine = InProcess(job.settings.model, {"dial": "balanced", "method": {"learn": False}})
    return HolesBench(job, engine).run()


class HolesBench:
    """One prompt, its donor, and the cases."""

    def __init__(self, job: Job, engine: InProcess) -> None:
        self._job, self._engine = job, engine
        texts = Texts(job.settings, engine.tokenizer)
        size = job.settings.prompt_tokens
        self.ids = texts.sized(texts.roles[0], texts.contexts[0].text, size)
        self.others = [
            texts.sized(role, context.text, size // 2 + 60 * index)
            for index, (role, context) in enumerate(
                zip(texts.roles[1:3], texts.contexts[1:3], strict=False)
            )
        ]
        self.blocking = texts.sized(texts.roles[-1], texts.contexts[3].text, 240)[:223]
        self.results: list[dict[str, Any]] = []
        self.segment = ""
        self.own: list[Answer] = []

    def run(self) -> dict[str, Any]:
        """Everything."""
        alone = self._plain()
        (donor,) = self._engine.coordinator.directory.library.store.infos()
        self.segment = donor.id
        self.own = self._without_holes()
        noise = max(largest_difference(alone, answer) for answer in self.own)
        every = cases(len(self.ids), self.segment)
        some = chosen_cases(len(self.ids), self.segment, *_MANY)
        total = len(every) + 4 * len(some)
        self._job.report("holes", 0, total)
        for case in every:
            self._compare("whole", case, alone, self._ask)
            self._job.report("holes", len(self.results), total)
        for name, way in (
            ("chunks", lambda ask: self._in_chunks(lambda: self._ask(ask))),
            (
                "beside plain requests",
                lambda ask: self._in_chunks(lambda: self._beside(ask), _COMPANY),
            ),
            ("preempted", self._preempted),
            ("preempted in chunks", self._preempted_early),
        ):
            reference = way(Ask(self.ids, hints=_EXACT))
            for case in some:
                self._compare(name, case, reference, way)
                self._job.report("holes", len(self.results), total)
        worst = max(result["max_dlogprob"] for result in self.results)
        # One that starts again finds blocks of its first try, and has less to compute.
        counted = [result for result in self.results if not result["preemptions"]]
        return {
            "holes_max_dlogprob": worst,
            "holes_max_dlogprob_same_company": max(
                result["from_same_company"] for result in self.results
            ),
            "holes_computed_equal": all(result["computed_equal"] for result in counted),
            "holes_preemptions": sum(result["preemptions"] for result in self.results),
            "holes_noise_of_vllm": noise,
            "holes_cases": self.results,
        }

    def _compare(
        self, way: str, case: Case, reference: Answer, ask: Callable[[Ask], Answer]
    ) -> None:
        answer = ask(Ask(self.ids, preset=Planned(case.plan, {})))
        self.results.append(
            {
                "way": way,
                "case": case.name,
                "max_dlogprob": min(
                    largest_difference(_first(one, len(answer.tokens)), answer)
                    for one in (reference, *self.own)
                ),
                "from_same_company": largest_difference(reference, answer),
                "computed": answer.computed,
                "planned": case.plan.computed,
                "computed_equal": answer.computed == case.plan.computed,
                "preemptions": answer.preemptions,
            }
        )

    def _without_holes(self) -> list[Answer]:
        """The prompt in chunks, its last few tokens by themselves, and behind its cached blocks."""
        length = len(self.ids)
        sizes = (CHUNK, *(length - rest for rest in _LAST_ROWS))
        chunks = [self._in_chunks(self._plain, tokens) for tokens in sizes]
        (cached,) = self._engine.ask(Ask(self.ids, hints=_EXACT))
        return [*chunks, cached]

    def _plain(self) -> Answer:
        return self._ask(Ask(self.ids, hints=None if not self.segment else _EXACT))

    def _ask(self, ask: Ask) -> Answer:
        self._engine.forget_prefixes()
        return self._engine.ask(ask)[0]

    def _in_chunks(self, ask: Callable[[], Answer], tokens: int = CHUNK) -> Answer:
        budget = self._engine.budget(tokens)
        try:
            return ask()
        finally:
            self._engine.budget(budget)

    def _beside(self, ask: Ask) -> Answer:
        self._engine.forget_prefixes()
        others = [Ask(ids, hints=_EXACT) for ids in self.others]
        return self._engine.ask(others[0], ask, *others[1:])[1]

    def _preempted(self, ask: Ask) -> Answer:
        """The request loses its blocks to an older one that grows.

        There is room for both prompts, and the older one's first token fills its last block: it
        takes one of the other's in the step after that in which the other one begins.
        """
        engine = self._engine
        engine.forget_prefixes()
        size = int(engine.scheduler.block_size)
        needed = _blocks(len(self.blocking) + 1, size) + _blocks(len(ask.ids) + 1, size)
        older = Ask(self.blocking, tokens=24, hints=_EXACT, params={"ignore_eos": True})
        longer = Ask(ask.ids, ask.tokens, hints=ask.hints, preset=ask.preset)
        with self._less_blocks(needed):
            first = engine.start(older)
            while not engine.generated(first):
                engine.step()
            second = engine.start(longer)
            answers = engine.finish()
        return answers[second]

    def _preempted_early(self, ask: Ask) -> Answer:
        """The same in the middle of the prefill: nothing is generated before, only one token."""
        return self._in_chunks(lambda: self._preempted(replace(ask, tokens=1)))

    @contextmanager
    def _less_blocks(self, left: int) -> Iterator[None]:
        pool = self._engine.pool
        taken: Sequence[Any] = pool.get_new_blocks(self._engine.free_blocks - left)
        try:
            yield
        finally:
            pool.free_blocks(taken)


def _first(answer: Answer, tokens: int) -> Answer:
    return Answer(answer.tokens[:tokens], answer.logprobs[:tokens])


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)
