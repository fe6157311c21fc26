"""What commands print: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from kvcmas.cli.options import JSON_ON_STDOUT, STDOUT
from kvcmas.errors import ConfigError, KvcmasError

ERROR_STATUS = 1


class ErrorReportingGroup(TyperGroup):
    """Commands whose `KvcmasError` becomes one line on stderr, a hint, and exit status 1.

    Where the command was to print JSON, stdout gets the error as an object too.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KvcmasError as error:
            typer.echo(f"kvcmas: {error}", err=True)
            if ctx.invoked_subcommand:
                command = f"{ctx.command_path} {ctx.invoked_subcommand}"
                typer.echo(f"Try '{command} --help' for all options.", err=True)
            if ctx.meta.get(JSON_ON_STDOUT):
                print_json({"error": {"type": type(error).__name__, "message": str(error)}})
            raise typer.Exit(ERROR_STATUS) from error


def print_json(data: Any) -> None:
    """Print JSON on stdout; what JSON cannot hold becomes text."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def check_json_target(target: str | None) -> None:
    """Refuse a path that cannot be written to, before the work begins.

    Raises:
        ConfigError: it is a folder, or its folder does not exist.
    """
    if target is None or target == STDOUT:
        return
    path = Path(target)
    if path.is_dir():
        raise ConfigError(f"--json {target} is a folder; give the path of a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            f"--json {target}: there is no folder {path.absolute().parent}; make it first"
        )


def write_json(data: Any, target: str) -> None:
    """Write JSON to a file, or to stdout for `-`.

    Raises:
        ConfigError: the file cannot be written.
    """
    if target == STDOUT:
        print_json(data)
        return
    text = json.dumps(data, indent=2, ensure_ascii=False, default=str)
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--json {target}: cannot be written ({error.strerror or error}); give another path"
        ) from error


def read_text(path: Path, option: str) -> str:
    """A text file.

    Raises:
        ConfigError: it cannot be read, or holds no text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: cannot be read ({error.strerror or error}); give a text file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{option} {path}: is not UTF-8 text ({error}); save it as UTF-8"
        ) from error
    if not text.strip():
        raise ConfigError(f"{option} {path}: is empty; give a file with text")
    return text
