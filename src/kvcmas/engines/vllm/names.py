"""Names by which vLLM finds the parts of kvcmas."""

from __future__ import annotations

from typing import Final

CONNECTOR: Final = "KvcmasConnector"
CONNECTOR_MODULE: Final = "kvcmas.engines.vllm.connector"
SCHEDULER: Final = "kvcmas.engines.vllm.scheduler.KvcmasScheduler"
ASYNC_SCHEDULER: Final = "kvcmas.engines.vllm.scheduler.KvcmasAsyncScheduler"

PARAMS_KEY: Final = "kvcmas"
"""Key of hints in a request's `kv_transfer_params`, and of the record in the response's."""
