"""`kvcmas demo`: a team of four agents reads one report, with sharing and without."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcmas.bench.demo.settings import EARLIER_TEXTS, DemoSettings
from kvcmas.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from kvcmas.bench.demo.results import DemoResult
    from kvcmas.bench.demo.watch import Watcher

_DEFAULTS = DemoSettings()
_STDOUT = "-"


def demo(
    model: Annotated[
        str, typer.Option(help="A hub id, a folder, a GGUF file, or 'demo'.")
    ] = _DEFAULTS.model,
    method: Annotated[
        str, typer.Option(help="The sharing method; see `kvcmas methods`.")
    ] = _DEFAULTS.method,
    rounds: Annotated[int, typer.Option(help="How often each agent speaks.")] = _DEFAULTS.rounds,
    max_tokens: Annotated[
        int, typer.Option(help="Longest answer, in tokens.")
    ] = _DEFAULTS.max_tokens,
    warmup: Annotated[
        int,
        typer.Option(
            help=f"Earlier texts to learn from, 0 to {EARLIER_TEXTS}; 0 learns nothing beforehand."
        ),
    ] = _DEFAULTS.warmup,
    document: Annotated[
        list[Path] | None,
        typer.Option(help="A text file in place of the report; repeat it for later rounds."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the plot goes.")] = Path("kvcmas-demo.png"),
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Write the plot.")] = True,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write all results as JSON; - prints them.")
    ] = None,
) -> None:
    """Show four agents reading one report: who computes, who reuses, and what it changes.

    Every prompt is answered twice, with sharing and without, one after the other.
    """
    from rich.console import Console

    from kvcmas.bench.demo.plot import check_matplotlib, save_plot
    from kvcmas.bench.demo.table import agents_table, exact_note

    settings = DemoSettings(model, method, rounds, max_tokens, warmup)
    if plot:
        check_matplotlib()
        _check_folder(out, "--out")
    if json not in (None, _STDOUT):
        _check_folder(Path(json), "--json")
    console = Console(stderr=json == _STDOUT)
    result = _run(settings, document or [], console)
    console.print()
    console.print(agents_table(result.agents, result.readers))
    lines = [exact_note(result.turns), *(f"Note: {note}" for note in result.notes)]
    if plot:
        save_plot(result.turns, f"{result.method} on {result.model}", out)
        lines.append(f"Plot: {out}")
    if json is not None:
        _write_json(result, json)
        lines += [f"Results: {json}"] if json != _STDOUT else []
    for line in [*lines, "", result.verdict, result.summary]:
        if line or line is not result.verdict:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _run(settings: DemoSettings, documents: list[Path], console: Console) -> DemoResult:
    from kvcmas.bench.demo.run import run_demo
    from kvcmas.bench.demo.texts import earlier_texts, read_documents, report, team
    from kvcmas.engines.transformers import load

    agents = team(settings.rounds)
    texts = read_documents(documents) or report(settings.rounds)
    view = _view(settings, console)
    with view:
        loaded = load(settings.model, progress=view.status)
        return run_demo(loaded, settings, agents, texts, earlier_texts(settings.warmup), view)


def _view(settings: DemoSettings, console: Console) -> Watcher:
    if console.is_terminal:
        from kvcmas.bench.demo.live import LiveView

        return LiveView(console, f"kvcmas demo: {settings.method} on {settings.model}")
    from kvcmas.bench.demo.plain import PlainView

    return PlainView(console)


def _check_folder(path: Path, option: str) -> None:
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; give the path of a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.absolute().parent}; make it")


def _write_json(result: DemoResult, target: str) -> None:
    text = result.model_dump_json(indent=2)
    if target == _STDOUT:
        typer.echo(text)
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the results cannot be written to {target} ({error.strerror or error}); give another "
            "path with --json"
        ) from error
