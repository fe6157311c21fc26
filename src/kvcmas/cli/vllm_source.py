"""From the MODEL of a command to what vLLM reads."""

from __future__ import annotations

import typer

from kvcmas.errors import ConfigError


def vllm_source(model: str, revision: str | None) -> tuple[str, str | None]:
    """What vLLM reads the model from, and what to call it when that is not its name.

    Raises:
        ConfigError: there is no such model, or a GGUF file cannot be converted.
    """
    from kvcmas.engines.transformers.gguf import convert_gguf
    from kvcmas.engines.transformers.sources import resolve

    def tell(message: str) -> None:
        typer.echo(f"kvcmas: {message}", err=True)

    origin = resolve(model, revision)
    for note in origin.notes:
        tell(note)
    if origin.gguf is None:
        return origin.source, None
    # vLLM takes the folder in any dtype, so float32 shares the conversion with `kvcmas run`.
    converted = convert_gguf(origin.gguf, progress=tell)
    if converted.folder is None:
        raise ConfigError(
            f"vLLM reads a converted GGUF file from a folder, but {converted.note}; set "
            "XDG_CACHE_HOME to a folder with room, or give the model's original weights"
        )
    return str(converted.folder), model if model == "demo" else origin.gguf.stem
