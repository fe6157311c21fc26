"""The fidelity benchmark on a tiny model: who reads, what is counted, what is refused."""

from __future__ import annotations

import pytest

from kvcmas.bench.arms import Arm, parse_arms
from kvcmas.bench.fidelity import FidelityBench
from kvcmas.bench.latency import bound_ratio, joined, token_costs
from kvcmas.bench.report import result_of
from kvcmas.bench.results import FidelityResult, Learned, Row
from kvcmas.bench.summary import kl_ratio, summarise
from kvcmas.engines.transformers import LoadedModel, load
from kvcmas.errors import PromptError

from .small_team import ROLES, context, model_folder

LEARNING = {
    **{"own_dim": 8, "window_dim": 8, "other_dim": 8, "rank": 4, "hidden": 0},
    **{"basis_tokens": 300, "fit_tokens": 300},
    **{"cold_tokens": 0, "audit_limit": 100, "tolerance": 100},
}
ARMS = (
    Arm("fullshared", "fullshared"),
    Arm("nonshared", "nonshared"),
    Arm("kvcmas", "kvcmas", LEARNING),
    Arm("two", "kvcmas", {**LEARNING, "exact_readers": 2}),
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def done(loaded: LoadedModel) -> tuple[FidelityBench, Learned, list[Row], list[str]]:
    told: list[str] = []
    learning, testing = [context(n) for n in range(6)], [context(n) for n in range(6, 8)]
    bench = FidelityBench(
        loaded,
        ROLES,
        learning,
        testing,
        ARMS,
        tokens=5,
        bound="kvcmas",
        report=lambda phase, count, total: told.append(f"{phase} {count}/{total}"),
    )
    return bench, bench.learn(), bench.measure(), told


Done = tuple[FidelityBench, Learned, list[Row], list[str]]


def test_readers_of_every_arm(done: Done) -> None:
    _, learned, rows, told = done
    served = {(row.arm, row.agent) for row in rows}
    assert served == {
        *((arm, agent) for arm in ("fullshared", "nonshared", "kvcmas") for agent in ANALYST_ON),
        ("two", "judge"),
    }
    assert len(rows) == 2 * len(served)
    assert learned.contexts == 6
    assert "planner>analyst" in learned.pairs and "planner>judge" in learned.pairs
    assert told[0] == "learning 0/18" and "learning 18/18" in told
    assert told[-1] == "measuring 6/6"


ANALYST_ON = ("analyst", "judge")


def test_what_is_counted(done: Done) -> None:
    bench, _, rows, _ = done
    for row in rows:
        text = next(c.text for c in bench.testing if c.name == row.context)
        prompt = bench.ids(
            next(c for c in bench.testing if c.name == row.context),
            next(r for r in ROLES if r.name == row.agent),
        )
        whole = len(bench.loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
        assert whole <= row.shared <= whole + 10
        assert row.record.prompt == len(prompt)
        assert 1 <= row.tokens <= 5
        assert row.exact_ttft_s > 0
        assert (row.plain_ttft_s is not None) == (row.arm == "kvcmas")
        if row.arm == "nonshared":
            assert row.shared_computed == row.shared
            assert row.kl == pytest.approx(0, abs=1e-6) and row.top1 == 1
        elif row.arm == "fullshared":
            assert row.shared_computed <= 8
            assert row.kl > 1e-9
        else:
            assert 8 <= row.shared_computed <= 0.2 * row.shared, (
                row.record.notes,
                row.record.spans,
            )
            assert any(span.correction for span in row.record.spans) or row.arm == "two"


def test_figures_of_an_arm(done: Done) -> None:
    _, _, rows, _ = done
    own = [row for row in rows if row.arm == "kvcmas"]
    result = summarise(ARMS[2], rows, "fullshared")
    assert result.requests == 4 and result.readers == ("analyst", "judge")
    assert result.kl == pytest.approx(sum(row.kl for row in own) / 4)
    assert result.computed_share == pytest.approx(
        sum(row.shared_computed for row in own) / sum(row.shared for row in own)
    )
    blind = [row.kl for row in rows if row.arm == "fullshared"]
    assert result.kl_ratio == pytest.approx(sum(row.kl for row in own) / sum(blind))
    assert 0 < result.overhead_share < 1


def test_arms_are_compared_on_the_same_requests(done: Done) -> None:
    _, _, rows, _ = done
    found = kl_ratio(rows, "two", "fullshared")
    own = sum(row.kl for row in rows if row.arm == "two")
    blind = sum(row.kl for row in rows if row.arm == "fullshared" and row.agent == "judge")
    assert found is not None and found[0] == pytest.approx(own / blind)
    assert kl_ratio(rows, "kvcmas", "none") is None


def test_the_record_reads_back(done: Done) -> None:
    bench, learned, rows, _ = done
    result = result_of(bench, learned, rows, "fullshared")
    again = FidelityResult.model_validate_json(result.model_dump_json())
    assert again.rows == result.rows and again.learned == learned
    assert again.environment["torch"] and again.model["fingerprint"]
    assert [arm.label for arm in again.arms] == ["fullshared", "nonshared", "kvcmas", "two"]


def test_costs_at_several_lengths(done: Done) -> None:
    bench, _, rows, _ = done
    texts = (*bench.testing, *bench.learning)
    found = token_costs(bench, ARMS[2], texts, (150, 600, 100_000))
    assert [cost.tokens for cost in found] == [150, 600]
    assert all(0.7 * cost.tokens < cost.reused <= cost.tokens + 40 for cost in found)
    assert all(cost.total == cost.match + cost.correct > 0 for cost in found)
    assert bound_ratio([row for row in rows if row.arm == "kvcmas"]) > 0.3
    long = joined(bench, texts, 600)
    assert long is not None and joined(bench, texts, 100_000) is None
    assert len(bench.loaded.tokenizer(long.text, add_special_tokens=False)["input_ids"]) == 600


def test_too_long_a_context_is_refused_before_anything_runs(loaded: LoadedModel) -> None:
    arms = parse_arms("fullshared", {})
    with pytest.raises(PromptError, match=r"context text 1: the prompt of planner has \d+ tokens"):
        FidelityBench(loaded, ROLES, [context(0)], [context(1, words=900)], arms, tokens=5)
