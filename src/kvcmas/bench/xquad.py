"""Where the benchmark's own contexts are looked for: XQuAD, which is not part of the project."""

from __future__ import annotations

from pathlib import Path

import kvcmas
from kvcmas.errors import ConfigError

NAMES = ("xquad-en-36.json", "xquad.en.json")
_FOLDERS = (Path("."), Path("data"), Path("shared") / "data")


def find_xquad() -> Path:
    """A file with XQuAD's English articles in the working directory, the source tree, or one of
    the folders above them, there itself or in `data` or `shared/data`.

    Raises:
        ConfigError: there is none; says where it comes from.
    """
    bases = [Path.cwd(), Path(kvcmas.__file__).resolve().parents[2]]
    for base in dict.fromkeys(folder for start in bases for folder in (start, *start.parents)):
        for file in (base / folder / name for folder in _FOLDERS for name in NAMES):
            if file.is_file():
                return file
    raise ConfigError(
        "no contexts: give any SQuAD .json, .jsonl or .txt file with --contexts, or save XQuAD's "
        "English articles (xquad.en.json in the GitHub repository google-deepmind/xquad) into "
        "this folder"
    )
