"""The project's headline figures, measured in one run.

Arms, all on what one teacher has learned:

    fullshared         blind reuse, what KL is compared with
    kvcmas             the method with its default options
    head alone         the same without corrections: same exact head, same landmarks
    two exact          two agents compute each new context; only the agents after them are readers
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from kvcmas.bench.arms import Arm
from kvcmas.bench.contexts import Context
from kvcmas.bench.exactness import measure_exactness
from kvcmas.bench.fidelity import FidelityBench, Sizes
from kvcmas.bench.latency import bound_ratio, token_costs
from kvcmas.bench.report import result_of
from kvcmas.bench.results import FidelityResult, Row
from kvcmas.bench.roles import Role
from kvcmas.bench.sizes import LLAMA_8B, basis_bytes, correction_bytes, second_basis_bytes
from kvcmas.bench.stats import without_nan
from kvcmas.bench.steps import Report, silent
from kvcmas.bench.summary import kl_ratio, summarise
from kvcmas.engines.transformers import LoadedModel
from kvcmas.methods.kvcmas import KvcmasConfig

BASELINE = "fullshared"
MAIN = "kvcmas"
HEAD_ALONE = "head alone"
TWO_EXACT = "two exact"
ARMS = (
    Arm(BASELINE, "fullshared"),
    Arm(MAIN, "kvcmas"),
    Arm(HEAD_ALONE, "kvcmas", {"correct": False}),
    Arm(TWO_EXACT, "kvcmas", {"exact_readers": 2}),
)
MEGABYTE = 1_000_000


def run_core(
    loaded: LoadedModel,
    roles: Sequence[Role],
    learning: Sequence[Context],
    testing: Sequence[Context],
    sizes: Sizes,
    *,
    template: str | None = None,
    report: Report = silent,
) -> tuple[dict[str, Any], FidelityResult]:
    """Measure everything; figures that could not be measured are `None`.

    Returns:
        the figures (see `figures`), and the whole record.
    """
    bench = FidelityBench(
        loaded,
        roles,
        learning,
        testing,
        ARMS,
        sizes.tokens,
        template=template,
        bound=MAIN,
        report=report,
    )
    learned = bench.learn()
    rows = bench.measure()
    result = result_of(bench, learned, rows, BASELINE)
    found = figures(rows)
    found |= _state(bench)
    report("exactness", 0, 1)
    first = bench.prompt(testing[0], roles[0])
    exactness = measure_exactness(loaded, bench.build(ARMS[1]), first, sizes.tokens)
    report("exactness", 1, 1)
    found["exact_logits_error"] = exactness.error
    found["exact_tokens_equal"] = exactness.same_tokens
    found |= _more(rows)
    own = [row for row in rows if row.arm == MAIN]
    found["ttft_bound_ratio"] = bound_ratio(own)
    costs = token_costs(bench, ARMS[1], (*testing, *learning), template=template, report=report)
    found["overhead_us_per_token"] = {str(cost.tokens): round(cost.total, 2) for cost in costs}
    found["match_us_per_token"] = {str(cost.tokens): round(cost.match, 2) for cost in costs}
    found |= _eight_billion(KvcmasConfig())
    found["total_s"] = round(perf_counter() - bench.began, 1)
    return without_nan(_ordered(found)), result


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Quality and speed.

    kl_ratio: KL of kvcmas over that of blind reuse, on all readers. kl_ratio_two_exact: the same
    with two exact agents, on the agents after them. top1: agreement with the exact run.
    computed_share: of the shared tokens. map_gain: by how much corrections lower the KL of the
    same head and landmarks. ttft_ratio: median TTFT of readers, over the exact runs'.
    overhead_share: median share of the TTFT that is match, move, correction and scatter.
    """
    main = summarise(ARMS[1], rows, BASELINE)
    gain = _ratio(rows, MAIN, HEAD_ALONE)
    return {
        "kl_ratio": main.kl_ratio,
        "kl_ratio_two_exact": _ratio(rows, TWO_EXACT, BASELINE),
        "top1": main.top1,
        "computed_share": main.computed_share,
        "map_gain": None if gain is None else 1 - gain,
        "ttft_ratio": main.ttft_ratio,
        "overhead_share": main.overhead_share,
    }


def _ratio(rows: Sequence[Row], label: str, baseline: str) -> float | None:
    found = kl_ratio(rows, label, baseline)
    return None if found is None else found[0]


def _more(rows: Sequence[Row]) -> dict[str, Any]:
    """Intervals, and the figures of the other arms."""
    more: dict[str, Any] = {}
    for name, label, baseline in (
        ("kl_ratio", MAIN, BASELINE),
        ("kl_ratio_two_exact", TWO_EXACT, BASELINE),
        ("map_kl_ratio", MAIN, HEAD_ALONE),
    ):
        found = kl_ratio(rows, label, baseline)
        more[f"{name}_interval"] = None if found is None else found[1]
    results = {arm.label: summarise(arm, rows, BASELINE) for arm in ARMS}
    main = results[MAIN]
    return more | {
        "kl_ratio_head_alone": results[HEAD_ALONE].kl_ratio,
        "top1_fullshared": results[BASELINE].top1,
        "top1_two_exact": results[TWO_EXACT].top1,
        "computed_share_head_alone": results[HEAD_ALONE].computed_share,
        "computed_share_two_exact": results[TWO_EXACT].computed_share,
        "ttft_ratio_fullshared": results[BASELINE].ttft_ratio,
        "ttft_s": main.ttft_s,
        "other_share": main.other_share,
        "requests": main.requests,
    }


def _state(bench: FidelityBench) -> dict[str, Any]:
    """Bytes that were learned: of the agent with most, and of what all agents share."""
    book = bench.teachers[MAIN].book()
    plain = {
        pair.reader: state.learner.correction.nbytes
        for pair, state in book.pairs.items()
        if state.learner.correction is not None and not pair.other
    }
    return {
        "state_mb": max(book.state_bytes().values(), default=0) / MEGABYTE,
        "state_mb_one_exact": max(plain.values(), default=0) / MEGABYTE,
        "shared_mb": book.shared_bytes() / MEGABYTE,
    }


def _eight_billion(config: KvcmasConfig) -> dict[str, Any]:
    """As `state_mb`: both corrections of an agent, with one exact reader and with two."""
    pair = correction_bytes(LLAMA_8B, config)
    both = pair + correction_bytes(LLAMA_8B, config, second=True)
    shared = basis_bytes(LLAMA_8B, config) + second_basis_bytes(LLAMA_8B, config)
    return {
        "state_mb_8b": both / MEGABYTE,
        "state_mb_8b_one_exact": pair / MEGABYTE,
        "shared_mb_8b": shared / MEGABYTE,
    }


HEADLINE = (
    *("kl_ratio", "kl_ratio_two_exact", "top1", "computed_share", "map_gain", "ttft_ratio"),
    *("overhead_share", "state_mb", "state_mb_8b", "exact_logits_error"),
)


def _ordered(found: dict[str, Any]) -> dict[str, Any]:
    """The headline first."""
    return {name: found[name] for name in HEADLINE} | found
