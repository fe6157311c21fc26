"""The demo's team and texts: package data, or files of the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from kvcmas.errors import ConfigError
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


def read_documents(paths: Sequence[Path]) -> tuple[str, ...]:
    """The user's own texts, one for each round.

    Raises:
        ConfigError: a file cannot be read, is no text, or is empty.
    """
    return tuple(_read(path) for path in paths)


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"document {path} cannot be read ({error.strerror or error}); give a text file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"document {path} is not UTF-8 text ({error}); save it so") from error
    if not text:
        raise ConfigError(f"document {path} is empty; give a text of some paragraphs")
    return text


def _folder() -> Traversable:
    return resources.files(__package__) / _DATA


def _texts(folder: Traversable) -> tuple[str, ...]:
    files = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIX)),
        key=lambda entry: entry.name,
    )
    return tuple(entry.read_text(encoding="utf-8").strip() for entry in files)
