"""`kvcmas doctor`: can this model's KV be shared, and does it behave as kvcmas believes?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvcmas.cli.doctor_view import show_verdict
from kvcmas.cli.doctor_vllm import doctor_vllm
from kvcmas.cli.options import Attention, Device, DType, JsonFlag, TextOnly, parse_numbers
from kvcmas.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvcmas.engines.transformers.doctor_report import Check, DoctorReport

_STATUS = {"supported": 0, "wrong": 1, "unsupported": 2}
_IN_VLLM = ("model", "flags", "vllm", "seed", "json")


def doctor(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A hub id, a folder, a GGUF file, or 'demo'.")
    ],
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM_FLAGS]", help="With --vllm: its flags, behind a --."),
    ] = None,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Examine vLLM with this model, as kvcmas serve runs it.")
    ] = False,
    lengths: Annotated[
        str, typer.Option(help="Tokens of the prompts to examine, with commas between.")
    ] = "200,3000",
    shifts: Annotated[
        str, typer.Option(help="Positions by which keys are moved, with commas between.")
    ] = "1,37,1000",
    dtype: DType = "float32",
    device: Device = "auto",
    attention: Attention = None,
    text_only: TextOnly = False,
    rope_as: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Rotate keys as this known model type does."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    layers: Annotated[
        bool, typer.Option("--layers", help="Show the errors of every layer.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Compare what is reused with what the model computes, layer by layer.

    With --vllm: start vLLM, and compare answers of prompts with holes with plain ones.

    Exit status: 0 supported, 1 wrong (a check failed) or an error, 2 unsupported.
    """
    from rich.console import Console

    _check_options(context, vllm, flags or [])
    if vllm:
        verdict = doctor_vllm(model, flags or [], seed, json)
        raise typer.Exit(_STATUS[verdict])

    from kvcmas.engines.transformers.doctor import diagnose

    wanted, moves = parse_numbers(lengths, "--lengths"), parse_numbers(shifts, "--shifts")
    console = Console(stderr=True)
    with console.status("starting") as status:

        def tell(message: str) -> None:
            status.update(message)
            if not console.is_terminal:
                console.print(message, markup=False, highlight=False, soft_wrap=True)

        report = diagnose(
            model,
            lengths=wanted,
            shifts=moves,
            rope_as=rope_as,
            seed=seed,
            progress=tell,
            text_only=text_only,
            dtype=dtype,
            device=device,
            attention=attention,
        )
    if json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        _show(report, layers, Console())
    raise typer.Exit(_STATUS[report.verdict])


def _check_options(context: typer.Context, vllm: bool, flags: Sequence[str]) -> None:
    """Refuse what the other engine alone understands."""
    if not vllm:
        if flags:
            raise ConfigError(
                f"{' '.join(flags)}: flags of vLLM, but --vllm is missing; add it, or leave them"
            )
        return
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE" and option.name not in _IN_VLLM:
            raise ConfigError(
                f"{option.opts[0]} is for the transformers engine; with --vllm, vLLM's own flags "
                "stand behind a --, for example -- --dtype bfloat16"
            )


def _show(report: DoctorReport, layers: bool, console: Console) -> None:
    def say(line: str, style: str = "") -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    if report.layers:
        window = "an unknown window" if report.window is None else f"a window of {report.window}"
        say(
            f"{report.architecture} ({report.model_type}), {report.layers} layers with "
            f"{report.kv_heads} KV heads of {report.head_dim}, {window} tokens, {report.dtype}, "
            f"{report.attention} attention on {report.device}"
        )
    if report.sliding_window:
        say(f"{report.sliding_layers} layers slide over {report.sliding_window} tokens")
    for line in report.rope:
        say(line)
    if report.checks:
        console.print(_checks_table(report.checks))
    if report.checks and layers:
        console.print(_layers_table(report.checks))
    show_verdict(report, say)


def _checks_table(checks: tuple[Check, ...]) -> Table:
    from rich.table import Table

    table = Table("Compared", "Length", "Shift", "Worst layer", "Error", "Tolerance", "")
    for column in table.columns[1:6]:
        column.justify = "right"
    for check in checks:
        table.add_row(
            check.name,
            str(check.length),
            "" if check.shift is None else str(check.shift),
            "" if check.worst_layer is None else str(check.worst_layer),
            f"{check.error:.1e}",
            f"{check.tolerance:.0e}",
            "ok" if check.passed else "FAILED",
        )
    return table


def _layers_table(checks: tuple[Check, ...]) -> Table:
    from rich.table import Table

    shown = [check for check in checks if check.layers]
    table = Table("Layer", title="Error of each layer (length/shift)")
    for check in shown:
        shift = "" if check.shift is None else f"/{check.shift}"
        table.add_column(f"{check.name} {check.length}{shift}", justify="right")
    for layer in range(len(shown[0].layers)):
        table.add_row(str(layer), *(f"{check.layers[layer]:.0e}" for check in shown))
    return table
