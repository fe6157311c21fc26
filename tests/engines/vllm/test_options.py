"""Options of the connector: defaults, what is refused, and the way into vLLM's JSON and back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcmas.engines.vllm.options import GIB, VllmOptions
from kvcmas.errors import ConfigError
from kvcmas.methods.kvcmas.config import KvcmasConfig


def test_defaults() -> None:
    options = VllmOptions.read(None)
    assert options == VllmOptions()
    assert options.dial == "balanced"
    assert options.to_config() == KvcmasConfig(budget_bytes=4 * GIB)
    assert options.to_extra_config() == {}


def test_everything_reaches_the_method() -> None:
    given = {
        "dial": "strict",
        "method": {"head": 48, "tolerance": 0.2, "learn": False, "base": "donor"},
        "device_bytes": 3 * GIB,
        "host_bytes": 0,
        "tenant_bytes": GIB,
        "wait_s": 3,
        "exact_tenants": ["a", "b"],
        "records": False,
        "log_level": "debug",
    }
    options = VllmOptions.read(json.loads(json.dumps(given)))
    assert options.exact_tenants == ("a", "b")
    assert options.wait_s == 3.0
    config = options.to_config()
    assert config.budget_bytes == 3 * GIB
    assert not config.learn
    setting = config.setting(None)
    assert setting is not None
    assert (setting.head, setting.tolerance, setting.cold_tokens) == (48, 0.2, 6000)
    assert VllmOptions.read(json.loads(json.dumps(options.to_extra_config()))) == options


def test_the_whole_server_exact_is_one_setting() -> None:
    assert VllmOptions.read({"dial": "exact"}).to_config().setting(None) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dail": "fast"}, "there is no option 'dail'; did you mean 'dial'?"),
        ({"zzz": 1}, "there is no option 'zzz'; there are: dial, method"),
        ({"dial": "fats"}, "dial: unknown dial: 'fats'; did you mean 'fast'?"),
        ({"dial": 3}, "dial: Input should be a valid string, got 3"),
        ({"device_bytes": -1}, "device_bytes: Input should be greater than or equal to 0, got -1"),
        ({"device_bytes": "2"}, "device_bytes: Input should be a valid integer, got '2'"),
        ({"wait_s": float("inf")}, "wait_s: Input should be a finite number"),
        ({"exact_tenants": "abc"}, "exact_tenants: Input should be a valid tuple"),
        ({"method": {"haed": 1}}, "method: there is no 'haed'; did you mean 'head'?"),
        ({"method": {"dial": "fast"}}, "method: dial does not belong here; set dial"),
        ({"method": {"budget_bytes": 1}}, "set device_bytes and host_bytes"),
        ({"method": {"share": 2}}, "method: share must be a number between 0 and 1, got 2"),
        ({"method": {"base": "previous"}}, "base='previous' is not in vLLM yet"),
        ({"method": {"exact_readers": 2}}, "exact_readers=2 is not in vLLM yet"),
        ({"log_level": "loud"}, "log_level: Input should be 'debug', 'info'"),
    ],
)
def test_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        VllmOptions.read(given)
    assert message in str(refused.value)
    assert str(refused.value).startswith("kv_connector_extra_config: ")


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"dial: unknown dial.*wait_s: Input"):
        VllmOptions.read({"dial": "x", "wait_s": -1})
