"""Options of the method: a dial with presets, and every number behind it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from types import MappingProxyType

from kvcmas.errors import ConfigError
from kvcmas.methods.options import check_flag, check_int

EXACT = "exact"
BASES = ("donor", "previous")


@dataclass(frozen=True, slots=True)
class Dial:
    """How much a request risks.

    share: largest share of a reused run that is computed anyway (head and landmarks), while the
        head agrees.
    head: tokens of the exact head; at most a quarter of the run.
    tolerance: largest relative deviation at the head's end that counts as agreement.
    limit: longest head; beyond it the run is computed as a whole.
    cold_tokens: tokens that a pair of agents computes exactly, to learn from, before it reuses.
    audit: share of requests that are served exactly to measure what reuse would have cost.
    audit_limit: a pair whose reuse, measured on whole exact requests, deviates more is served
        exactly.
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
        "strict": Dial(0.20, 64, 0.12, 256, 6000, 0.05, 0.15),
        "balanced": Dial(0.115, 32, 0.25, 160, 3000, 0.02, 0.30),
        "fast": Dial(0.05, 16, 0.50, 96, 0, 0.01, 0.60),
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
    rank: int = 32
    hidden: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        check_dial(self.dial)
        if self.base not in BASES:
            raise ConfigError(f"base must be one of {', '.join(BASES)}, got {self.base!r}")
        if self.exact_readers not in (1, 2):
            raise ConfigError(f"exact_readers must be 1 or 2, got {self.exact_readers!r}")
        for flag in ("correct", "landmarks", "learn"):
            check_flag(flag, getattr(self, flag))
        for name in ("min_length", "min_prefix", "own_dim", "window_dim", "other_dim", "rank"):
            check_int(name, getattr(self, name), 1)
        for name in ("budget_bytes", "hidden", "seed"):
            check_int(name, getattr(self, name), 0)
        for name in ("head", "limit", "cold_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0)
        for name, top in (("share", 1.0), ("audit", 1.0)):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= top:
                raise ConfigError(f"{name} must lie between 0 and {top:g}, got {value!r}")
        for name in ("tolerance", "audit_limit"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} must not be negative, got {value!r}")
        if not self.fade > 0:
            raise ConfigError(f"fade must be above 0 tokens, got {self.fade!r}")

    def setting(self, dial: str | None) -> Dial | None:
        """The numbers for a request, `None` for an exact one.

        Raises:
            ConfigError: there is no such dial.
        """
        name = dial or self.dial
        check_dial(name)
        if name == EXACT:
            return None
        own = {
            field.name: value
            for field in fields(Dial)
            if (value := getattr(self, field.name)) is not None
        }
        return replace(DIALS[name], **own)


def check_dial(name: str) -> None:
    """Raise ConfigError unless there is such a dial."""
    known = (EXACT, *DIALS)
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown dial: {name!r}{hint} (there are: {', '.join(known)})")
