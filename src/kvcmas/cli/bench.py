"""`kvcmas bench`: fidelity, the headline figures, vLLM, and latency and memory on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcmas.cli.bench_gpu import gpu
from kvcmas.cli.bench_vllm import vllm
from kvcmas.cli.options import STDOUT, Attention, Device, DType, JsonFile, Model, parse_settings
from kvcmas.cli.output import check_json_target, write_json
from kvcmas.errors import ConfigError

if TYPE_CHECKING:
    from kvcmas.bench.contexts import Context
    from kvcmas.cli.bench_view import BenchView
    from kvcmas.engines.transformers import LoadedModel

app = typer.Typer(
    name="bench", help="Measure: fidelity, the headline figures, speed.", no_args_is_help=True
)
app.command()(gpu)
app.command()(vllm)

_Contexts = Annotated[
    Path,
    typer.Option(help="SQuAD .json, .jsonl, .txt or .md (--- between contexts), or a folder."),
]
_Field = Annotated[str | None, typer.Option(help="The field of .jsonl lines that holds the text.")]
_Roles = Annotated[
    Path | None, typer.Option(help="YAML with the agents; by default planner to judge.")
]
_Learn = Annotated[int, typer.Option(min=1, help="Contexts to learn from, the first ones.")]
_Test = Annotated[int, typer.Option(min=1, help="Contexts to measure on, those behind them.")]
_Tokens = Annotated[int, typer.Option(min=1, help="Longest answer that is compared, in tokens.")]
_Plain = Annotated[
    bool, typer.Option("--plain", help="Plain text in place of the model's chat template.")
]


@app.command()
def fidelity(
    contexts: _Contexts,
    model: Model = "demo",
    field: _Field = None,
    roles: _Roles = None,
    methods: Annotated[
        str, typer.Option(help="Methods with commas between; LABEL:METHOD for variants of one.")
    ] = "fullshared,kvcmas",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="LABEL.NAME=VALUE", help="Of an arm; repeat it."),
    ] = None,
    learn: _Learn = 20,
    test: _Test = 16,
    tokens: _Tokens = 32,
    baseline: Annotated[
        str, typer.Option(help="The label that KL ratios refer to, where it is measured.")
    ] = "fullshared",
    dtype: DType = "float32",
    device: Device = "auto",
    attention: Attention = None,
    plain: _Plain = False,
    json: JsonFile = None,
) -> None:
    """How far answers behind reused KV are from answers behind a full prefill."""
    settings = parse_settings(option or [])
    check_json_target(json)

    from rich.console import Console

    from kvcmas.bench.arms import parse_arms
    from kvcmas.bench.fidelity import FidelityBench
    from kvcmas.bench.report import arms_table, result_of
    from kvcmas.bench.roles import read_roles
    from kvcmas.bench.stats import without_nan
    from kvcmas.cli.bench_view import BenchView

    arms = parse_arms(methods, settings)
    team = read_roles(roles)
    learning, testing = _contexts(contexts, field, learn, test)
    console = Console(stderr=True)
    with BenchView(console) as view:
        loaded = _load(model, dtype, device, attention, view)
        bench = FidelityBench(
            loaded,
            team,
            learning,
            testing,
            arms,
            tokens,
            template=_template(plain),
            report=view.report,
        )
        learned = bench.learn()
        rows = bench.measure()
    compared = baseline if any(arm.label == baseline for arm in arms) else ""
    result = result_of(bench, learned, rows, compared)
    Console(stderr=json == STDOUT).print(arms_table(result))
    if json is not None:
        write_json(without_nan(result.model_dump(mode="json")), json)


@app.command()
def core(
    contexts: Annotated[
        Path | None,
        typer.Option(help="As of `fidelity`; by default XQuAD's articles, where they are found."),
    ] = None,
    model: Model = "demo",
    field: _Field = None,
    roles: _Roles = None,
    learn: _Learn = 20,
    test: _Test = 16,
    tokens: _Tokens = 32,
    dtype: DType = "float32",
    device: Device = "cpu",
    attention: Attention = None,
    plain: _Plain = False,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the full record as JSON.")
    ] = None,
) -> None:
    """The headline figures; the last line of the output is a JSON object with them."""
    if json == STDOUT:
        raise ConfigError("--json -: standard output has the figures already; give a file")
    check_json_target(json)

    from json import dumps

    from rich.console import Console

    from kvcmas.bench.core import run_core
    from kvcmas.bench.fidelity import Sizes
    from kvcmas.bench.report import arms_table
    from kvcmas.bench.roles import read_roles
    from kvcmas.bench.stats import without_nan
    from kvcmas.bench.xquad import find_xquad
    from kvcmas.cli.bench_view import BenchView

    team = read_roles(roles)
    learning, testing = _contexts(contexts or find_xquad(), field, learn, test)
    with BenchView(Console(stderr=True)) as view:
        loaded = _load(model, dtype, device, attention, view)
        figures, result = run_core(
            loaded,
            team,
            learning,
            testing,
            Sizes(learn, test, tokens),
            template=_template(plain),
            report=view.report,
        )
    Console().print(arms_table(result))
    if json is not None:
        record = {"figures": figures, "fidelity": result.model_dump(mode="json")}
        write_json(without_nan(record), json)
    typer.echo(dumps(figures))


def _contexts(
    path: Path, field: str | None, learn: int, test: int
) -> tuple[list[Context], list[Context]]:
    from kvcmas.bench.contexts import read_contexts, split_contexts

    return split_contexts(read_contexts(path, field), learn, test)


def _load(
    model: str, dtype: str, device: str, attention: str | None, view: BenchView
) -> LoadedModel:
    from kvcmas.engines.transformers import load

    loaded = load(model, dtype=dtype, device=device, attention=attention, progress=view.status)
    for note in loaded.notes:
        view.note(note)
    return loaded


def _template(plain: bool) -> str | None:
    from kvcmas.engines.transformers.chat import PLAIN_TEMPLATE

    return PLAIN_TEMPLATE if plain else None
