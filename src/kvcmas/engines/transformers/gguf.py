"""GGUF files: converted once into a folder that transformers loads quickly.

transformers reads GGUF, but slowly and anew each time, and refuses to save what it read. So the
weights are unpacked, put into a plain model of the same class and saved in a cache folder:

    <cache>/models/<file stem>-<key>/     complete, or not there at all
    <cache>/models/.tmp-<random>/         a conversion in progress

A folder is written under a temporary name and renamed when complete, so an interrupted
conversion leaves no half model, and of two at once the first one to finish wins. The key covers
the file's content, the dtype and the versions that convert.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvcmas.engines.transformers.progress import quiet_bars
from kvcmas.errors import ConfigError, MissingDependencyError, UnsupportedModelError

MAGIC = b"GGUF"
_FORMAT = 1  # of the cache folder; raise it when what is saved changes
_MANIFEST = "kvcmas.json"
_STALE_SECONDS = 24 * 3600

# What the reader of transformers raises on a file that is cut or scrambled.
DAMAGED = (KeyError, ValueError, IndexError, OSError, OverflowError, struct.error)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted GGUF file.

    folder: where it is cached; `None` if the cache could not be written (`note` says why), and
        then `model` and `tokenizer` hold the result.
    fresh: converted by this very call rather than found.
    """

    folder: Path | None
    fresh: bool
    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    note: str = ""


def default_cache_dir() -> Path:
    """The platform's folder for caches: `~/Library/Caches/kvcmas` or `$XDG_CACHE_HOME/kvcmas`."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvcmas"
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path counts as not set.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "kvcmas"


def check_gguf(file: Path) -> None:
    """Raise ConfigError unless `file` begins as a GGUF file does."""
    try:
        with file.open("rb") as stream:
            magic = stream.read(len(MAGIC))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    if magic != MAGIC:
        raise ConfigError(
            f"{file} is not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}; "
            "check that it was downloaded completely (a Git LFS pointer is a small text file)"
        )


def converted_folder(file: Path, dtype: torch.dtype, cache_dir: Path | None = None) -> Path:
    """Where a GGUF file's converted model is, or would be (`is_complete` tells).

    The name holds a digest of the file's content, the dtype and the versions that convert.
    """
    with file.open("rb") as stream:
        content = hashlib.file_digest(stream, "sha256").hexdigest()
    parts = (_FORMAT, file.stat().st_size, content, str(dtype), transformers.__version__)
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return (cache_dir or default_cache_dir()) / "models" / f"{file.stem}-{key}"


def convert_gguf(
    file: Path,
    *,
    dtype: torch.dtype = torch.float32,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Find the converted model of a GGUF file in the cache, or convert it.

    Raises ConfigError (not a GGUF file, damaged), UnsupportedModelError (an architecture that
    transformers cannot read from GGUF) and MissingDependencyError. A cache that cannot be written
    is no error: the model is then returned in memory.
    """
    report = progress or _silent
    check_gguf(file)
    folder = converted_folder(file, dtype, cache_dir)
    if is_complete(folder):
        return Converted(folder, fresh=False)
    report(f"converting {file.name} (once)")
    model, tokenizer = _read(file, dtype)
    report(f"saving the converted model to {folder}")
    try:
        _publish(model, tokenizer, folder)
    except OSError as error:
        note = f"the converted model was not cached in {folder}: {error.strerror or error}"
        report(note)
        return Converted(None, fresh=True, model=model, tokenizer=tokenizer, note=note)
    return Converted(folder, fresh=True)


def _read(file: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Unpack a GGUF file into a plain model, as if it had come from safetensors."""
    try:
        with quiet_bars():
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(file.parent),
                gguf_file=file.name,
                dtype=dtype,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
    except ImportError as error:
        raise MissingDependencyError(
            f"reading {file.name} needs the packages gguf and accelerate ({error}); "
            "run: pip install gguf accelerate"
        ) from error
    except (*DAMAGED, RuntimeError) as error:
        raise _read_error(file, error) from error
    packed = complete_model(loaded, str(file))
    if hasattr(packed.config, "quantization_config"):
        # The weights are plain now: nothing that reads this configuration may unpack them again.
        del packed.config.quantization_config
    return packed, tokenizer


def complete_model(loaded: tuple[PreTrainedModel, dict[str, Any]], source: str) -> PreTrainedModel:
    """The model of a `from_pretrained` with loading info, if the files gave all its weights.

    Raises ConfigError otherwise: transformers leaves what is missing at random values.
    """
    model, info = loaded
    missing = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if missing:
        raise ConfigError(
            f"{source} lacks {len(missing)} weights that its configuration asks for, or has them "
            f"in another shape ({', '.join(missing[:3])}, ...); download it completely, or check "
            "its configuration"
        )
    return model


def _read_error(file: Path, error: Exception) -> Exception:
    text = str(error)
    if "not supported" in text and "GGUF" in text:
        return UnsupportedModelError(
            f"transformers {transformers.__version__} cannot read this GGUF file: {text}; "
            "use the model's original weights (a hub id or a folder) instead"
        )
    return ConfigError(f"{file} cannot be read as a GGUF model, it may be damaged: {text}")


def _publish(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    if shutil.disk_usage(root).free < needed * 1.05:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB are needed, less is free")
    temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=root))
    try:
        with quiet_bars():
            _plain(model).save_pretrained(temporary, state_dict=model.state_dict())
            tokenizer.save_pretrained(temporary)
        sizes = {p.name: p.stat().st_size for p in temporary.iterdir() if p.is_file()}
        (temporary / _MANIFEST).write_text(json.dumps({"format": _FORMAT, "files": sizes}))
        for path in temporary.iterdir():
            _sync(path)
        _move(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without weights and without its origin: transformers saves this one."""
    with torch.device("meta"):
        shell = type(model)(model.config)
    shell.generation_config = model.generation_config
    return shell


def _move(temporary: Path, folder: Path) -> None:
    """Rename into place. A complete folder that is there already is kept, a damaged one not."""
    if folder.exists() and not is_complete(folder):
        # Under a name of its own first: another process may be doing the same.
        damaged = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
        with contextlib.suppress(FileNotFoundError):
            folder.rename(damaged / folder.name)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        temporary.rename(folder)
    except OSError:
        if not is_complete(folder):  # else another process was faster
            raise


def is_complete(folder: Path) -> bool:
    """All files that were saved are there, with their sizes."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        sizes = manifest["files"].items()
        return all((folder / name).stat().st_size == size for name, size in sizes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sync(path: Path) -> None:
    """Onto the disk, so that a power cut after the rename finds whole files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(root: Path) -> None:
    """Remove what conversions that were killed left behind."""
    for path in root.glob(".tmp-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _silent(message: str) -> None:
    """Progress that nobody wants to see."""
