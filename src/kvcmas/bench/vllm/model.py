"""The model of all parts, as every engine reads it."""

from __future__ import annotations

from collections.abc import Callable


def model_of(name: str, progress: Callable[[str], None]) -> str:
    """A folder or a hub id; a GGUF file, such as the demo's model, is converted to a folder.

    Raises:
        ConfigError: there is no such model, or the converted one cannot be kept.
    """
    from kvcmas.engines.transformers.sources import resolve
    from kvcmas.engines.vllm.source import readable_source

    return readable_source(resolve(name), progress)
