"""`kvcmas demo`: a team of four agents reads one report, with sharing and without."""

from __future__ import annotations

from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcmas.bench.demo.settings import EARLIER_TEXTS, DemoSettings
from kvcmas.cli.options import STDOUT, JsonFile, Model, parse_settings
from kvcmas.cli.output import check_json_target, read_text, write_json
from kvcmas.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from kvcmas.bench.demo.results import DemoResult
    from kvcmas.bench.demo.watch import Watcher

_DEFAULTS = DemoSettings()


def demo(
    model: Model = _DEFAULTS.model,
    method: Annotated[
        str, typer.Option(help="The sharing method; see `kvcmas methods`.")
    ] = _DEFAULTS.method,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="Of the method; repeat it."),
    ] = None,
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
    json: JsonFile = None,
) -> None:
    """Show four agents reading one report: who computes, who reuses, and what it changes.

    Every prompt is answered twice, with sharing and without, one after the other.
    """
    from rich.console import Console

    from kvcmas.bench.demo.plot import check_matplotlib, save_plot
    from kvcmas.bench.demo.table import agents_table, exact_note

    settings = DemoSettings(model, method, rounds, max_tokens, warmup, parse_settings(option or []))
    if plot:
        check_matplotlib()
        _check_plot_file(out)
    check_json_target(json)
    console = Console(stderr=json == STDOUT)
    result = _run(settings, document or [], console)
    console.print()
    console.print(agents_table(result.agents, result.readers))
    lines = [exact_note(result.turns), *(f"Note: {note}" for note in result.notes)]
    if plot:
        save_plot(result.turns, f"{result.method} on {result.model}", out)
        lines.append(f"Plot: {out}")
    if json is not None:
        write_json(loads(result.model_dump_json()), json)
        lines += [f"Results: {json}"] if json != STDOUT else []
    for line in [*lines, "", result.verdict, result.summary]:
        if line or line is not result.verdict:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _run(settings: DemoSettings, documents: list[Path], console: Console) -> DemoResult:
    from kvcmas.bench.demo.run import run_demo
    from kvcmas.bench.demo.texts import earlier_texts, report, team
    from kvcmas.engines.runner import check_turns
    from kvcmas.engines.transformers import load
    from kvcmas.methods import describe

    agents = team(settings.rounds)
    own = tuple(read_text(path, "--document").strip() for path in documents)
    texts = own or report(settings.rounds)
    check_turns(agents, texts)
    describe(settings.method)
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


def _check_plot_file(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; give the path of a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--out {path}: there is no folder {path.absolute().parent}; make it")
