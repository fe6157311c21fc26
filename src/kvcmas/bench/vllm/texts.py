"""Prompts of the parts: chats over real contexts, and random words of known length."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from kvcmas.bench.contexts import Context, read_contexts
from kvcmas.bench.roles import Role, read_roles, render
from kvcmas.bench.vllm.settings import Settings
from kvcmas.errors import ConfigError

_WORD = re.compile(r" [a-z]{3,}")


class Texts:
    """Contexts, roles and words of one tokenizer."""

    def __init__(self, settings: Settings, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.contexts = read_contexts(settings.contexts)
        self.roles = read_roles(settings.roles)
        self._words = single_token_words(tokenizer)

    def prompt(self, role: Role, text: str) -> list[int]:
        """Token ids of a role's prompt about a text."""
        return [int(token) for token in render(self.tokenizer, role, Context("", text))]

    def cut(self, text: str, tokens: int) -> str:
        """About the first `tokens` tokens of a text; all of a shorter one."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def sized(self, role: Role, text: str, tokens: int) -> list[int]:
        """A role's prompt of at most `tokens` tokens about the beginning of a text."""
        frame = len(self.prompt(role, "."))
        ids = self.prompt(role, self.cut(text, max(1, tokens - frame - 4)))
        return ids[:tokens]

    def joined(self, tokens: int, count: int, first: int = 0) -> list[str]:
        """Contexts of `tokens` tokens each, no text in two of them.

        Raises:
            ConfigError: there is too little text.
        """
        found: list[str] = []
        parts: list[str] = []
        for context in self.contexts[first:]:
            parts.append(context.text)
            text = "\n\n".join(parts)
            if len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) >= tokens:
                found.append(self.cut(text, tokens))
                parts = []
            if len(found) == count:
                return found
        raise ConfigError(
            f"{count} contexts of {tokens} tokens are asked for, and there is text for "
            f"{len(found)}; give more with --contexts"
        )

    def words(self, draw: random.Random, count: int) -> str:
        """Random words, one token each, with a space before every one."""
        return "".join(draw.choices(self._words, k=count))


def single_token_words(tokenizer: Any) -> list[str]:
    """Lower-case words that are one token each behind a space, as text.

    Raises:
        ConfigError: the vocabulary has hardly any.
    """
    ids = range(len(tokenizer))
    words = tokenizer.batch_decode([[token] for token in ids])
    found = sorted({word for word in words if _WORD.fullmatch(word)})
    if len(found) < 500:
        raise ConfigError(
            f"the tokenizer has {len(found)} words of one token; this benchmark needs a model "
            "whose vocabulary has at least 500"
        )
    return found


def padded_chat(words: Sequence[str] | str) -> list[dict[str, str]]:
    """A chat that shares nothing with others: its text is its system prompt as well."""
    text = words if isinstance(words, str) else "".join(words)
    middle = text.find(" ", len(text) // 2)
    return [
        {"role": "system", "content": text[:middle].strip()},
        {"role": "user", "content": text[middle:].strip()},
    ]
