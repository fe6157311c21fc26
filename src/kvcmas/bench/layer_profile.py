"""Measures groups of layers for `droidspeak`: the KL that is left when each is computed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from kvcmas.bench.arms import Arm
from kvcmas.bench.contexts import Context
from kvcmas.bench.fidelity import FidelityBench
from kvcmas.bench.roles import Role
from kvcmas.bench.steps import Report, silent
from kvcmas.engines.transformers import LoadedModel
from kvcmas.methods.layer_profile import Profiled


def profile_layers(
    loaded: LoadedModel,
    roles: Sequence[Role],
    learning: Sequence[Context],
    testing: Sequence[Context],
    groups: Sequence[tuple[int, int]],
    tokens: int,
    *,
    template: str | None = None,
    report: Report = silent,
) -> list[Profiled]:
    """One entry for each group `(first, layers)`; the loss is the mean KL over readers' requests.

    The contexts should not be those on which the choice is judged.

    Raises:
        ConfigError: a group beyond the model's layers.
        PromptError: a prompt does not fit the model's window.
    """
    arms = {
        f"{first}+{layers}": Arm(
            f"{first}+{layers}", "droidspeak", {"first": first, "layers": layers}
        )
        for first, layers in groups
    }
    bench = FidelityBench(
        *(loaded, roles, learning, testing, tuple(arms.values()), tokens),
        template=template,
        report=report,
    )
    bench.learn()
    rows = bench.measure()
    return [
        Profiled(first, layers, fmean(row.kl for row in rows if row.arm == label))
        for label, (first, layers) in zip(arms, groups, strict=True)
    ]
