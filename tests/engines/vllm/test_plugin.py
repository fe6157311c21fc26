"""The entry point: what vLLM finds, and that it can be called in every process."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

import pytest

pytestmark = pytest.mark.vllm

CODE = """
import sys
from kvcmas.engines.vllm.plugin import register
register()
register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
print("kvcmas.engines.vllm.connector" in sys.modules)
print(KVConnectorFactory.get_connector_class_by_name("KvcmasConnector").__name__)
"""


def test_registered_once_and_imported_when_asked_for() -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    run = subprocess.run([sys.executable, "-c", CODE], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-2:] == ["False", "KvcmasConnector"]


def test_the_package_names_the_entry_point() -> None:
    try:
        found = distribution("kvcmas").entry_points
    except PackageNotFoundError:
        pytest.skip("kvcmas is on the path but not installed")
    assert [entry.value for entry in found if entry.group == "vllm.general_plugins"] == [
        "kvcmas.engines.vllm.plugin:register"
    ]
