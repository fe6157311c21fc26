"""From the MODEL of a command to what vLLM reads."""

from __future__ import annotations

import typer


def vllm_source(model: str, revision: str | None) -> tuple[str, str | None]:
    """What vLLM reads the model from, and what to call it when that is not its name.

    Raises:
        ConfigError: there is no such model, or a GGUF file cannot be converted.
    """
    from kvcmas.engines.transformers.sources import resolve
    from kvcmas.engines.vllm.source import readable_source

    def tell(message: str) -> None:
        typer.echo(f"kvcmas: {message}", err=True)

    origin = resolve(model, revision)
    for note in origin.notes:
        tell(note)
    source = readable_source(origin, tell)
    if origin.gguf is None:
        return source, None
    return source, model if model == "demo" else origin.gguf.stem
