"""Options that the methods with anchors share."""

from __future__ import annotations

from dataclasses import dataclass

from kvcmas.errors import ConfigError
from kvcmas.methods.options import check_flag, check_int

GATES = ("entropy", "new", "known")


@dataclass(frozen=True)
class AnchorConfig:
    """Options of methods with anchors.

    anchors: size of the pool (one more is held, as published).
    gamma: share of the highest entropy above which a text is new; 0 to 1.
    gate: `entropy` decides as published; `new` takes every text for new, so that nothing is
        predicted; `known` predicts from any anchor there is, and learns from every exact request.
    sharp: divide distances by a tenth of the smallest one before the softmax.
    contents: shared texts that are remembered.
    budget_bytes, min_length, min_prefix: as for `fullshared`.
    """

    anchors: int = 10
    gamma: float = 0.3
    gate: str = "entropy"
    sharp: bool = False
    contents: int = 16
    budget_bytes: int = 2 << 30
    min_length: int = 32
    min_prefix: int = 16

    def __post_init__(self) -> None:
        check_int("anchors", self.anchors, 1)
        check_number("gamma", self.gamma, 0.0, 1.0)
        if self.gate not in GATES:
            raise ConfigError(f"gate must be one of {', '.join(GATES)}, got {self.gate!r}")
        check_flag("sharp", self.sharp)
        check_int("contents", self.contents, 1)
        check_int("budget_bytes", self.budget_bytes, 0)
        check_int("min_length", self.min_length, 1)
        check_int("min_prefix", self.min_prefix, 1)


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise ConfigError unless `value` is a number in `[low, high]`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= float(value) <= high:  # type: ignore[arg-type]
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")
