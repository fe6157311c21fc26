"""What a response says about its request, in `kv_transfer_params`: plain data, JSON both ways."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from kvcmas.engines.record import SpanRecord
from kvcmas.engines.vllm.names import PARAMS_KEY
from kvcmas.errors import ConfigError

VLLM_RECORD_VERSION: Literal[1] = 1


class VllmRecord(BaseModel):
    """One request; lengths in tokens of its prompt.

    agent: who asked, from the hint or from the prompt. dial: that it was served with.
    computed: tokens that went through the model. reused: that took a donor's KV. cached: that
        vLLM's own prefix cache held. Each token counts once, also after a preemption.
    spans: what happened to each stretch of the prompt, in order.
    steps: engine steps of the prefill.
    waited_s: seconds that the request waited for a donor that was just being computed.
    audit: served exactly to measure what reuse would have cost.
    notes: why something was not reused, and which hints were ignored, in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = VLLM_RECORD_VERSION
    agent: str
    dial: str
    prompt: int
    computed: int
    reused: int
    cached: int
    spans: tuple[SpanRecord, ...] = ()
    steps: int = 0
    waited_s: float = 0.0
    audit: bool = False
    notes: tuple[str, ...] = ()

    def to_params(self) -> dict[str, Any]:
        """The response's `kv_transfer_params`; what is not a finite number becomes `None`."""
        return {PARAMS_KEY: json.loads(self.model_dump_json())}

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> VllmRecord | None:
        """The record in a response's `kv_transfer_params`, `None` if there is none.

        Raises:
            ConfigError: it is of another version, or damaged.
        """
        given = (params or {}).get(PARAMS_KEY)
        if given is None:
            return None
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(
                f"not a record of version {VLLM_RECORD_VERSION}: {error}; use the same version of "
                "kvcmas for the client and the server"
            ) from error


def log_line(record: VllmRecord) -> str:
    """One line about a request: numbers and reasons, nothing of its text."""
    parts = [
        f"{record.agent} ({record.dial}{', audit' if record.audit else ''}): {record.prompt} "
        f"tokens = {record.computed} computed + {record.reused} reused + {record.cached} cached, "
        f"{record.steps} steps"
    ]
    if record.waited_s:
        parts.append(f"waited {record.waited_s:.2f} s")
    parts += [_span_text(span) for span in record.spans if span.kind == "reuse"]
    notes = (*record.notes, *(note for span in record.spans for note in span.notes))
    parts += [f"note: {note}" for note in notes]
    return "; ".join(" ".join(part.split()) for part in parts)


def _span_text(span: SpanRecord) -> str:
    text = f"[{span.start}, {span.stop}) from {span.segment}, head {span.head}"
    if span.landmarks:
        text += f", {span.landmarks} landmarks"
    if span.deviation is not None:
        text += f", deviation {span.deviation:.3g}"
        text += "" if span.tolerance is None else f" of {span.tolerance:.3g}"
    return text + (f", corrected by {span.correction}" if span.correction else "")
