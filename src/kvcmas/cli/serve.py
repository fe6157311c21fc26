"""`kvcmas serve`: vLLM's OpenAI-compatible server, with kvcmas in it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvcmas.cli.options import parse_settings
from kvcmas.cli.vllm_source import vllm_source
from kvcmas.errors import ConfigError


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A hub id, a folder, a GGUF file, or 'demo'.")
    ],
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM_FLAGS]", help="Flags of vLLM, behind a --."),
    ] = None,
    dial: Annotated[
        str, typer.Option(help="exact, strict, balanced or fast, for requests that name none.")
    ] = "balanced",
    device_gb: Annotated[
        float | None, typer.Option(help="Most GiB of donors beside the KV cache (on the GPU).")
    ] = None,
    host_gb: Annotated[
        float | None, typer.Option(help="Most GiB of donors in the host's memory.")
    ] = None,
    tenant_gb: Annotated[
        float | None, typer.Option(help="Most GiB of one tenant's donors.")
    ] = None,
    exact_tenant: Annotated[
        list[str] | None,
        typer.Option(metavar="SALT", help="A cache_salt that is always served exactly; repeat it."),
    ] = None,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for a text that is just being computed.")
    ] = 10.0,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="Of the method; repeat it."),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="Of kvcmas: debug, info, warning or error.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", "--print-command", help="Print vLLM's command, start nothing."),
    ] = False,
) -> None:
    """Serve a model with vLLM; agents that read the same text share its KV cache.

    Example: kvcmas serve MODEL --dial strict -- --port 8001 --max-model-len 8192
    """
    from kvcmas.engines.vllm.command import flag_value, installed_vllm, server_command
    from kvcmas.engines.vllm.options import VllmOptions

    given = {
        "dial": dial,
        "method": parse_settings(option or []),
        "device_bytes": _bytes(device_gb, "--device-gb"),
        "host_bytes": _bytes(host_gb, "--host-gb"),
        "tenant_bytes": _bytes(tenant_gb, "--tenant-gb"),
        "exact_tenants": tuple(exact_tenant or ()),
        "wait_s": wait,
        "log_level": log_level,
    }
    options = VllmOptions.read({name: value for name, value in given.items() if value is not None})
    vllm = installed_vllm()
    # Bad flags are refused before a model is looked for, which can take a while.
    server_command(model, options, flags or [], vllm)
    source, served_as = vllm_source(model, flag_value(flags or [], "--revision"))
    command = server_command(
        source, options, flags or [], vllm, served_as=served_as, environment=os.environ
    )
    if dry_run:
        typer.echo(command.text())
        return

    from kvcmas.engines.vllm.compat import check_version

    check_version()
    typer.echo(f"kvcmas: {command.text()}", err=True)
    os.execvpe(command.arguments[0], command.arguments, {**os.environ, **command.variables})


def _bytes(gib: float | None, option: str) -> int | None:
    if gib is None:
        return None
    if not 0 <= gib < float("inf"):
        raise ConfigError(f"{option} must be a number of GiB of at least 0, got {gib:g}")
    return int(gib * (1 << 30))
