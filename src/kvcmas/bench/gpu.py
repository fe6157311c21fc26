"""TTFT and memory of a model with random weights: what reuse saves, whatever the answers.

Shapes are those of Llama-3.2-1B. Random weights say nothing of quality, so the trust that a method
has in its corrections is switched off here: every run is reused, with its head and landmarks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from kvcmas.bench.stats import mean, median, ratio
from kvcmas.bench.steps import Report, silent
from kvcmas.core.model_info import ModelInfo
from kvcmas.engines.transformers import RequestRecord, TransformersEngine, model_info
from kvcmas.methods import create
from kvcmas.workflow.prompt import Prompt, TokenIds

_ROLE, _TASK = 60, 20
_READERS = ("analyst", "critic", "judge")
_UNTRUSTING: dict[str, Any] = {"tolerance": 1e6, "audit_limit": 1e6, "audit": 0.0, "cold_tokens": 0}
METHODS: dict[str, dict[str, Any]] = {"nonshared": {}, "fullshared": {}, "kvcmas": _UNTRUSTING}
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """What is run; lengths in tokens.

    learn: contexts of `learn_length` from which kvcmas learns. repeats: contexts of each length.
    """

    lengths: tuple[int, ...] = (1000, 4000, 8000)
    learn: int = 4
    learn_length: int = 1000
    repeats: int = 3
    tiny: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GpuRow:
    """A method at one context length; medians over all readers' requests.

    peak_mib: most memory of the device during a request beyond what was held before it; `None`
    on a CPU. overhead: share of the TTFT for match, move, correction and scatter. corrected: share
    of the requests whose reused KV was corrected.
    """

    context: int
    method: str
    ttft_ms: float
    ttft_ratio: float
    computed: int
    reused: int
    overhead: float
    corrected: float
    peak_mib: float | None


def tiny_config() -> LlamaConfig:
    """Shapes for trying the benchmark out."""
    return LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def one_billion_config() -> LlamaConfig:
    """Shapes of Llama-3.2-1B."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )


def random_model(settings: GpuSettings, device: torch.device) -> LlamaForCausalLM:
    """A Llama with random weights, made on the device: bfloat16 on CUDA, float32 elsewhere."""
    config = tiny_config() if settings.tiny else one_billion_config()
    config.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(settings.seed)
    with device:
        model: Any = LlamaForCausalLM._from_config(config, dtype=config.dtype)
    found: LlamaForCausalLM = model.requires_grad_(False).eval()
    return found


class GpuBench:
    """Methods over one random model; contexts and roles are random tokens."""

    def __init__(
        self, settings: GpuSettings, device: torch.device, report: Report = silent
    ) -> None:
        self.settings, self.device = settings, device
        self._report = report
        self._model = random_model(settings, device)
        self._info: ModelInfo = model_info(self._model)
        self._random = np.random.default_rng(settings.seed)
        self._vocab = int(self._model.config.vocab_size)
        self._roles = {name: self._ids(_ROLE) for name in ("planner", *_READERS)}
        self._tasks = {name: self._ids(_TASK) for name in self._roles}
        self._asked = 0

    def run(self) -> list[GpuRow]:
        """Measure all methods, request by request in turn."""
        engines = {name: self._engine(name) for name in METHODS}
        self._learn(engines)
        rows: list[GpuRow] = []
        total = len(self.settings.lengths) * (self.settings.repeats + 1)
        self._report("measuring", 0, total)
        done = 0
        for length in self.settings.lengths:
            seen: dict[str, list[tuple[RequestRecord, int | None]]] = {name: [] for name in METHODS}
            for repeat in range(self.settings.repeats + 1):
                for name, measured in self._round(engines, length):
                    if repeat:  # the first round of a length warms kernels and allocator up
                        seen[name].append(measured)
                done += 1
                self._report("measuring", done, total)
            rows += _rows(length, seen)
        return rows

    def _round(
        self, engines: dict[str, TransformersEngine], length: int
    ) -> Iterator[tuple[str, tuple[RequestRecord, int | None]]]:
        """One new context, read by the whole team under every method."""
        context = self._ids(length)
        for engine in engines.values():
            engine.prefill(self._prompt("planner", context))
        for reader in _READERS:
            for name, engine in engines.items():
                yield name, self._measured(engine, self._prompt(reader, context))

    def _measured(
        self, engine: TransformersEngine, prompt: Prompt
    ) -> tuple[RequestRecord, int | None]:
        if self.device.type != "cuda":
            return engine.prefill(prompt).record, None
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        record = engine.prefill(prompt).record
        return record, torch.cuda.max_memory_allocated(self.device) - before

    def _learn(self, engines: dict[str, TransformersEngine]) -> None:
        """Every agent reads some contexts exactly under every method, which warms prefixes too."""
        total = self.settings.learn
        self._report("learning", 0, total)
        for number in range(total):
            context = self._ids(self.settings.learn_length)
            for agent in self._roles:
                for engine in engines.values():
                    engine.prefill(self._prompt(agent, context, dial="exact"))
            self._report("learning", number + 1, total)

    def _engine(self, name: str) -> TransformersEngine:
        return TransformersEngine(self._model, None, create(name, self._info, **METHODS[name]))

    def _prompt(self, agent: str, context: TokenIds, dial: str | None = None) -> Prompt:
        self._asked += 1
        ids = np.concatenate((self._roles[agent], context, self._tasks[agent]))
        return Prompt(ids, agent, f"gpu-{self._asked}", dial=dial)

    def _ids(self, number: int) -> TokenIds:
        return self._random.integers(10, self._vocab, number)


def _rows(length: int, seen: dict[str, list[tuple[RequestRecord, int | None]]]) -> list[GpuRow]:
    full = median(record.ttft_s for record, _ in seen["nonshared"])
    rows: list[GpuRow] = []
    for name, measured in seen.items():
        records = [record for record, _ in measured]
        peaks = [peak for _, peak in measured if peak is not None]
        ttft = median(record.ttft_s for record in records)
        rows.append(
            GpuRow(
                context=length,
                method=name,
                ttft_ms=1000 * ttft,
                ttft_ratio=ratio(ttft, full),
                computed=round(median(record.computed for record in records)),
                reused=round(median(record.reused for record in records)),
                overhead=median(
                    ratio(record.match_s + record.correct_s, record.ttft_s) for record in records
                ),
                corrected=mean(
                    float(any(span.correction for span in record.spans)) for record in records
                ),
                peak_mib=max(peaks) / _MEBIBYTE if peaks else None,
            )
        )
    return rows


def gpu_table(rows: Sequence[GpuRow]) -> Table:
    """One line for each method and length."""
    table = Table(
        *("context", "method", "TTFT", "ratio", "computed", "reused", "rest"),
        *("corr.", "MiB"),
        box=SIMPLE_HEAD,
        pad_edge=False,
        caption="TTFT in ms, ratio: to nonshared; rest: match, move, correction, scatter; corr.: "
        "requests with a correction; MiB: peak memory of a request",
    )
    table.columns[1].no_wrap = True
    for row in rows:
        peak = "-" if row.peak_mib is None else f"{row.peak_mib:.0f}"
        table.add_row(
            *(str(row.context), row.method, f"{row.ttft_ms:.1f}", f"{row.ttft_ratio:.2f}"),
            *(str(row.computed), str(row.reused), f"{row.overhead:.0%}"),
            *(f"{row.corrected:.0%}", peak),
        )
    return table


def gpu_record(settings: GpuSettings, rows: Sequence[GpuRow], device: str) -> dict[str, Any]:
    """Settings and rows as plain data."""
    return {
        "version": 1,
        "device": device,
        "model": "random weights, " + ("tiny" if settings.tiny else "shapes of Llama-3.2-1B"),
        "settings": asdict(settings),
        "rows": [asdict(row) for row in rows],
    }
