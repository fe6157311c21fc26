"""The model of all parts, as every engine reads it."""

from __future__ import annotations

from collections.abc import Callable

from kvcmas.errors import ConfigError


def model_of(name: str, progress: Callable[[str], None]) -> str:
    """A folder or a hub id; a GGUF file, such as the demo's model, is converted to a folder.

    Raises:
        ConfigError: there is no such model, or the converted one cannot be kept.
    """
    from kvcmas.engines.transformers.gguf import convert_gguf
    from kvcmas.engines.transformers.sources import resolve

    origin = resolve(name)
    if origin.gguf is None:
        return origin.source
    converted = convert_gguf(origin.gguf, progress=progress)
    if converted.folder is None:
        raise ConfigError(
            f"vLLM reads a converted GGUF file from a folder, but {converted.note}; set "
            "XDG_CACHE_HOME to a folder with room, or give the model's original weights"
        )
    return str(converted.folder)
