"""Where a record comes from: commit, versions, machine."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

import kvcmas
from kvcmas.engines.transformers import LoadedModel


def environment() -> dict[str, Any]:
    """Commit (where the package runs from a git checkout), versions, processor, threads, time."""
    return {
        "commit": commit(),
        "kvcmas": kvcmas.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def model_facts(loaded: LoadedModel) -> dict[str, Any]:
    """Which model was measured."""
    return {
        "name": loaded.name,
        "source": loaded.source,
        "fingerprint": loaded.fingerprint.digest,
        "dtype": loaded.support.dtype,
        "device": str(loaded.model.device),
    }


def commit() -> str | None:
    """The git commit of the source tree, with `+` when files differ from it."""
    root = Path(kvcmas.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
