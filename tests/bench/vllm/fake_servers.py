"""A tokenizer, and servers that compute nothing: they count tokens and keep what was asked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcmas.bench.vllm.client import Client, Messages, Timed
from kvcmas.bench.vllm.settings import Settings
from kvcmas.bench.vllm.texts import Texts

_PIECE = re.compile(r" [a-h]{2}[p-y](?![a-z])|.", re.DOTALL)


class WordTokenizer:
    """Knows 640 words of three letters, each one token behind a space; all else is characters."""

    chat_template = "words"

    def __init__(self) -> None:
        ends = "pqrstuvwxy"
        self.words = [f" {a}{b}{c}" for a in "abcdefgh" for b in "abcdefgh" for c in ends]

    def __len__(self) -> int:
        return len(self.words)

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        pieces = _PIECE.findall(text)
        return {
            "input_ids": [
                self.words.index(piece) if len(piece) == 4 else 1000 + ord(piece)
                for piece in pieces
            ]
        }

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.words[one] if one < 1000 else chr(one - 1000) for one in ids)

    def batch_decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(row) for row in ids]

    def apply_chat_template(self, messages: Messages, **_: Any) -> str:
        return (
            "".join(f"<{message['role'][0]}>{message['content']}" for message in messages) + "<a>"
        )


def contexts_file(path: Path, count: int, words: int = 220) -> Path:
    """`count` contexts of `words` words, all different; each has a word more than the one before.

    The first word of a context has no space before it, which makes it three tokens.
    """
    known = WordTokenizer().words
    file = path / "contexts.jsonl"
    file.write_text(
        "".join(
            json.dumps({"text": "".join(known[number : number + words + number])}) + "\n"
            for number in range(count)
        )
    )
    return file


def small_texts(settings: Settings) -> Texts:
    """The real texts, with that tokenizer."""
    return Texts(settings, WordTokenizer())


@dataclass(eq=False)
class FakeClient(Client):
    """A server that holds `cached(prompt, number of the request)` of a prompt's tokens.

    more: tokens that its template adds to the bench's. calls: of all servers with one list.
    """

    name: str
    texts: Texts
    calls: list[tuple[str, Timed, Mapping[str, Any] | None]]
    cached: Callable[[int, int], int] = lambda prompt, number: 0
    more: int = 0
    ttft_s: float = 1.0
    asked: list[Messages] = field(default_factory=list)

    def ask(
        self, messages: Messages, tokens: int = 8, hints: Mapping[str, Any] | None = None
    ) -> Timed:
        text = self.texts.tokenizer.apply_chat_template(messages)
        prompt = len(self.texts.tokenizer(text)["input_ids"]) + self.more
        held = self.cached(prompt, len(self.asked)) if hints is None else 0
        self.asked.append(messages)
        served = Timed(f"{tokens} tokens", self.ttft_s, prompt, held)
        self.calls.append((self.name, served, hints))
        return served
