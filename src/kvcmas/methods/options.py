"""Checks of the options of methods."""

from __future__ import annotations

from kvcmas.errors import ConfigError


def check_int(name: str, value: object, at_least: int) -> None:
    """Raise ConfigError unless `value` is an integer of at least `at_least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"{name} must be an integer >= {at_least}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")
