"""A client that times its first token: the OpenAI SDK, streaming."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcmas.bench.vllm.servers import NAME
from kvcmas.engines.vllm.names import PARAMS_KEY

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Timed:
    """ttft_s: until the first piece of text. cached: of the prompt's tokens, as usage says."""

    text: str
    ttft_s: float
    prompt: int
    cached: int

    @property
    def computed(self) -> int:
        """Tokens of the prompt that went through the model."""
        return self.prompt - self.cached


class Client:
    """One server's."""

    def __init__(self, url: str) -> None:
        from openai import OpenAI

        self._openai = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)

    def ask(
        self, messages: Messages, tokens: int = 8, hints: Mapping[str, Any] | None = None
    ) -> Timed:
        """Ask and time it."""
        body = {"kv_transfer_params": {PARAMS_KEY: dict(hints)}} if hints is not None else None
        typed: Any = list(messages)
        began = time.perf_counter()
        ttft: float | None = None
        pieces: list[str] = []
        usage: Any = None
        for chunk in self._openai.chat.completions.create(
            model=NAME,
            messages=typed,
            temperature=0,
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, **(body or {})},
        ):
            if chunk.usage is not None:
                usage = chunk.usage
            if chunk.choices and chunk.choices[0].delta.content:
                if ttft is None:
                    ttft = time.perf_counter() - began
                pieces.append(chunk.choices[0].delta.content)
        if ttft is None:
            ttft = time.perf_counter() - began
        details = usage.prompt_tokens_details
        cached = int(details.cached_tokens or 0) if details is not None else 0
        return Timed("".join(pieces), ttft, int(usage.prompt_tokens), cached)
