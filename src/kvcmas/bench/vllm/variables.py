"""Environment variables of processes that run vLLM; they must be set before it is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def engine_variables(model: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process with an engine in it; what is set already stays.

    Scheduler and worker live in the engine's own process, where they can be looked at.
    """
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(model).is_dir():
        wanted["HF_HUB_OFFLINE"] = "1"
    return {**wanted, **environment}


def server_variables(model: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a server, which has processes of its own."""
    found = engine_variables(model, environment)
    del found["VLLM_ENABLE_V1_MULTIPROCESSING"]
    return found
