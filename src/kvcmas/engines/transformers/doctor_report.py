"""What the doctor found, as plain data."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

REPORT_VERSION: Literal[1] = 1

Verdict = Literal["supported", "unsupported", "wrong"]
CheckName = Literal["dense logits", "reused logits", "reused KV", "moved keys", "moved values"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Check(_Model):
    """One comparison of what kvcmas does with what the model itself computes.

    name: what is compared
        dense logits: the engine's full prefill against the model without kvcmas;
        reused logits: a prompt that takes parts of its own KV back, against its full prefill;
        reused KV: the KV of what that prompt computes behind and between the reused parts;
        moved keys: keys moved by `shift` against keys computed that much further on;
        moved values: values there and here, which must not depend on the position.
    length: tokens of the prompt.
    shift: positions between the two runs; `None` where nothing is shifted.
    layers: relative error of each layer: the norm of the difference over the norm of what the
        model computes (dimensionless); empty for logits.
    error: the largest error; NaN when the model itself gives NaN.
    passed: the error is a number, and at most the tolerance.
    """

    name: CheckName
    length: int
    shift: int | None = None
    layers: tuple[float, ...] = ()
    error: float
    tolerance: float
    passed: bool

    @classmethod
    def of(
        cls,
        name: CheckName,
        length: int,
        error: float | tuple[float, ...],
        tolerance: float,
        shift: int | None = None,
    ) -> Self:
        """Judge one error, or those of all layers."""
        worst = max(error, key=worse) if isinstance(error, tuple) else error
        return cls(
            name=name,
            length=length,
            shift=shift,
            layers=error if isinstance(error, tuple) else (),
            error=worst,
            tolerance=tolerance,
            passed=worst <= tolerance,
        )

    @property
    def failed_layers(self) -> tuple[int, ...]:
        """Layers whose own error is too large."""
        return tuple(i for i, error in enumerate(self.layers) if not error <= self.tolerance)

    @property
    def worst_layer(self) -> int | None:
        """The layer with the largest error; `None` where layers are not told apart."""
        if not self.layers:
            return None
        return max(range(len(self.layers)), key=lambda layer: worse(self.layers[layer]))

    def sentence(self) -> str:
        """The check in words, with the layers that failed and the largest error."""
        where = f" at length {self.length}" + (f", shift {self.shift}" if self.shift else "")
        text = f"{self.name}{where}: error {self.error:.1e} (tolerance {self.tolerance:.0e})"
        failed = self.failed_layers
        if not failed:
            return text
        first, worst = failed[0], self.worst_layer
        named = f"the first is layer {first} ({self.layers[first]:.1e})"
        if worst is not None and worst != first:
            named += f", the worst layer {worst} ({self.layers[worst]:.1e})"
        return f"{text}; {len(failed)} of {len(self.layers)} layers fail, {named}"


class DoctorReport(_Model):
    """Whether a model's KV can be shared, and how well.

    verdict: `"supported"`; `"unsupported"`, for the given `reasons`; or `"wrong"`: the model
        seems to be supported, but a check failed, so what kvcmas believes of it is not true.
    tested: its family belongs to those that the project's own tests cover.
    notes: what the checks leave open, and what is unusual, in words.
    """

    version: Literal[1] = REPORT_VERSION
    model: str
    verdict: Verdict
    architecture: str = ""
    model_type: str = ""
    tested: bool = False
    dtype: str = ""
    device: str = ""
    attention: str | None = None
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    window: int | None = None
    sliding_window: int | None = None
    sliding_layers: int = 0
    rope: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)


def worse(error: float) -> float:
    """A key to find the worst error by: NaN is worse than any number."""
    return float("inf") if error != error else error
