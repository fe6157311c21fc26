"""Every exception that kvcmas raises on purpose.

    KvcmasError
    |-- InputError              what the user gave cannot be used (also a ValueError)
    |   |-- PromptError         a prompt: empty, beyond the window, no token to compute
    |   |-- WorkflowError       a workflow: a cycle, an unknown agent, a bad file
    |   |-- ConfigError         an option or a file: out of range, unknown name
    |   `-- PlanError           a plan that does not tile its prompt or names unknown KV
    |-- UnsupportedError        the request is sound, this model or engine cannot do it
    |   |-- UnsupportedModelError
    |   |-- UnsupportedRopeError
    |   |-- UnsupportedSpanError
    |   `-- UnsupportedEngineError
    |-- StateMismatchError      saved KV or states belong to another model, dtype or layout
    |-- MissingDependencyError  an optional extra is not installed
    `-- CancelledError          the caller cancelled a request

A message says what was given, what was expected and what to do.
"""

from __future__ import annotations


class KvcmasError(Exception):
    """Base class: `except KvcmasError` catches everything raised on purpose."""


class InputError(KvcmasError, ValueError):
    """What the user gave cannot be used."""


class PromptError(InputError):
    """A prompt is empty, too long for the model, or leaves no token to compute."""


class WorkflowError(InputError):
    """A workflow has a cycle, an unknown agent, or its file cannot be read."""


class ConfigError(InputError):
    """An option is out of range, a name is unknown, or a file is malformed."""


class PlanError(InputError):
    """A plan does not tile its prompt, or refers to KV that does not exist."""


class UnsupportedError(KvcmasError):
    """The request is sound, but this model or engine cannot do it."""


class UnsupportedModelError(UnsupportedError):
    """The model's attention is of a kind whose KV cannot be shared."""


class UnsupportedRopeError(UnsupportedError):
    """The model's rotary embedding cannot be moved (its frequencies depend on the length)."""


class UnsupportedSpanError(UnsupportedError):
    """An engine cannot execute a kind of span; the plan is refused, not approximated."""


class UnsupportedEngineError(UnsupportedError):
    """An engine's version, options or KV cache are of a kind that kvcmas cannot work with."""


class StateMismatchError(KvcmasError):
    """Saved KV or correction states belong to another model, dtype or layout."""


class MissingDependencyError(KvcmasError, ImportError):
    """An optional part of kvcmas needs a package that is not installed."""


class CancelledError(KvcmasError):
    """The caller cancelled the request."""
