"""The method kvcmas: `method.py` is the place to start."""

from kvcmas.methods.kvcmas.config import DIALS, Dial, KvcmasConfig
from kvcmas.methods.kvcmas.method import DESCRIPTION, Kvcmas

__all__ = ["DESCRIPTION", "DIALS", "Dial", "Kvcmas", "KvcmasConfig"]
