"""The plot file: time to the first token, and where each prompt's KV came from, turn by turn."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcmas.bench.demo.bars import KINDS, LABELS, Kind
from kvcmas.bench.demo.results import DemoTurn, prefix_tokens, reused_tokens
from kvcmas.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WITH, _WITHOUT = "#2a7f62", "#b0b0b0"
_COLOURS: Final[dict[Kind, str]] = {
    "computed": "#c8553d", "reused": "#2a7f62", "prefix": "#8fb8de",
}  # fmt: skip
_BAR = 0.4


def check_matplotlib() -> None:
    """Raises MissingDependencyError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "the plot needs matplotlib, which is not installed; run: pip install 'kvcmas[demo]', "
            "or leave the plot out with --no-plot"
        )


def stacks(turns: Sequence[DemoTurn]) -> dict[Kind, list[int]]:
    """Tokens of each kind, turn by turn; they add up to the prompt."""
    return {
        "computed": [turn.sharing.computed for turn in turns],
        "reused": [reused_tokens(turn.sharing) for turn in turns],
        "prefix": [prefix_tokens(turn.sharing) for turn in turns],
    }


def draw(turns: Sequence[DemoTurn], title: str) -> Figure:
    """Two panels above each other, a place on the horizontal axis for each turn.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 0.8 * len(turns) + 2), 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title)
    _draw_times(upper, turns)
    _draw_tokens(lower, turns)
    places = range(len(turns))
    lower.set_xticks(places, [f"{turn.agent}\nround {turn.round}" for turn in turns], fontsize=8)
    return figure


def save_plot(turns: Sequence[DemoTurn], title: str, path: Path) -> None:
    """Draw and write a PNG file.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: the file cannot be written.
    """
    figure = draw(turns, title)
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise ConfigError(
            f"the plot cannot be written to {path} ({error.strerror or error}); give another "
            "path with --out"
        ) from error


def _draw_times(axes: Axes, turns: Sequence[DemoTurn]) -> None:
    places = range(len(turns))
    without = [turn.nonshared.ttft_s for turn in turns]
    shared = [turn.sharing.ttft_s for turn in turns]
    axes.bar([p - _BAR / 2 for p in places], without, _BAR, color=_WITHOUT, label="without sharing")
    axes.bar([p + _BAR / 2 for p in places], shared, _BAR, color=_WITH, label="with sharing")
    axes.set_ylabel("time to first token (s)")
    _finish(axes)


def _draw_tokens(axes: Axes, turns: Sequence[DemoTurn]) -> None:
    below = [0] * len(turns)
    tokens = stacks(turns)
    for kind in KINDS:
        axes.bar(
            range(len(turns)), tokens[kind], 2 * _BAR, below,
            color=_COLOURS[kind], label=LABELS[kind],
        )  # fmt: skip
        below = [low + more for low, more in zip(below, tokens[kind], strict=True)]
    axes.set_ylabel("prompt tokens")
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
