"""The transformers engine's side of the quality comparison: what it learns, plans and answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcmas.bench.arms import Arm
from kvcmas.bench.contexts import Context
from kvcmas.bench.exact import show
from kvcmas.bench.fidelity import FidelityBench
from kvcmas.bench.roles import Role
from kvcmas.core.deviation import kl_divergence
from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers import SamplingParams, Scored, TransformersEngine
from kvcmas.methods import Method
from kvcmas.methods.donors import Found
from kvcmas.methods.kvcmas import Kvcmas
from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.planner import Planned
from kvcmas.workflow.plan import Plan, Reuse
from kvcmas.workflow.prompt import Prompt

MAIN = Arm("kvcmas", "kvcmas")
BLIND = Arm("fullshared", "fullshared")


class Recording(Kvcmas):
    """Kvcmas that keeps the last plan it made, and the runs it found."""

    def __init__(self, teacher: Kvcmas) -> None:
        super().__init__(teacher.info, replace(teacher.config, audit=0.0))
        self.adopt(teacher)
        self.chosen: dict[int, Chosen] = {}
        self.made: Plan | None = None

    def plan(self, prompt: Prompt) -> Plan:
        """See `Kvcmas`."""
        self.made = super().plan(prompt)
        return self.made

    def reuse(self, prompt: Prompt, found: Found) -> tuple[list[Reuse], list[str]]:
        """See `Kvcmas`."""
        made = super().reuse(prompt, found)
        self.chosen = dict(self._requests.get(prompt).chosen)
        return made


@dataclass(frozen=True, slots=True)
class Reading:
    """One reader's request, as the transformers engine served it.

    donor: the prompt that was computed first. answer: of the dense run. planned: as served.
    exact, served: log-probabilities at the answer's positions, `[answer, vocab]` float32.
    whole_kl, blind_kl: mean KL over the whole vocabulary, of kvcmas and of blind reuse.
    """

    context: str
    donor: Prompt
    prompt: Prompt
    answer: tuple[int, ...]
    planned: Planned
    exact: Tensor
    served: Tensor
    computed: int
    whole_kl: float
    blind_kl: float


def readings(bench: FidelityBench, readers: int) -> Iterator[Reading]:
    """Every test context: the first agent computes it, the next ones read it behind that alone.

    So a reader's plan holds one donor, which any engine can have as well.
    """
    teacher = bench.teachers[MAIN.label]
    first, *others = bench.roles
    for context in bench.testing:
        donor = bench.prompt(context, first)
        kv = bench.exact.prefill(donor).kv
        for role in others[:readers]:
            yield _read(bench, teacher, context, role, donor, kv)


def _read(
    bench: FidelityBench,
    teacher: Kvcmas,
    context: Context,
    role: Role,
    donor: Prompt,
    kv: SegmentKV,
) -> Reading:
    prompt = bench.prompt(context, role)
    params = SamplingParams(max_tokens=bench.tokens)
    answer = bench.exact.generate(prompt, params).token_ids
    exact = bench.exact.score(bench.prompt(context, role), answer)
    method = Recording(teacher)
    show(method, bench.request(donor.token_ids, bench.roles[0]), kv)
    asked = bench.prompt(context, role)
    served = _engine(bench, method).score(asked, answer)
    blind_method = bench.build(BLIND)
    show(blind_method, bench.request(donor.token_ids, bench.roles[0]), kv)
    blind = _engine(bench, blind_method).score(bench.prompt(context, role), answer)
    plan = method.made if method.made is not None else Plan.dense(len(asked))
    return Reading(
        context=context.name,
        donor=donor,
        prompt=asked,
        answer=answer,
        planned=Planned(plan, method.chosen),
        exact=_logs(exact),
        served=_logs(served),
        computed=served.record.computed,
        whole_kl=_kl(exact, served),
        blind_kl=_kl(exact, blind),
    )


def renamed(planned: Planned, segment: str) -> Planned:
    """The same plan for another store, in which the donor is called `segment`."""
    plan = planned.plan
    spans = tuple(
        replace(span, segment=segment) if isinstance(span, Reuse) else span for span in plan.spans
    )
    chosen = {
        start: replace(one, donor=replace(one.donor, segment=segment))
        for start, one in planned.chosen.items()
    }
    return Planned(Plan(plan.length, spans, plan.notes), chosen)


def _engine(bench: FidelityBench, method: Method) -> TransformersEngine:
    return TransformersEngine(bench.loaded.model, bench.loaded.tokenizer, method)


def _logs(scored: Scored) -> Tensor:
    return torch.log_softmax(scored.logits.double(), dim=-1).float()


def _kl(exact: Scored, other: Scored) -> float:
    return float(kl_divergence(exact.logits, other.logits).mean())
