"""Agents that read the same text share its KV cache instead of prefilling it again.

Importing this package is cheap: it loads neither torch nor an engine. The layers, each of
which imports only what stands to its left:

    errors > core > store, workflow > methods > engines > bench > cli
"""

from __future__ import annotations

from kvcmas.errors import (
    CancelledError,
    ConfigError,
    InputError,
    KvcmasError,
    MissingDependencyError,
    PlanError,
    PromptError,
    StateMismatchError,
    UnsupportedEngineError,
    UnsupportedError,
    UnsupportedModelError,
    UnsupportedRopeError,
    UnsupportedSpanError,
    WorkflowError,
)

__version__ = "0.1.0"

__all__ = [
    "CancelledError",
    "ConfigError",
    "InputError",
    "KvcmasError",
    "MissingDependencyError",
    "PlanError",
    "PromptError",
    "StateMismatchError",
    "UnsupportedEngineError",
    "UnsupportedError",
    "UnsupportedModelError",
    "UnsupportedRopeError",
    "UnsupportedSpanError",
    "WorkflowError",
    "__version__",
]
