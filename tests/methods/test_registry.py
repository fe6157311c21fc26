"""Methods by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcmas.core.model_info import ModelInfo
from kvcmas.engines.transformers import model_info
from kvcmas.errors import ConfigError
from kvcmas.methods import create, describe, names

from ..engines.tiny import LIMIT, tiny_model


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    return model_info(tiny_model("llama", torch.device("cpu")))


def test_model_info(info: ModelInfo) -> None:
    assert (info.layers, info.kv_heads, info.head_dim, info.value_dim) == (3, 2, 16, 16)
    assert (info.window, info.channels, len(info.fingerprint)) == (LIMIT, 64, 64)
    other = model_info(tiny_model("llama", torch.device("cpu"), num_hidden_layers=2))
    assert other.fingerprint != info.fingerprint


def test_every_method_is_described_and_made(info: ModelInfo) -> None:
    assert {"nonshared", "fullshared"} <= set(names())
    for name in names():
        description = describe(name)
        method = create(name, info)
        assert (method.name, description.name) == (name, name)
        assert description.summary.endswith(".")
        assert (description.link == "") == (description.paper == "")
        assert create(name, info, **description.defaults).name == name


def test_options_reach_the_method(info: ModelInfo) -> None:
    method: Any = create("fullshared", info, min_length=40, budget_bytes=1000)
    assert method.library.min_length == 40
    assert method.library.store.budget == 1000
    assert describe("fullshared").defaults["min_length"] == 32


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fulshared", {}, "did you mean 'fullshared'.*there are: nonshared, fullshared"),
        ("", {}, "unknown method: ''"),
        ("fullshared", {"min_lenght": 3}, "did you mean 'min_length'"),
        ("nonshared", {"min_length": 3}, "unknown option of nonshared"),
        ("nonshared", {"budget_bytes": -1}, "budget_bytes must be an integer >= 0, got -1"),
        ("nonshared", {"min_prefix": 0}, "min_prefix must be an integer >= 1"),
        ("fullshared", {"min_length": 0}, "min_length"),
        ("fullshared", {"min_length": 2.5}, r"got 2\.5"),
        ("fullshared", {"budget_bytes": True}, "got True"),
        ("fullshared", {"budget_bytes": "1GB"}, "got '1GB'"),
    ],
)
def test_refused(info: ModelInfo, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(name, info, **options)
