"""Arms from the command line's texts, and their teachers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcmas.bench.arms import Arm, build, parse_arms, teachers
from kvcmas.engines.transformers import model_info
from kvcmas.errors import ConfigError
from kvcmas.methods.fullshared import FullShared
from kvcmas.methods.kvcmas import Kvcmas

from ..engines.tiny import tiny_model


def test_labels_and_options() -> None:
    arms = parse_arms(
        "fullshared, kvcmas ,plain:kvcmas", {"plain.correct": False, "kvcmas.exact_readers": 2}
    )
    assert arms == (
        Arm("fullshared", "fullshared"),
        Arm("kvcmas", "kvcmas", {"exact_readers": 2}),
        Arm("plain", "kvcmas", {"correct": False}),
    )
    assert [arm.exact_agents for arm in arms] == [1, 2, 1]


BAD_ARMS: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, "expected methods with commas"),
    ("kvcmas,kvcmas", {}, "a label of its own"),
    ("kvcms", {}, "did you mean 'kvcmas'"),
    ("kvcmas", {"correct": False}, "LABEL.NAME=VALUE"),
    ("kvcmas", {"plain.correct": False}, r"label of --methods \(kvcmas\)"),
    ("kvcmas", {"kvcmas.corect": False}, "no option 'corect'"),
    ("kvcmas", {"kvcmas.exact_readers": 3}, "must be 1 or 2"),
    ("kvcmas", {"kvcmas.learn": False}, "belongs to the benchmark"),
]


@pytest.mark.parametrize(("methods", "options", "message"), BAD_ARMS)
def test_bad_arms(methods: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arms(methods, options)


def test_arms_that_learn_alike_have_one_teacher() -> None:
    info = model_info(tiny_model("llama", torch.device("cpu")))
    arms = parse_arms(
        "fullshared,kvcmas,plain:kvcmas,two:kvcmas,thin:kvcmas",
        {"plain.correct": False, "two.exact_readers": 2, "thin.rank": 4},
    )
    found = teachers(arms, info, 1000)
    assert list(found) == ["kvcmas", "plain", "two", "thin"]
    assert found["kvcmas"] is found["plain"] is found["two"]
    assert found["kvcmas"].config.exact_readers == 2
    assert found["thin"] is not found["kvcmas"]
    assert found["thin"].config.rank == 4 and found["thin"].config.exact_readers == 1


def test_an_arm_does_not_audit_unless_asked() -> None:
    info = model_info(tiny_model("llama", torch.device("cpu")))
    plain = build(Arm("a", "kvcmas", {"share": 0.3}), info, None, 1234)
    assert isinstance(plain, Kvcmas)
    assert (plain.config.audit, plain.config.share, plain.config.budget_bytes) == (0, 0.3, 1234)
    asked = build(Arm("a", "kvcmas", {"audit": 0.5, "budget_bytes": 9}), info, None, 1234)
    assert isinstance(asked, Kvcmas)
    assert (asked.config.audit, asked.config.budget_bytes) == (0.5, 9)
    shared = build(Arm("a", "fullshared"), info, None, 1234)
    assert isinstance(shared, FullShared) and shared.config.budget_bytes == 1234
