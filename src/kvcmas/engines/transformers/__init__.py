"""The embedded engine: plans run on any causal model of transformers with rotary positions.

loaded = load("demo")
method = create("fullshared", model_info(loaded))
engine = TransformersEngine(loaded.model, loaded.tokenizer, method)
ids = render_chat(loaded.tokenizer, [{"role": "user", "content": "Hello"}]).ids
result = engine.generate(Prompt(ids, agent="planner", request_id="1"))
"""

from __future__ import annotations

from kvcmas.engines.transformers.cancel import Cancellation
from kvcmas.engines.transformers.chat import RenderedChat, encode_plain, render_chat
from kvcmas.engines.transformers.engine import TransformersEngine
from kvcmas.engines.transformers.fingerprint import Fingerprint
from kvcmas.engines.transformers.loading import LoadedModel, load
from kvcmas.engines.transformers.model_info import model_info
from kvcmas.engines.transformers.record import RequestRecord, SpanRecord
from kvcmas.engines.transformers.results import Result, Scored
from kvcmas.engines.transformers.sampling import SamplingParams

__all__ = [
    "Cancellation",
    "Fingerprint",
    "LoadedModel",
    "RenderedChat",
    "RequestRecord",
    "Result",
    "SamplingParams",
    "Scored",
    "SpanRecord",
    "TransformersEngine",
    "encode_plain",
    "load",
    "model_info",
    "render_chat",
]
