"""`kvcmas doctor --vllm`: does kvcmas work in this vLLM, with this model?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from kvcmas.cli.doctor_view import show_verdict
from kvcmas.cli.vllm_source import vllm_source

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvcmas.engines.vllm.doctor_report import VllmCheck, VllmReport

_GIB = 1 << 30


def doctor_vllm(model: str, flags: Sequence[str], seed: int, json: bool) -> str:
    """Examine a model in vLLM, show the report and return its verdict.

    Raises:
        MissingDependencyError, ConfigError, UnsupportedEngineError: as `diagnose_vllm`.
    """
    from rich.console import Console

    from kvcmas.engines.vllm.command import doctor_command, flag_value, installed_vllm
    from kvcmas.engines.vllm.doctor import diagnose_vllm
    from kvcmas.engines.vllm.options import VllmOptions

    # Bad flags are refused before a model is looked for, which can take a while.
    doctor_command(model, VllmOptions(), flags, installed_vllm())
    source, _ = vllm_source(model, flag_value(flags, "--revision"))
    console = Console(stderr=True)
    with console.status("starting") as status:

        def tell(message: str) -> None:
            status.update(message)
            if not console.is_terminal:
                console.print(message, markup=False, highlight=False, soft_wrap=True)

        report = diagnose_vllm(source, flags, name=model, seed=seed, progress=tell)
    if json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        show(report, Console())
    return report.verdict


def show(report: VllmReport, console: Console) -> None:
    """Print a report."""

    def say(line: str, style: str = "") -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    say(f"vLLM {report.vllm}, torch {report.torch}, kvcmas {report.kvcmas}")
    if report.layers:
        ranks = f"{report.ranks} ranks of " if report.ranks > 1 else ""
        say(
            f"{report.architecture} ({report.model_type}), {ranks}{report.layers} layers with "
            f"{report.kv_heads} KV heads of {report.head_dim}, a window of {report.window} tokens, "
            f"{report.dtype} on {report.device}"
        )
        free = "" if report.free_bytes is None else f", {report.free_bytes / _GIB:.1f} GiB are free"
        say(
            f"{report.scheduler}, blocks of {report.block_size}, a KV cache of "
            f"{report.cache_tokens} tokens; donors may take {report.donor_bytes / _GIB:.1f} GiB"
            f"{free}"
        )
    if report.noise is not None:
        say(
            f"vLLM alone: log-probabilities differ by {report.noise:.1e} with and without its "
            "prefix cache"
        )
    if report.checks:
        console.print(_table(report.checks))
    show_verdict(report, say)


def _table(checks: tuple[VllmCheck, ...]) -> Table:
    from rich.table import Table

    table = Table("Examined", "Error", "Tolerance", "")
    for column in table.columns[1:3]:
        column.justify = "right"
    for check in checks:
        measured = check.tolerance is not None
        bound = ">" if check.name == "wrong donor" else ""
        table.add_row(
            check.name,
            f"{check.error:.1e}" if check.error is not None else "not finite" if measured else "",
            f"{bound}{check.tolerance:.0e}" if measured else "",
            "ok" if check.passed else "FAILED",
        )
    return table
