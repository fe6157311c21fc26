"""Options that several commands share, and how their texts become values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from kvcmas.errors import ConfigError

JSON_ON_STDOUT: Final = "kvcmas.json_on_stdout"
"""Key in the context's `meta`: the command prints JSON, so errors are told in JSON too."""

STDOUT: Final = "-"


def _remember_json(context: typer.Context, value: Any) -> Any:
    context.meta[JSON_ON_STDOUT] = value is True or value == STDOUT
    return value


Model = Annotated[
    str, typer.Option("--model", "-m", help="A hub id, a folder, a GGUF file, or 'demo'.")
]
DType = Annotated[
    str, typer.Option(help="Type of weights and KV: float32, bfloat16, float16, or auto.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto: CUDA if there is one.")]
Attention = Annotated[
    str | None, typer.Option(help="sdpa or eager; by default what transformers chooses.")
]
TextOnly = Annotated[
    bool, typer.Option("--text-only", help="Accept a model that also takes images, for text.")
]
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=_remember_json,
        help="Write the full record as JSON; - prints it and nothing else.",
    ),
]
JsonFlag = Annotated[
    bool,
    typer.Option("--json", callback=_remember_json, help="Print JSON and nothing else."),
]


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """`["rank=8", "online=false"]` as a dictionary.

    Values are whole numbers, numbers, `true`, `false` or `none` where they read like one, and
    texts otherwise.

    Raises:
        ConfigError: a text without `=` or name, or a name given twice.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        label, dot, option = name.strip().rpartition(".")
        name = label + dot + option.replace("-", "_")
        if not equals or not name:
            raise ConfigError(f"--option {text!r}: expected name=value, for example dial=strict")
        if name in settings:
            raise ConfigError(f"--option {name} is given twice; give it once")
        settings[name] = _value(value.strip())
    return settings


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """`"200,3000"` as whole numbers.

    Raises:
        ConfigError: anything else.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"{option} {text!r}: expected whole numbers with commas between, such as 200,3000"
        ) from error


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
