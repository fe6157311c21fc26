"""The command `kvcmas`: its options, and how errors reach the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvcmas import __version__
from kvcmas.cli.bench import app as bench
from kvcmas.cli.demo import demo
from kvcmas.cli.doctor import doctor
from kvcmas.cli.methods import methods
from kvcmas.cli.output import ERROR_STATUS, ErrorReportingGroup
from kvcmas.cli.run import run
from kvcmas.cli.serve import serve
from kvcmas.errors import KvcmasError

app = typer.Typer(
    name="kvcmas",
    cls=ErrorReportingGroup,
    help="Agents that read the same text share its KV cache instead of prefilling it again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvcmas {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that stand before a command."""


app.command()(demo)
app.command()(run)
app.command()(serve)
app.command()(doctor)
app.command()(methods)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line; an error raised on purpose prints one message and exits with 1."""
    try:
        app()
    except KvcmasError as error:
        typer.echo(f"kvcmas: {error}", err=True)
        sys.exit(ERROR_STATUS)
