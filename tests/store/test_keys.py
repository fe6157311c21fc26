"""Fingerprints tell models apart and say where they differ."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcmas.errors import ConfigError, StateMismatchError
from kvcmas.store.keys import (
    check_same_model,
    fields_digest,
    model_fields,
    model_fingerprint,
    tenant_key,
)

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "layer_types": ["full_attention", "sliding_attention"],
    "pad_token_id": None,
    "empty": {},
    "transformers_version": "5.19.0",
    "_name_or_path": "somewhere",
    "dtype": "float32",
}


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("hidden_size",), 128, "config.hidden_size"),
        (("rope_parameters", "rope_theta"), 10001.0, "config.rope_parameters.rope_theta"),
        (("layer_types",), ["full_attention"], "config.layer_types"),
        (("pad_token_id",), 0, "config.pad_token_id"),
        (("new_field",), True, "config.new_field"),
    ],
)
def test_a_changed_field_is_named(path: tuple[str, ...], value: object, field: str) -> None:
    changed = deepcopy(CONFIG)
    target = changed
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = value
    saved = model_fields(CONFIG, torch.float32)
    current = model_fields(changed, torch.float32)
    assert fields_digest(saved) != fields_digest(current)
    with pytest.raises(StateMismatchError, match=rf"state\.bin belongs.*{field} is") as caught:
        check_same_model(saved, current, "state.bin")
    assert str(caught.value).count(" here, ") == 1


@pytest.mark.parametrize(
    ("first", "second", "field"),
    [
        ((torch.float32, {}), (torch.bfloat16, {}), 'dtype is "bfloat16" here, "float32" there'),
        (
            ("float32", {"weights": "aa"}),
            ("float32", {"weights": "bb"}),
            'extra.weights is "bb" here, "aa" there',
        ),
        (
            ("float32", {}),
            ("float32", {"adapter": "lora"}),
            'extra.adapter is "lora" here, absent there',
        ),
    ],
)
def test_dtype_weights_and_adapter_count(first: Any, second: Any, field: str) -> None:
    saved, current = model_fields(CONFIG, *first), model_fields(CONFIG, *second)
    assert model_fingerprint(CONFIG, *first) != model_fingerprint(CONFIG, *second)
    with pytest.raises(StateMismatchError, match=field):
        check_same_model(saved, current, "x")


def test_bookkeeping_order_and_number_form_do_not_count() -> None:
    same = dict(reversed(CONFIG.items()))
    same |= {"transformers_version": "5.20", "_name_or_path": "elsewhere", "dtype": "float16"}
    same["rope_parameters"] = {"factor": 4, "rope_theta": 10000, "rope_type": "yarn"}
    same["layer_types"] = tuple(CONFIG["layer_types"])
    assert model_fingerprint(same, "float32") == model_fingerprint(CONFIG, torch.float32)
    check_same_model(model_fields(same, "float32"), model_fields(CONFIG, torch.float32), "x")


def test_many_differences_are_summed_up() -> None:
    saved = {f"field{number}": "1" for number in range(9)}
    with pytest.raises(StateMismatchError, match="field4 is absent here, 1 there; and 4 more"):
        check_same_model(saved, {}, "x")


def test_true_is_not_one() -> None:
    assert model_fingerprint({"a": True}, "float32") != model_fingerprint({"a": 1}, "float32")


def test_values_without_a_stable_form_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"config\.thing is a object"):
        model_fingerprint({"thing": object()}, "float32")


@given(st.text() | st.sampled_from(["../../x", "", "a/b", "\ud800", "\x00", "CON", "." * 300]))
def test_a_tenant_key_is_safe_in_a_path(tenant: str) -> None:
    key = tenant_key(tenant)
    assert len(key) == 32
    assert set(key) <= set("0123456789abcdef")
    assert key == tenant_key(tenant)
    assert key != tenant_key(tenant + " ")
