"""From where a model comes to what vLLM reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcmas.errors import ConfigError

if TYPE_CHECKING:
    from kvcmas.engines.transformers.sources import Origin


def readable_source(origin: Origin, progress: Callable[[str], None]) -> str:
    """A folder or a hub id; a GGUF file, such as the demo's model, is converted to a folder.

    Raises:
        ConfigError: the file cannot be converted, or the converted model cannot be kept.
    """
    from kvcmas.engines.transformers.gguf import convert_gguf

    if origin.gguf is None:
        return origin.source
    # vLLM takes the folder in any dtype, so float32 shares the conversion with `kvcmas run`.
    converted = convert_gguf(origin.gguf, progress=progress)
    if converted.folder is None:
        raise ConfigError(
            f"vLLM reads a converted GGUF file from a folder, but {converted.note}; set "
            "XDG_CACHE_HOME to a folder with room, or give the model's original weights"
        )
    return str(converted.folder)
