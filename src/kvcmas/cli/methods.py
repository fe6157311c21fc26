"""`kvcmas methods`: what can be chosen with --method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from kvcmas.cli.options import JsonFlag
from kvcmas.cli.output import print_json

if TYPE_CHECKING:
    from kvcmas.methods import MethodDescription


def methods(json: JsonFlag = False) -> None:
    """List the sharing methods, their papers, and their options with defaults."""
    from kvcmas.methods import describe, names

    found = [describe(name) for name in names()]
    if json:
        print_json([_as_data(method) for method in found])
        return
    for method in found:
        typer.echo(f"{method.name}: {method.summary}")
        source = ", ".join(part for part in (method.paper, method.link) if part)
        if source:
            typer.echo(f"    paper: {source}")
        for option, default in method.defaults.items():
            typer.echo(f"    --option {option}={_shown(default)}")


def _as_data(method: MethodDescription) -> dict[str, Any]:
    return {
        "name": method.name,
        "summary": method.summary,
        "paper": method.paper,
        "link": method.link,
        "options": dict(method.defaults),
    }


def _shown(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
