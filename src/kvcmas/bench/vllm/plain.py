"""Plain requests before, beside and behind reusing ones: as vLLM without kvcmas answers them."""

from __future__ import annotations

import random
from typing import Any

from kvcmas.bench.vllm.answers import Answer, largest_difference
from kvcmas.bench.vllm.inprocess import Ask, InProcess
from kvcmas.bench.vllm.job import Job
from kvcmas.bench.vllm.plain_plan import Round, rounds
from kvcmas.bench.vllm.texts import Texts

REFERENCE = "plain_reference"
CLOSE = 1e-5
_PLAIN_PROMPTS = 6


def run(job: Job) -> dict[str, Any]:
    """Whether every plain answer is vLLM's own, and by how much log-probabilities differ."""
    expected = [
        [Answer.from_json(answer) for answer in answers]
        for answers in job.load(REFERENCE)["answers"]
    ]
    engine = InProcess(job.settings.model, {"dial": "fast"})
    asked = all_rounds(job, engine)
    found = answer_all(job, engine, asked, "plain requests with kvcmas")
    return judged(asked, expected, found)


def judged(
    asked: list[Round], expected: list[list[Answer]], found: list[list[Answer]]
) -> dict[str, Any]:
    """Compare both engines' answers, round by round."""
    rows: list[dict[str, Any]] = []
    reused = 0
    for one, before, now in zip(asked, expected, found, strict=True):
        for line, reference, answer in zip(one.lines, before, now, strict=True):
            reused += 0 if line.plain else answer.reused or 0
            if line.plain:
                rows.append(
                    {
                        "round": one.name,
                        "same_batch": one.same,
                        "same_tokens": answer.tokens == reference.tokens,
                        "max_dlogprob": largest_difference(reference, answer),
                    }
                )
    same = max((row["max_dlogprob"] for row in rows if row["same_batch"]), default=0.0)
    other = max((row["max_dlogprob"] for row in rows if not row["same_batch"]), default=0.0)
    held = all(row["same_tokens"] for row in rows)
    return {
        "plain_identical": int(held and same == 0.0 and other <= CLOSE and reused > 0),
        "plain_max_dlogprob_same_batch": same,
        "plain_max_dlogprob_other_batch": other,
        "plain_requests": len(rows),
        "plain_reused_beside": reused,
        "plain_rows": rows,
    }


def all_rounds(job: Job, engine: InProcess) -> list[Round]:
    """The same prompts in every process."""
    texts = Texts(job.settings, engine.tokenizer)
    draw = random.Random(job.settings.seed)
    size = job.settings.prompt_tokens
    plain = [
        texts.prompt(
            texts.roles[index % len(texts.roles)], texts.words(draw, size // 4 + 30 * index)
        )
        for index in range(_PLAIN_PROMPTS)
    ]
    text = texts.cut(texts.contexts[4].text, size - 140)
    donor, *readers = (texts.prompt(role, text) for role in texts.roles[:3])
    return rounds(plain, donor, readers)


def answer_all(job: Job, engine: InProcess, asked: list[Round], phase: str) -> list[list[Answer]]:
    """All rounds, one behind the other."""
    found = []
    job.report(phase, 0, len(asked))
    for number, one in enumerate(asked, 1):
        found.append(engine.ask(*(Ask(line.ids, hints=line.hints) for line in one.lines)))
        job.report(phase, number, len(asked))
    return found
