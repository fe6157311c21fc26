"""What every test shares: one torch thread, and the device that `--device` names."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        help="where tests that take the fixture `device` run: cpu (default), cuda, cuda:1, ...",
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    device = torch.device(config.getoption("--device"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(f"--device {device}: this torch ({torch.__version__}) has no CUDA")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.device)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """The device to test on; a test that takes this runs on CUDA in scripts/gpu-check."""
    return torch.device(pytestconfig.getoption("--device"))
