"""What a method says about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvcmas.core.model_info import ModelInfo
from kvcmas.methods.base import Method


@dataclass(frozen=True, slots=True)
class MethodDescription:
    """A method in the registry.

    name: what users type. summary: one sentence. paper: title or empty. link: where to read it.
    config: the frozen dataclass of its options; every option has a default.
    build: makes the method for a model.
    """

    name: str
    summary: str
    config: type[Any]
    build: Callable[[ModelInfo, Any], Method]
    paper: str = ""
    link: str = ""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The options and their defaults."""
        default = self.config()
        return {field.name: getattr(default, field.name) for field in fields(self.config)}
