"""The demo's team and texts, as they come with the package."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable

from kvcmas.workflow.loading import parse_workflow
from kvcmas.workflow.workflow import Workflow

_DATA = "data"
_EARLIER = "earlier"
_SUFFIX = ".md"


def team(rounds: int) -> Workflow:
    """The four agents of the demo."""
    text = (_folder() / "team.yaml").read_text(encoding="utf-8")
    return replace(parse_workflow(text, "the demo's team"), rounds=rounds)


def report(rounds: int) -> tuple[str, ...]:
    """The report of the first round, and what later rounds add to it: one text a round.

    There are three; later rounds add only what the agents write.
    """
    return _texts(_folder())[:rounds]


def earlier_texts(number: int) -> tuple[str, ...]:
    """Short texts on other matters, to learn from before the report comes."""
    return _texts(_folder() / _EARLIER)[:number]


def _folder() -> Traversable:
    return resources.files(__package__) / _DATA


def _texts(folder: Traversable) -> tuple[str, ...]:
    files = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIX)),
        key=lambda entry: entry.name,
    )
    return tuple(entry.read_text(encoding="utf-8").strip() for entry in files)
