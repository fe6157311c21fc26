"""What reuse costs per token at different lengths, and the least that a reader could take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcmas.bench.arms import Arm
from kvcmas.bench.contexts import Context
from kvcmas.bench.exact import show
from kvcmas.bench.fidelity import EXACT, FidelityBench, kv_bytes_per_token
from kvcmas.bench.results import Row
from kvcmas.bench.roles import render
from kvcmas.bench.stats import median, ratio
from kvcmas.bench.steps import Report, silent
from kvcmas.engines.transformers import TransformersEngine
from kvcmas.methods import create

LENGTHS = (500, 1000, 2000, 4000)
_KEPT_PROMPTS = 3


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Cost of reuse in microseconds per reused token, at a context of `tokens` tokens.

    match: finding the run and choosing its tokens. correct: move, correction, scatter and
    measurement. Medians over the readers.
    """

    tokens: int
    reused: int
    match: float
    correct: float

    @property
    def total(self) -> float:
        """Both."""
        return self.match + self.correct


def token_costs(
    bench: FidelityBench,
    arm: Arm,
    texts: Sequence[Context],
    lengths: Iterable[int] = LENGTHS,
    *,
    template: str | None = None,
    report: Report = silent,
) -> list[TokenCost]:
    """Let every reader read contexts of given lengths, which are texts joined and cut.

    Lengths that the texts or the model's window do not reach are left out, and so are those at
    which the method reused nothing.
    """
    loaded, roles = bench.loaded, bench.roles
    found: list[TokenCost] = []
    wanted = list(lengths)
    report("cost per token", 0, len(wanted))
    for number, length in enumerate(wanted, 1):
        context = joined(bench, texts, length)
        prompts = [
            bench.request(render(loaded.tokenizer, role, context, template), role)
            for role in (roles if context is not None else ())
            if context is not None
        ]
        longest = max((len(prompt) for prompt in prompts), default=0)
        if prompts and not (loaded.window and longest > loaded.window):
            budget = _KEPT_PROMPTS * longest * kv_bytes_per_token(loaded)
            method = bench.build(arm, budget)
            exact = create(EXACT, bench.info, budget_bytes=0)
            dense = TransformersEngine(loaded.model, loaded.tokenizer, exact)
            show(method, prompts[0], dense.prefill(prompts[0]).kv)
            engine = TransformersEngine(loaded.model, loaded.tokenizer, method)
            records = [engine.prefill(prompt).record for prompt in prompts[1:]]
            records = [record for record in records if record.reused]
            if records:
                found.append(
                    TokenCost(
                        tokens=length,
                        reused=round(median(record.reused for record in records)),
                        match=median(1e6 * r.match_s / r.reused for r in records),
                        correct=median(1e6 * r.correct_s / r.reused for r in records),
                    )
                )
        report("cost per token", number, len(wanted))
    return found


def joined(bench: FidelityBench, texts: Sequence[Context], length: int) -> Context | None:
    """Texts joined by empty lines and cut at about `length` tokens; `None` if they are shorter."""
    tokenizer = bench.loaded.tokenizer
    parts: list[str] = []
    ids: list[int] = []
    for text in texts:
        parts.append(text.text)
        ids = tokenizer("\n\n".join(parts), add_special_tokens=False)["input_ids"]
        if len(ids) >= length:
            cut = str(tokenizer.decode(ids[:length], skip_special_tokens=False))
            return Context(f"{length} tokens", cut)
    return None


def bound_ratio(rows: Sequence[Row]) -> float:
    """Median TTFT of readers over that of plain prompts of as many tokens as they computed.

    About the least that a method which computes these tokens can reach: the plain prompt attends
    to itself alone, and matches, moves and corrects nothing. NaN where nothing was measured.
    """
    measured = [(row.record.ttft_s, row.plain_ttft_s) for row in rows if row.plain_ttft_s]
    return ratio(median(ttft for ttft, _ in measured), median(plain for _, plain in measured))
