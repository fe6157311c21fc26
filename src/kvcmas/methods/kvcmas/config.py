"""Options of the method: a dial with presets, and every number behind it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from math import inf
from types import MappingProxyType

from kvcmas.errors import ConfigError
from kvcmas.methods.options import check_flag, check_int

EXACT = "exact"
BASES = ("donor", "previous")
_MOST_EXACT_READERS = 2


@dataclass(frozen=True, slots=True)
class Dial:
    """How much a request risks.

    share: share of a reused run that is computed anyway, while the head agrees: landmarks fill up
        what the head leaves of it.
    head: tokens of the exact head; at most a quarter of the run (or 8 tokens). 0 for no head,
        and so no measurement.
    tolerance: largest relative deviation at the head's end that counts as agreement.
    limit: longest head; beyond it the run is computed as a whole.
    cold_tokens: tokens that a pair of agents computes exactly, to learn from, before it reuses.
    audit: share of requests that are served exactly to measure what reuse would have cost.
    audit_limit: a pair whose reuse, measured on runs that were computed exactly as a whole,
        deviates more is served exactly.
    """

    share: float
    head: int
    tolerance: float
    limit: int
    cold_tokens: int
    audit: float
    audit_limit: float


DIALS = MappingProxyType(
    {
        "strict": Dial(0.20, 64, 0.10, 256, 6000, 0.05, 0.06),
        "balanced": Dial(0.115, 32, 0.15, 160, 3000, 0.02, 0.10),
        "fast": Dial(0.05, 16, 0.30, 96, 0, 0.01, 0.20),
    }
)


@dataclass(frozen=True, slots=True)
class KvcmasConfig:
    """Options of `kvcmas`.

    dial: `exact`, `strict`, `balanced` or `fast`; the next seven override single numbers of it.
    base: `donor` (the first agent's exact KV, no drift) or `previous` (the last reader's
        corrected KV, as in the paper's chain).
    exact_readers: agents that compute each new segment exactly, 1 or 2; with 2 the second one's
        deviation is a feature of the correction for everybody else.
    correct, landmarks: whether these parts are used, for measuring what each is worth.
    learn: whether exact requests teach anything.
    budget_bytes: most bytes of donors. min_length: shortest run that is kept and reused.
    own_dim, window_dim, other_dim: sizes of the features. fade: tokens until they are halved.
    basis_tokens: donor tokens that fix the features. fit_tokens: of a pair, before its first fit.
    rank: of a correction. hidden: units of its hidden layer, 0 for linear maps only.
    seed: of everything random.
    """

    dial: str = "balanced"
    share: float | None = None
    head: int | None = None
    tolerance: float | None = None
    limit: int | None = None
    cold_tokens: int | None = None
    audit: float | None = None
    audit_limit: float | None = None
    base: str = "donor"
    exact_readers: int = 1
    correct: bool = True
    landmarks: bool = True
    learn: bool = True
    budget_bytes: int = 2 << 30
    min_length: int = 32
    min_prefix: int = 16
    own_dim: int = 64
    window_dim: int = 64
    other_dim: int = 64
    fade: float = 16.0
    basis_tokens: int = 1500
    fit_tokens: int = 1500
    rank: int = 32
    hidden: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        check_dial(self.dial)
        if self.base not in BASES:
            raise ConfigError(f"base must be one of {', '.join(BASES)}, got {self.base!r}")
        check_int("exact_readers", self.exact_readers, 1)
        if self.exact_readers > _MOST_EXACT_READERS:
            raise ConfigError(f"exact_readers must be 1 or 2, got {self.exact_readers!r}")
        for flag in ("correct", "landmarks", "learn"):
            check_flag(flag, getattr(self, flag))
        for name in ("min_length", "min_prefix", "own_dim", "window_dim", "other_dim", "rank"):
            check_int(name, getattr(self, name), 1)
        for name in ("basis_tokens", "fit_tokens"):
            check_int(name, getattr(self, name), 1)
        for name in ("budget_bytes", "hidden", "seed"):
            check_int(name, getattr(self, name), 0)
        for name in ("head", "limit", "cold_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0)
        for name, top in (("share", 1.0), ("audit", 1.0), ("tolerance", inf), ("audit_limit", inf)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0.0, top)
        check_number("fade", self.fade, 0.0, inf)
        if self.fade == 0:
            raise ConfigError("fade must be above 0 tokens, got 0")

    def setting(self, dial: str | None) -> Dial | None:
        """The numbers for a request, `None` for an exact one.

        Raises:
            ConfigError: there is no such dial.
        """
        name = self.dial if dial is None else dial
        check_dial(name)
        if name == EXACT:
            return None
        own = {
            field.name: value
            for field in fields(Dial)
            if (value := getattr(self, field.name)) is not None
        }
        return replace(DIALS[name], **own)


def check_number(name: str, value: object, least: float, most: float) -> None:
    """Raise ConfigError unless `value` is a number in `[least, most]`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        span = f"of at least {least:g}" if most == inf else f"between {least:g} and {most:g}"
        raise ConfigError(f"{name} must be a number {span}, got {value!r}")


def check_dial(name: str) -> None:
    """Raise ConfigError unless there is such a dial."""
    known = (EXACT, *DIALS)
    if name not in known:
        near = get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown dial: {name!r}{hint} (there are: {', '.join(known)})")
