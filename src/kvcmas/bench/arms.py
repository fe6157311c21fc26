"""What a benchmark compares: a method with options, under a label.

Arms of `kvcmas` learn once: those whose options differ only in how requests are served share what
one teacher has learned, and learn nothing more while they are measured. So they differ in nothing
but their options, and their order changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcmas.core.model_info import ModelInfo
from kvcmas.errors import ConfigError
from kvcmas.methods import Method, create, describe
from kvcmas.methods.kvcmas import Kvcmas

# Options that say how a request is served; all others say how and what is learned.
_SERVING = frozenset(
    {"dial", "share", "head", "tolerance", "limit", "cold_tokens", "audit", "audit_limit"}
    | {"correct", "landmarks", "budget_bytes", "learn", "exact_readers"}
)


@dataclass(frozen=True, slots=True)
class Arm:
    """A method to measure.

    Raises:
        ConfigError: the method or an option is unknown, or a value is out of range.
    """

    label: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = describe(self.method).defaults
        for option in self.options:
            if option not in known:
                raise ConfigError(
                    f"{self.label}: method {self.method!r} has no option {option!r} (there are: "
                    f"{', '.join(known)})"
                )
        if "learn" in self.options:
            raise ConfigError(
                f"{self.label}: the option learn belongs to the benchmark, which learns before it "
                "measures; leave it out"
            )
        describe(self.method).config(**self.options)

    @property
    def exact_agents(self) -> int:
        """How many of the first agents compute every new context exactly."""
        return int(self.options.get("exact_readers", 1))


def parse_arms(methods: str, options: Mapping[str, Any]) -> tuple[Arm, ...]:
    """`"fullshared,plain:kvcmas"` with `{"plain.correct": False}` as arms.

    An entry is a method, or a label of your own, a colon, and a method.

    Raises:
        ConfigError: an entry or option that fits nothing, or a label that is used twice.
    """
    entries = [entry.strip() for entry in methods.split(",") if entry.strip()]
    named = dict(_labelled(entry) for entry in entries)
    if not named or len(named) != len(entries):
        raise ConfigError(
            f"--methods {methods!r}: expected methods with commas between, each under a label of "
            "its own, such as fullshared,kvcmas,uncorrected:kvcmas"
        )
    own: dict[str, dict[str, Any]] = {label: {} for label in named}
    for name, value in options.items():
        label, dot, option = name.partition(".")
        if not dot or label not in own:
            raise ConfigError(
                f"--option {name}: expected LABEL.NAME=VALUE with a label of --methods "
                f"({', '.join(named)}), for example kvcmas.exact_readers=2"
            )
        own[label][option] = value
    return tuple(Arm(label, method, own[label]) for label, method in named.items())


def teachers(arms: Sequence[Arm], info: ModelInfo, budget: int) -> dict[str, Kvcmas]:
    """For the label of each `kvcmas` arm its teacher; arms that learn alike have one together."""
    groups: dict[tuple[tuple[str, Any], ...], list[Arm]] = {}
    for arm in arms:
        if arm.method == Kvcmas.name:
            kept = ((name, arm.options[name]) for name in sorted(set(arm.options) - _SERVING))
            groups.setdefault(tuple(kept), []).append(arm)
    found: dict[str, Kvcmas] = {}
    for options, group in groups.items():
        readers = max(arm.exact_agents for arm in group)
        teacher = create(
            Kvcmas.name, info, **dict(options), exact_readers=readers, budget_bytes=budget
        )
        if isinstance(teacher, Kvcmas):
            found |= dict.fromkeys((arm.label for arm in group), teacher)
    return found


def build(arm: Arm, info: ModelInfo, teacher: Kvcmas | None, budget: int) -> Method:
    """The arm's method, with an empty library.

    budget: bytes of donors, where the arm's options do not say. Without an option of the arm's,
    no request is audited: a benchmark measures what reuse costs by itself.
    """
    options: dict[str, Any] = {"budget_bytes": budget}
    if arm.method == Kvcmas.name:
        options["audit"] = 0.0
    known = describe(arm.method).defaults
    options = {name: value for name, value in options.items() if name in known}
    method = create(arm.method, info, **{**options, **arm.options})
    if teacher is not None and isinstance(method, Kvcmas):
        method.adopt(teacher)
    return method


def _labelled(entry: str) -> tuple[str, str]:
    label, colon, method = entry.partition(":")
    return (label.strip(), method.strip()) if colon else (entry, entry)
