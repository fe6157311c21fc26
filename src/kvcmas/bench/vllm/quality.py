"""The same plans and the same corrections in vLLM and in the transformers engine.

The transformers engine learns, plans and serves. vLLM gets what was learned and these very plans,
its own donors in them; both are compared with full prefills of their own, on the same answers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvcmas.bench.contexts import split_contexts
from kvcmas.bench.fidelity import FidelityBench
from kvcmas.bench.stats import mean, ratio
from kvcmas.bench.vllm.answers import Answer, LogProbs, mean_kl, top_one_share
from kvcmas.bench.vllm.inprocess import Ask, InProcess
from kvcmas.bench.vllm.job import Job
from kvcmas.bench.vllm.teaching import BLIND, MAIN, Reading, readings, renamed
from kvcmas.methods.kvcmas.frozen import FrozenBook
from kvcmas.workflow.prompt import Prompt

TOP = 50
_LISTED = 500  # tokens that the served run lists, so that the exact run's top is among them
_WHOLE = {"reuse": False}


def run(job: Job) -> dict[str, Any]:
    """KL in both engines, how far apart they are, and every request."""
    bench = _learned(job)
    read = []
    total = job.settings.test_contexts * min(job.settings.readers, len(bench.roles) - 1)
    job.report("quality: transformers", 0, total)
    for reading in readings(bench, job.settings.readers):
        read.append(reading)
        job.report("quality: transformers", len(read), total)
    rows = served_by_vllm(job, bench, read)
    kl, kl_vllm = (mean(row[name] for row in rows) for name in ("kl_transformers", "kl_vllm"))
    lengths = sum(row["prompt"] for row in rows)
    return {
        "kl_gap_to_transformers": abs(ratio(kl_vllm, kl) - 1),
        "kl_vllm": kl_vllm,
        "kl_transformers": kl,
        "kl_transformers_whole": mean(reading.whole_kl for reading in read),
        "kl_blind_whole": mean(reading.blind_kl for reading in read),
        "top1_vllm": mean(row["top1_vllm"] for row in rows),
        "top1_transformers": mean(row["top1_transformers"] for row in rows),
        "quality_computed_share_vllm": sum(row["computed_vllm"] for row in rows) / lengths,
        "quality_computed_share_transformers": sum(row["computed_transformers"] for row in rows)
        / lengths,
        "quality_requests": len(rows),
        "quality_rows": rows,
    }


def _learned(job: Job) -> FidelityBench:
    from kvcmas.bench.contexts import read_contexts
    from kvcmas.bench.roles import read_roles
    from kvcmas.engines.transformers import load

    settings = job.settings
    learning, testing = split_contexts(
        read_contexts(settings.contexts), settings.learn_contexts, settings.test_contexts
    )
    roles = read_roles(settings.roles)[: settings.readers + 1]
    loaded = load(settings.model, dtype="float32", device="cpu")
    bench = FidelityBench(
        loaded,
        roles,
        learning,
        testing,
        (MAIN, BLIND),
        settings.answer_tokens,
        report=lambda phase, done, total: job.report(f"quality: {phase}", done, total),
    )
    bench.learn()
    return bench


def served_by_vllm(job: Job, bench: FidelityBench, read: list[Reading]) -> list[dict[str, Any]]:
    """Every reading again, in vLLM."""
    from kvcmas.bench.vllm.forced import ForcedTokens

    engine = InProcess(
        job.settings.model,
        {"method": {"audit": 0.0}},
        max_logprobs=_LISTED,
        logits_processors=[ForcedTokens],
    )
    engine.worker.adopt({"": FrozenBook.of(bench.teachers[MAIN.label].book())})
    engine.worker.drain()
    rows: list[dict[str, Any]] = []
    segment, donor = "", None
    job.report("quality: vLLM", 0, len(read))
    for reading in read:
        if reading.donor is not donor:
            donor, segment = reading.donor, _donate(engine, reading.donor)
        rows.append(_row(engine, reading, segment))
        job.report("quality: vLLM", len(rows), len(read))
    return rows


def _donate(engine: InProcess, prompt: Prompt) -> str:
    """Have a prompt computed exactly; the name of the donor that it becomes."""
    store = engine.coordinator.directory.library.store
    before = {info.id for info in store.infos()}
    hints = {"agent": prompt.agent, "warm": True}
    engine.ask(Ask(prompt.token_ids.tolist(), tokens=1, logprobs=None, hints=hints))
    (new,) = (info for info in store.infos() if info.id not in before)
    if new.start != 0 or not new.exact:
        raise RuntimeError(f"expected an exact donor from position 0 on, got {new}")
    engine.worker.drain()
    return str(new.id)


def _row(engine: InProcess, reading: Reading, segment: str) -> dict[str, Any]:
    exact = _forced(engine, reading, hints=_WHOLE, params={"skip_reading_prefix_cache": True})
    engine.forget_prefixes()  # the exact run's blocks, which would serve all of the prompt
    served = _forced(
        engine,
        reading,
        hints={"agent": reading.prompt.agent},
        preset=renamed(reading.planned, segment),
    )
    ours = _rows(reading.exact, _LISTED), _rows(reading.served, _LISTED)
    return {
        "context": reading.context,
        "agent": reading.prompt.agent,
        "prompt": len(reading.prompt),
        "kl_vllm": mean_kl(exact.logprobs, served.logprobs, TOP),
        "kl_transformers": mean_kl(*ours, TOP),
        "kl_transformers_whole": reading.whole_kl,
        "kl_blind_whole": reading.blind_kl,
        "top1_vllm": top_one_share(exact.logprobs, served.logprobs),
        "top1_transformers": top_one_share(*ours),
        "computed_vllm": served.computed,
        "computed_transformers": reading.computed,
        "cached_vllm": served.cached - (served.reused or 0),
    }


def _forced(engine: InProcess, reading: Reading, **more: Any) -> Answer:
    from kvcmas.bench.vllm.forced import FORCED

    params = {"ignore_eos": True, **more.pop("params", {})}
    ids, answer = reading.prompt.token_ids.tolist(), list(reading.answer)
    extra = {FORCED: answer}
    (found,) = engine.ask(Ask(ids, len(answer), _LISTED, params=params, extra=extra, **more))
    if found.tokens != reading.answer:
        raise RuntimeError(f"vLLM generated {found.tokens} where {reading.answer} was forced")
    return found


def _rows(logs: Tensor, listed: int) -> list[LogProbs]:
    """The most likely tokens of each position, as vLLM lists them."""
    found = logs.topk(listed, dim=-1)
    return [
        dict(zip(ids, values, strict=True))
        for ids, values in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]
