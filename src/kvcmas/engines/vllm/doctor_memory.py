"""Is there memory for the donors that the options allow?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from kvcmas.engines.vllm.options import GIB, VllmOptions

_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: str, meminfo: Path = _MEMINFO) -> int | None:
    """Bytes that are free where the KV cache is, beside it; `None` where nobody tells."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    if device != "cpu" or not meminfo.exists():
        return None
    for line in meminfo.read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    return None


def memory_notes(options: VllmOptions, free: int | None, device: str) -> Iterator[str]:
    """What to do if donors may take more than there is."""
    # On a CPU both tiers are in the same memory.
    wanted = options.device_bytes + (options.host_bytes if device == "cpu" else 0)
    if free is None or wanted <= free:
        return
    advice = (
        "lower --device-gb and --host-gb of kvcmas serve"
        if device == "cpu"
        else "lower --device-gb of kvcmas serve, or vLLM's --gpu-memory-utilization"
    )
    yield (
        f"donors may take {wanted / GIB:.1f} GiB beside the KV cache, where {free / GIB:.1f} GiB "
        f"are free: {advice}"
    )
