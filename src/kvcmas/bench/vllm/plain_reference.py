"""The answers of vLLM without kvcmas, for the part `plain` to compare with."""

from __future__ import annotations

from typing import Any

from kvcmas.bench.vllm.inprocess import InProcess
from kvcmas.bench.vllm.job import Job
from kvcmas.bench.vllm.plain import all_rounds, answer_all


def run(job: Job) -> dict[str, Any]:
    """`answers` by round and request."""
    engine = InProcess(job.settings.model)
    found = answer_all(job, engine, all_rounds(job, engine), "plain requests without kvcmas")
    return {"answers": [[answer.to_json() for answer in answers] for answers in found]}
