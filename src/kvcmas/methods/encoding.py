"""What a method may ask an engine for besides its plan: runs of tokens encoded by themselves.

    wants(prompt) > encoded(prompt, run, kv) for each run > wants(prompt) > ... > plan(prompt)

An engine that knows this protocol calls `wants` before `plan` until it wants nothing more. What
that costs belongs to the request, and its record says so.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from kvcmas.core.segment import SegmentKV
from kvcmas.workflow.prompt import Prompt, TokenIds


@runtime_checkable
class WantsEncodings(Protocol):
    """A method that needs the KV of runs without anything before them.

    With an engine that does not know it, such a method computes what it cannot correct.
    """

    def wants(self, prompt: Prompt) -> tuple[TokenIds, ...]:
        """Runs `[tokens]` to be encoded before the prompt is planned; empty when there are none.

        No run is asked for again once `encoded` has been called with it.
        """

    def encoded(self, prompt: Prompt, token_ids: TokenIds, kv: SegmentKV) -> None:
        """Take the KV of a wanted run, its first token at position 0.

        kv: views on the engine's buffers; a method copies what it keeps.
        """
