"""Exact prefills: computed once, and shown to every method that would have computed the same."""

from __future__ import annotations

from dataclasses import replace

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers import TransformersEngine
from kvcmas.engines.transformers.cancel import Cancellation
from kvcmas.engines.transformers.clock import Clock
from kvcmas.engines.transformers.forward import ModelRunner
from kvcmas.engines.transformers.standalone import encode_wanted
from kvcmas.methods.base import Method, Outcome
from kvcmas.workflow.prompt import Prompt

EXACT_DIAL = "exact"


def show(method: Method, prompt: Prompt, kv: SegmentKV, runner: ModelRunner | None = None) -> None:
    """Let a method capture and learn from a prompt's exact KV, as if it had been prefilled.

    The prompt is planned with the dial `exact`, under which a method reuses exact KV alone; what an
    engine would then compute is what `kv` holds, so the model does not have to run again.

    kv: of the whole prompt; may be longer.
    runner: encodes what the method wants by itself; without one it gets no such encoding. For a
        method that also keeps hidden states, the model does run again.
    """
    exact = replace(prompt, dial=EXACT_DIAL)
    if runner is not None and method.boundaries:
        TransformersEngine(runner.model, None, method).prefill(exact)
        return
    length = len(prompt)
    if runner is not None:
        encode_wanted(runner, method, exact, Clock(runner.device), Cancellation())
    method.plan(exact)
    method.finish(exact, Outcome(kv.slice(0, length), ((0, length),), exact=True))
