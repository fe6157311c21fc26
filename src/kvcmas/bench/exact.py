"""Exact prefills: computed once, and shown to every method that would have computed the same."""

from __future__ import annotations

from dataclasses import replace

from kvcmas.core.segment import SegmentKV
from kvcmas.methods.base import Method, Outcome
from kvcmas.workflow.prompt import Prompt

EXACT_DIAL = "exact"


def show(method: Method, prompt: Prompt, kv: SegmentKV) -> None:
    """Let a method capture and learn from a prompt's exact KV, as if it had been prefilled.

    The prompt is planned with the dial `exact`, under which a method reuses exact KV alone; what an
    engine would then compute is what `kv` holds, so the model does not have to run again.

    kv: of the whole prompt; may be longer.
    """
    exact = replace(prompt, dial=EXACT_DIAL)
    length = len(prompt)
    method.plan(exact)
    method.finish(exact, Outcome(kv.slice(0, length), ((0, length),), exact=True))
