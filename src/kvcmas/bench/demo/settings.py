"""What can be chosen in the demo; the command line's defaults are read from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvcmas.errors import ConfigError

EARLIER_TEXTS: Final = 8
"""Texts that come with the package for learning."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """How the demo runs.

    model: as `kvcmas.engines.transformers.load` takes it.
    method: a name from the registry of methods; options: of the method.
    rounds: how often each agent speaks.
    max_tokens: longest answer.
    warmup: how many earlier texts the agents read exactly beforehand, so that the method can
        learn from them; 0 to 8.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str = "demo"
    method: str = "kvcmas"
    rounds: int = 3
    max_tokens: int = 48
    warmup: int = EARLIER_TEXTS
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds must be at least 1, got {self.rounds}")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.warmup <= EARLIER_TEXTS:
            raise ConfigError(f"warmup must be 0 to {EARLIER_TEXTS} texts, got {self.warmup}")
