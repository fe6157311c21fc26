"""Prompts of the parts: chats over real contexts, and random words of known length."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from kvcmas.bench.contexts import Context, read_contexts
from kvcmas.bench.roles import Role, read_roles, render
from kvcmas.bench.vllm.settings import Settings
from kvcmas.engines.transformers import render_chat
from kvcmas.errors import ConfigError

_LEAST_WORDS = 8  # of a message: a first word may be several tokens
_WORD = re.compile(r" [a-z]{3,}")


class Texts:
    """Contexts, roles and words of one tokenizer."""

    def __init__(self, settings: Settings, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.contexts = read_contexts(settings.contexts)
        self.roles = read_roles(settings.roles)
        self._words = single_token_words(tokenizer)
        two = _chat(self._words, 1, 1)
        self._frame = self._prompt_size(two) - 2

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

    def joined(self, tokens: int, count: int) -> tuple[list[str], list[str]]:
        """Contexts of `tokens` tokens each, no text in two of them; and what is left.

        Returns:
            the contexts, and of those that are not in them at most `tokens` tokens, longest first.

        Raises:
            ConfigError: there is too little text.
        """
        found: list[str] = []
        parts: list[str] = []
        left = list(self.contexts)
        while left and len(found) < count:
            parts.append(left.pop(0).text)
            text = "\n\n".join(parts)
            if self._size(text) >= tokens:
                found.append(self.cut(text, tokens))
                parts = []
        if len(found) < count:
            raise ConfigError(
                f"{count} contexts of {tokens} tokens are asked for, and there is text for "
                f"{len(found)}; give more with --contexts"
            )
        rest = [self.cut(context.text, tokens) for context in left]
        return found, sorted(rest, key=self._size, reverse=True)

    def words(self, draw: random.Random, count: int) -> str:
        """Random words, one token each, with a space before every one."""
        return "".join(draw.choices(self._words, k=count))

    @property
    def least_chat(self) -> int:
        """Fewest tokens of a random chat."""
        return self._frame + 2 * _LEAST_WORDS

    def random_chat(self, draw: random.Random, tokens: int) -> list[dict[str, str]]:
        """A chat of random words whose prompt has exactly `tokens` tokens, at least `least_chat`.

        It shares nothing with others: its system prompt is random as well.
        """
        words = draw.choices(self._words, k=tokens)
        half = (tokens - self._frame) // 2
        # A word at the beginning of a message has no space before it, and may be several tokens.
        size = tokens - self._frame - half
        size += tokens - self._prompt_size(_chat(words, half, size))
        return _chat(words, half, size)

    def _size(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prompt_size(self, messages: list[dict[str, str]]) -> int:
        return len(render_chat(self.tokenizer, messages).ids)


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


def _chat(words: Sequence[str], half: int, size: int) -> list[dict[str, str]]:
    """The first `half` words as system prompt, `size` more as the user's."""
    return [
        {"role": "system", "content": "".join(words[:half]).strip()},
        {"role": "user", "content": "".join(words[half : half + size]).strip()},
    ]
