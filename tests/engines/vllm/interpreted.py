"""vLLM's newer model runner (V2) on a CPU: its GPU kernels run in Triton's interpreter."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest


class CpuDriver:
    """What Triton asks of a device's driver; the interpreter needs no device."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    def get_device_interface(self) -> Any:
        return SimpleNamespace()


def use_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Before vLLM is imported; holds for the whole process."""
    patch.setitem(os.environ, "TRITON_INTERPRET", "1")
    patch.setitem(os.environ, "VLLM_USE_V2_MODEL_RUNNER", "1")
    backends = pytest.importorskip("triton.backends").backends
    patch.setitem(backends, "cpu", SimpleNamespace(driver=CpuDriver, compiler=None))
