"""vLLM's door to kvcmas: a KV connector. It wires, and decides nothing.

In the scheduler's process it holds a `Coordinator`, in each worker's a `WorkerSide`; between
them travel a `StepWork` with every step and a `Report` with its output.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcmas.core.model_info import ModelInfo
from kvcmas.core.rope import Rope
from kvcmas.engines.vllm.compat import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    RequestStatus,
    attention_layers,
    block_hasher,
    bytes_per_token,
    check_version,
    on_cpu,
    role_names,
    tensor_rank,
    unsupported,
)
from kvcmas.engines.vllm.coordinator import Coordinator, Scheduled
from kvcmas.engines.vllm.directory import Directory
from kvcmas.engines.vllm.kv_access import KVAccess
from kvcmas.engines.vllm.messages import Report, StepWork
from kvcmas.engines.vllm.metrics import KvcmasPromMetrics, KvcmasStats
from kvcmas.engines.vllm.options import VllmOptions
from kvcmas.engines.vllm.pool import DonorPool
from kvcmas.engines.vllm.records import log_line
from kvcmas.engines.vllm.worker import WorkerSide
from kvcmas.errors import UnsupportedError

_log = logging.getLogger("vllm.kvcmas")


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step's work on its way to the workers."""

    work: StepWork = field(default_factory=StepWork)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Reports on their way to the scheduler; those of several ranks become one."""

    report: Report = field(default_factory=Report)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Both reports as one."""
        return WorkerReport(self.report.merge(other.report))


class KvcmasConnector(KVConnectorBase_V1):
    """See the module. Options: `VllmOptions`, as `kv_connector_extra_config`.

    Raises:
        UnsupportedError: a version of vLLM that kvcmas does not know.
        ConfigError: an unknown option, or one out of range.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_version()
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self.options = VllmOptions.read(transfer.kv_connector_extra_config)
        if self.options.log_level is not None:
            _log.setLevel(self.options.log_level.upper())
        self._vllm = vllm_config
        self._refused = unsupported(vllm_config, kv_cache_config) or _rope_problem(vllm_config)
        if self._refused is not None:
            _log.warning("kvcmas: every request is served exactly: %s", self._refused)
        self.coordinator: Coordinator | None = None
        self.worker: WorkerSide | None = None
        self.scheduled = Scheduled(StepWork())
        self._blocks: Any = None
        self._released: set[str] = set()
        if role == KVConnectorRole.SCHEDULER:
            self.coordinator = self._make_coordinator(vllm_config, kv_cache_config)

    def _make_coordinator(self, vllm_config: Any, kv_cache_config: Any) -> Coordinator:
        ranks = vllm_config.parallel_config.tensor_parallel_size
        directory = Directory(
            self.options.to_config(),
            bytes_per_token(kv_cache_config),
            ranks,
            self.options.tenant_bytes,
        )
        return Coordinator(
            self.options,
            directory,
            role_names(vllm_config),
            block_size=vllm_config.cache_config.block_size,
            hasher=block_hasher(vllm_config),
            stats=KvcmasStats(),
            refused=self._refused,
            on_cpu=on_cpu(),
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: donors are a cache, nobody waits for them at the other end."""
        return False

    # scheduler side ----------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Gives the blocks of each request."""
        self._blocks = kv_cache_manager

    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        self._side.arrive(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens behind vLLM's own prefix hit that stand in front of the request's own row."""
        side = self._side
        if not side.holes:
            side.before((), (request,), 0, 0, self.local_hit)
        return side.admit(request, num_computed_tokens), False

    def local_hit(self, request: Any) -> int:
        """Tokens that vLLM's own prefix cache holds; 0 for requests that do not read it."""
        return int(self._blocks.get_computed_blocks(request)[1])

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing: what is loaded is fixed with the step."""

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The step's work."""
        self.scheduled = self._side.commit(scheduler_output.num_scheduled_tokens, self._block_ids)
        work = self.scheduled.work
        if work.loads:
            scheduler_output.has_sync_kv_loads = True
        return StepMetadata(work)

    def _block_ids(self, request_id: str) -> tuple[int, ...]:
        return tuple(self._blocks.get_block_ids(request_id)[0])

    def measured(self, connector_output: Any) -> list[str]:
        """Requests that a step's measurements do not agree with, before its tokens count."""
        meta = getattr(connector_output, "kv_connector_worker_meta", None)
        return self._side.measured(meta.report if isinstance(meta, WorkerReport) else None)

    def update_connector_output(self, connector_output: Any) -> None:
        """News from the workers."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, WorkerReport):
            self._side.reported(meta.report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over; its blocks are held for one step if there is something to keep."""
        complete = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        self.drop_unsure(request.request_id)
        held, record = self._side.finish(request, tuple(block_ids), complete)
        if record is None:
            return held, None
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("kvcmas: %s: %s", request.request_id, log_line(record))
        return held, record.to_params() if self.options.records else None

    def drop_unsure(self, request_id: str) -> None:
        """Blocks whose KV was not agreed on leave the prefix cache before their request does."""
        first = self._side.unsure(request_id)
        if first is not None:
            blocks = self._block_ids(request_id)
            self._blocks.evict_blocks(set(blocks[first // self._vllm.cache_config.block_size :]))

    def reset_cache(self) -> bool:
        """Forget all donors (`/reset_prefix_cache` with `reset_connector`)."""
        self._side.forget_all()
        return True

    @property
    def _side(self) -> Coordinator:
        assert self.coordinator is not None, "called in a worker"
        return self.coordinator

    # worker side -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The rank's blocks are there."""
        if self._refused is not None:
            return
        layers = attention_layers(self._vllm)
        access = KVAccess(
            kv_caches,
            layers,
            self._vllm.cache_config.block_size,
            self._kv_cache_config.num_blocks,
        )
        config = self.options.to_config()
        info = ModelInfo(
            layers=access.layers,
            kv_heads=access.kv_heads,
            head_dim=access.head_dim,
            value_dim=access.head_dim,
            rope=Rope.from_config(self._vllm.model_config.hf_text_config),
            window=self._vllm.model_config.max_model_len,
            fingerprint=f"{self._vllm.model_config.model}:{access.dtype}",
        )
        pool = DonorPool(self.options.device_bytes, self.options.host_bytes, access.device)
        self.worker = WorkerSide(access, pool, info, config, tensor_rank())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Before the forward pass."""
        work = self._work()
        if self.worker is not None:
            self.worker.before_forward(work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: all layers are loaded before the pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        """Nothing: what is kept is read behind the pass."""

    def wait_for_save(self) -> None:
        """Behind the forward pass."""
        work = self._work()
        if self.worker is not None:
            self.worker.after_forward(work)
        self._released.update(work.released)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks were held for captures that are done now."""
        done, self._released = self._released, set()
        return done or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of loads that failed: vLLM computes them."""
        if self.worker is None:
            return set()
        size = self._vllm.cache_config.block_size
        bad: set[int] = set()
        for load in self.worker.failed_loads:
            first, last = load.source.start // size, (load.source.stop - 1) // size
            bad.update(load.block_ids[first : last + 1])
        self.worker.failed_loads.clear()
        return bad

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """News for the scheduler."""
        if self.worker is None:
            return None
        report = self.worker.report()
        return WorkerReport(report) if report else None

    def shutdown(self) -> None:
        """The engine ends."""
        if self.worker is not None:
            self.worker.close()

    def _work(self) -> StepWork:
        meta = self._get_connector_metadata()
        return meta.work if isinstance(meta, StepMetadata) else StepWork()

    # metrics -----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvcmasStats | None:
        """Counts since the last call, of the scheduler's side."""
        if self.coordinator is None:
            return None
        stats = self.coordinator.stats
        if not isinstance(stats, KvcmasStats) or stats.is_empty():
            return None
        self.coordinator.stats = KvcmasStats()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvcmasStats:
        """Counts from what crossed processes."""
        return KvcmasStats(data=data) if data is not None else KvcmasStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: Any,
    ) -> KvcmasPromMetrics:
        """The metrics at `/metrics`."""
        return KvcmasPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _rope_problem(vllm_config: Any) -> str | None:
    try:
        Rope.from_config(vllm_config.model_config.hf_text_config)
    except UnsupportedError as error:
        return str(error)
    return None
