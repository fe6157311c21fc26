"""Sharing methods, one file each, and their registry: they turn a prompt into a plan."""

from __future__ import annotations

from kvcmas.methods.base import Method, Outcome
from kvcmas.methods.description import MethodDescription
from kvcmas.methods.registry import create, describe, names

__all__ = ["Method", "MethodDescription", "Outcome", "create", "describe", "names"]
