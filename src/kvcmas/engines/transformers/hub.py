"""The Hugging Face hub: is it there, is the model there, or do the files lie in the cache?

A hub that cannot be reached is asked once, with a short timeout; then the local cache answers, or
a clear error. (Left to itself, a loader retries every file for a long while.)
"""

from __future__ import annotations

from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub import errors as hub_errors

from kvcmas.errors import ConfigError

TIMEOUT_SECONDS = 10.0


def ask_hub(name: str, revision: str | None = None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Options for `from_pretrained` that load a hub id, and notes for the user.

    Raises ConfigError that says what was tried and what to do.
    """
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        HfApi().model_info(name, revision=revision, timeout=TIMEOUT_SECONDS)
    except hub_errors.HFValidationError as error:
        raise ConfigError(
            f"{name!r} is neither a file nor a folder, and it cannot be a hub id "
            "(expected organisation/model); give a folder, a GGUF file, a hub id or 'demo'"
        ) from error
    except hub_errors.GatedRepoError as error:
        raise ConfigError(
            f"{name} is gated on the hub: accept its terms there, then log in with 'hf auth login'"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise ConfigError(f"{name} has no revision {revision!r} on the hub") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"no model {name!r}: no file or folder of that name here, and none on the hub (or it "
            "is private: log in with 'hf auth login'). Check the spelling, or use 'demo'"
        ) from error
    # HTTPError belongs to the HTTP library that the installed hub client brings along.
    except (hub_errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(cached, str):
            raise ConfigError(
                f"cannot load {name!r}: no file or folder of that name here, the hub cannot be "
                f"reached ({error}), and the model is not in the local cache. Check the "
                "connection, give a local folder or a GGUF file, or use 'demo'"
            ) from error
        note = f"the hub cannot be reached; {name} is loaded from the local cache"
        return {**options, "local_files_only": True}, (note,)
    return options, ()
