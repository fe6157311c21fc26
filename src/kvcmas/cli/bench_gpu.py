"""`kvcmas bench gpu`: TTFT and memory on CUDA, with random weights."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcmas.cli.options import STDOUT, JsonFile, parse_numbers
from kvcmas.cli.output import check_json_target, write_json
from kvcmas.errors import ConfigError


def gpu(
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ...; cpu only with --tiny.")] = "cuda",
    contexts: Annotated[
        str, typer.Option(metavar="TOKENS", help="Lengths of the contexts, with commas between.")
    ] = "1000,4000,8000",
    learn: Annotated[int, typer.Option(min=1, help="Contexts to learn from.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Contexts of each length.")] = 3,
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny model, to try it out.")] = False,
    json: JsonFile = None,
) -> None:
    """TTFT and memory of all methods on a random model of Llama-3.2-1B's shape."""
    lengths = parse_numbers(contexts, "--contexts")
    check_json_target(json)
    if min(lengths) < 1:
        raise ConfigError(f"--contexts {contexts}: lengths must be at least 1 token")

    import torch
    from rich.console import Console

    from kvcmas.bench.environment import environment
    from kvcmas.bench.gpu import GpuBench, GpuSettings, gpu_record, gpu_table
    from kvcmas.cli.bench_view import BenchView

    kind = device.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {device}: this torch ({torch.__version__}) finds no CUDA device; run this "
            "on a machine with an NVIDIA GPU, or try it out with --device cpu --tiny"
        )
    if kind not in ("cuda", "cpu") or (kind == "cpu" and not tiny):
        raise ConfigError(
            f"--device {device}: expected cuda, or cpu with --tiny (a model of 1.2 billion "
            "parameters says nothing of a GPU on a CPU)"
        )
    longest = 2000
    if tiny and max(lengths) > longest:
        lengths = tuple(length for length in lengths if length <= longest) or (longest,)
    settings = GpuSettings(
        lengths=lengths,
        learn=learn,
        learn_length=min(1000, max(lengths)),
        repeats=repeats,
        tiny=tiny,
    )
    place = torch.device(device)
    with BenchView(Console(stderr=True)) as view:
        rows = GpuBench(settings, place, view.report).run()
    Console(stderr=json == STDOUT).print(gpu_table(rows))
    if json is not None:
        name = torch.cuda.get_device_name(place) if kind == "cuda" else "CPU"
        write_json({"environment": environment(), **gpu_record(settings, rows, name)}, json)
