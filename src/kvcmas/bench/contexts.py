"""The texts that all agents of a benchmark read: from SQuAD files, JSONL, or plain text.

FILE.json    SQuAD format: one context an article, its paragraphs joined by empty lines
FILE.jsonl   one object a line; the text is in the field `text`, `context` or `question`, or
             in the one that is named
FILE.txt     (or .md) contexts between lines that hold nothing but `---`
FOLDER       every .txt and .md file in it is one context, by name
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcmas.bench.files import read_file
from kvcmas.errors import ConfigError

FIELDS = ("text", "context", "question")
_TEXT_SUFFIXES = (".txt", ".md")
_SEPARATOR = re.compile(r"^---\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Context:
    """A text and what it is called in records."""

    name: str
    text: str


def read_contexts(path: Path, field: str | None = None) -> list[Context]:
    """All contexts of a file or folder, in its order.

    field: of JSONL lines; by default the first of `FIELDS` that a line has.

    Raises:
        ConfigError: nothing there, another format, or an empty context.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _TEXT_SUFFIXES)
        found = [Context(file.name, read_file(file, "contexts")) for file in files]
    elif path.suffix == ".json":
        found = list(_squad(path))
    elif path.suffix == ".jsonl":
        found = list(_lines(path, field))
    elif path.suffix in _TEXT_SUFFIXES:
        parts = _SEPARATOR.split(read_file(path, "contexts"))
        found = [Context(f"{path.name}:{number}", part) for number, part in enumerate(parts, 1)]
    else:
        raise ConfigError(
            f"contexts {path}: no file of a known format; give a SQuAD .json, a .jsonl, a .txt or "
            ".md file, or a folder of .txt or .md files"
        )
    return _checked(found, path)


def split_contexts(
    contexts: list[Context], learn: int, test: int
) -> tuple[list[Context], list[Context]]:
    """The first `learn` contexts to learn from, and the next `test` to measure on.

    Raises:
        ConfigError: there are too few, or a text occurs in both parts.
    """
    if learn + test > len(contexts):
        raise ConfigError(
            f"{learn} contexts to learn from and {test} to test on are asked for, and there are "
            f"{len(contexts)}; give more contexts or smaller numbers"
        )
    first, then = contexts[:learn], contexts[learn : learn + test]
    known = {context.text: context.name for context in first}
    for context in then:
        if context.text in known:
            raise ConfigError(
                f"context {context.name} to test on is the same text as {known[context.text]}, "
                "which is learned from; remove one of them"
            )
    return first, then


def _squad(path: Path) -> Iterable[Context]:
    try:
        articles = json.loads(read_file(path, "contexts"))["data"]
        for number, article in enumerate(articles, 1):
            text = "\n\n".join(part["context"] for part in article["paragraphs"])
            yield Context(str(article.get("title") or f"article {number}"), text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"contexts {path}: is not JSON ({error}); correct it") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"contexts {path}: is not in SQuAD format ({type(error).__name__}: {error}); expected "
            '{"data": [{"paragraphs": [{"context": "..."}]}]}'
        ) from error


def _lines(path: Path, field: str | None) -> Iterable[Context]:
    names = (field,) if field else FIELDS
    for number, line in enumerate(read_file(path, "contexts").splitlines(), 1):
        if not line.strip():
            continue
        where = f"contexts {path}, line {number}"
        try:
            data: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}: is not JSON ({error}); correct it") from error
        name = next((name for name in names if isinstance(data, dict) and name in data), None)
        if name is None or not isinstance(data[name], str):
            raise ConfigError(
                f"{where}: has no text in a field {' or '.join(map(repr, names))}; "
                "name the field with --field"
            )
        yield Context(f"{path.name}:{number}", data[name])


def _checked(found: list[Context], path: Path) -> list[Context]:
    if not found:
        raise ConfigError(f"contexts {path}: holds no text; give one with some")
    for context in found:
        if not context.text.strip():
            raise ConfigError(f"contexts {path}: {context.name} is empty; remove it")
    return [Context(context.name, context.text.strip()) for context in found]
