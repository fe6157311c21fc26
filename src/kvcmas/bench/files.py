"""Reading the user's text files."""

from __future__ import annotations

from pathlib import Path

from kvcmas.errors import ConfigError


def read_file(path: Path, what: str) -> str:
    """The text of a file; `what` (such as `contexts`) begins every message.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{what} {path}: cannot be read ({error.strerror or error}); give another path"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what} {path}: is not UTF-8 text ({error}); save it as UTF-8"
        ) from error
