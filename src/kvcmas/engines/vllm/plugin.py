"""What vLLM calls at the start of each of its processes (entry points `vllm.general_plugins`)."""

from __future__ import annotations

from contextlib import suppress

from kvcmas.engines.vllm.names import CONNECTOR, CONNECTOR_MODULE


def register() -> None:
    """Make the connector known to vLLM by its name. Any number of calls do the same as one.

    The connector itself is imported only where it is asked for, so a vLLM that does not use it
    starts as it would without kvcmas.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # registered already
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
