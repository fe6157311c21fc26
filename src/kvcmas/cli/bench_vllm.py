"""`kvcmas bench vllm`: what kvcmas in vLLM is worth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcmas.cli.options import STDOUT, Model
from kvcmas.cli.output import check_json_target, write_json
from kvcmas.errors import ConfigError

if TYPE_CHECKING:
    from kvcmas.bench.vllm.settings import PartName


def vllm(
    model: Model = "demo",
    contexts: Annotated[
        Path | None,
        typer.Option(help="As of `core`; by default XQuAD's articles, where they are found."),
    ] = None,
    roles: Annotated[
        Path | None, typer.Option(help="YAML with the agents; by default planner to judge.")
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(help="holes, plain, quality, serving or soak; repeat it. All by default."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random texts and requests.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="As little as still runs all of it, to try it out.")
    ] = False,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the full record as JSON.")
    ] = None,
) -> None:
    """vLLM with kvcmas beside vLLM without; the last line of the output is JSON with figures.

    A part that fails leaves its figures null; the others are run all the same, and the status is 1.
    """
    parts = _parts(part)
    if json == STDOUT:
        raise ConfigError("--json -: standard output has the figures already; give a file")
    check_json_target(json)

    from json import dumps

    from rich.console import Console

    from kvcmas.bench.stats import without_nan
    from kvcmas.bench.vllm.model import model_of
    from kvcmas.bench.vllm.run import run_vllm
    from kvcmas.bench.vllm.settings import Settings
    from kvcmas.bench.xquad import find_xquad
    from kvcmas.cli.bench_view import BenchView

    with BenchView(Console(stderr=True)) as view:
        settings = Settings(
            model=model_of(model, view.status),
            contexts=(contexts or find_xquad()).absolute(),
            roles=roles.absolute() if roles is not None else None,
            seed=seed,
        )
        chosen = settings.quick() if quick else settings
        outcome = run_vllm(chosen, parts, view.report, view.note)
    typer.echo(dumps(without_nan(outcome.figures)))
    if json is not None:
        write_json(without_nan(outcome.record), json)
    outcome.check()


def _parts(names: list[str] | None) -> tuple[PartName, ...]:
    from kvcmas.bench.vllm.settings import PARTS

    unknown = [name for name in names or () if name not in PARTS]
    if unknown:
        raise ConfigError(
            f"--part {unknown[0]}: there is no such part (there are: {', '.join(PARTS)})"
        )
    return tuple(part for part in PARTS if not names or part in names)
