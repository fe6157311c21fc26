"""All methods by name. To add one: write its file, and add its description below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from kvcmas.core.model_info import ModelInfo
from kvcmas.errors import ConfigError
from kvcmas.methods import (
    cacheblend,
    droidspeak,
    epic,
    fullshared,
    graphflow,
    kvcmas,
    kvcmas_anchors,
    kvcomm,
    nonshared,
)
from kvcmas.methods.base import Method
from kvcmas.methods.description import MethodDescription

_METHODS: Mapping[str, MethodDescription] = MappingProxyType(
    {
        description.name: description
        for description in (
            nonshared.DESCRIPTION,
            fullshared.DESCRIPTION,
            kvcmas.DESCRIPTION,
            epic.DESCRIPTION,
            droidspeak.DESCRIPTION,
            cacheblend.DESCRIPTION,
            kvcomm.DESCRIPTION,
            kvcmas_anchors.DESCRIPTION,
            graphflow.DESCRIPTION,
        )
    }
)


def names() -> tuple[str, ...]:
    """Names of all methods."""
    return tuple(_METHODS)


def describe(name: str) -> MethodDescription:
    """What is known of a method.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in _METHODS:
        raise ConfigError(_unknown("method", name, _METHODS))
    return _METHODS[name]


def create(name: str, info: ModelInfo, **options: Any) -> Method:
    """Make a method for a model, with the options of its config.

    Raises:
        ConfigError: an unknown name or option, or a value out of range.
    """
    description = describe(name)
    for option in options:
        if option not in description.defaults:
            raise ConfigError(_unknown(f"option of {name}", option, description.defaults))
    return description.build(info, description.config(**options))


def _unknown(what: str, given: str, known: Iterable[str]) -> str:
    known = list(known)
    near = get_close_matches(given, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what}: {given!r}{hint} (there are: {', '.join(known)})"
