"""RoPE moves: a key computed at one position becomes the key at another."""

from __future__ import annotations

from kvcmas.core.rope.families import Layout
from kvcmas.core.rope.model import Rope
from kvcmas.core.rope.rotation import Rotation
from kvcmas.core.rope.tables import RopeTable

__all__ = ["Layout", "Rope", "RopeTable", "Rotation"]
