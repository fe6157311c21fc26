"""Forgetting everything, as after a change of the model's weights."""

from __future__ import annotations

from kvcmas.engines.vllm.messages import Load, StepWork

from ...methods.kvcmas_team import document, prompt_of
from .rank import Rank, dense_kv, source_of


def test_reset_leaves_neither_donors_nor_what_was_learned() -> None:
    rank = Rank()
    rank.teach(8)
    rank.capture("new", "a", dense_kv(prompt_of("a", document(40))))
    assert rank.worker.drain(60)
    assert rank.worker.book().pairs
    rank.worker.report()

    rank.worker.before_forward(StepWork(reset=True))

    assert not rank.fake.held
    assert not rank.worker.book().pairs
    blocks = rank.prefill(dense_kv(prompt_of("b", document(40))))
    rank.worker.before_forward(StepWork(loads=[Load("1", source_of("new"), blocks)]))
    report = rank.worker.report()
    assert report is not None
    assert report.failed == {"1"}


def test_learning_goes_on_from_nothing() -> None:
    rank = Rank()
    rank.teach(8)
    assert rank.worker.drain(60)
    rank.worker.report()
    rank.worker.before_forward(StepWork(reset=True))
    rank.teach(8)
    assert rank.worker.drain(60)
    report = rank.worker.report()
    assert report is not None
    assert {facts.version for facts in report.facts.values()} != {0}
    fresh = Rank()
    fresh.teach(8)
    assert fresh.worker.drain(60)
    for pair, state in fresh.worker.book().pairs.items():
        assert rank.worker.book().pairs[pair].seen == state.seen
