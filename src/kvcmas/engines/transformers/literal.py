"""Text that looks like a control token, kept as text.

A chat template writes control tokens and messages into one text, in which they look alike. So
control tokens inside messages are replaced by single unused characters before rendering. What
then still looks like a control token was written by the template:

    rendered    <|im_start|>user\\nclose with X please<|im_end|>\\n        X stands for <|im_end|>
    pieces      [control]   [text, X put back   ][control] [text]

The text between two control tokens is encoded by itself, with control tokens switched off. Where
tokenizers split at control tokens anyway, this gives the very ids of the whole text; that is
checked for every prompt, and a tokenizer for which it does not hold is refused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvcmas.errors import PromptError

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True, slots=True)
class Masked:
    """Messages without control tokens. originals: stand-in character to the token's text."""

    messages: list[dict[str, str]]
    originals: Mapping[str, str]

    def restore(self, text: str) -> str:
        """Put the tokens' text back."""
        return _restore(text, self.originals)


def mask_messages(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> Masked:
    """Replace the control tokens that occur in messages by characters that do not."""
    controls = _control_texts(tokenizer)
    contents = [message["content"] for message in messages]
    everything = "\n".join(contents)
    found = [control for control in controls if control in everything]
    if not found:
        return Masked(messages, {})
    unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in everything)
    stand_in = dict(zip(found, unused, strict=False))
    # Longest first: a control token may contain another one.
    pattern = re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))))
    masked = [
        {**message, "content": pattern.sub(lambda m: stand_in[m.group()], message["content"])}
        for message in messages
    ]
    return Masked(masked, {character: control for control, character in stand_in.items()})


def encode_literal(
    tokenizer: PreTrainedTokenizerBase, text: str, originals: Mapping[str, str]
) -> list[int]:
    """Ids of a rendered text in which stand-ins are put back as text, never as control tokens.

    Raises PromptError if this tokenizer's ids of the parts are not its ids of the whole.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise PromptError(
            f"a message contains control tokens ({', '.join(sorted(originals.values()))}), and "
            f"{type(tokenizer).__name__} cannot keep them as text; remove them from the message, "
            "or render without literal=True"
        )
    decoder = tokenizer.added_tokens_decoder
    controls = {int(i): token.content for i, token in decoder.items() if token.special}
    whole = backend.encode(text, add_special_tokens=False)
    # A copy: the switch is a setting of the tokenizer, which other threads may be using.
    plain = copy.deepcopy(backend)
    plain.encode_special_tokens = True
    expected: list[int] = []
    ids: list[int] = []
    for piece, control in _pieces(text, whole, controls):
        if control is not None:
            expected.append(control)
            ids.append(control)
            continue
        expected += plain.encode(piece, add_special_tokens=False).ids
        ids += plain.encode(_restore(piece, originals), add_special_tokens=False).ids
    if expected != whole.ids:
        raise PromptError(
            f"a message contains control tokens ({', '.join(sorted(originals.values()))}), and "
            "this tokenizer does not encode the parts of a text as it encodes the whole, so they "
            "cannot be kept as text; remove them, or render without literal=True"
        )
    return ids


def _pieces(text: str, whole: Any, controls: Mapping[int, str]) -> Iterator[tuple[str, int | None]]:
    """The text between control tokens (id `None`), and the control tokens, in order."""
    position = 0
    for token, (start, stop) in zip(whole.ids, whole.offsets, strict=True):
        # The token for unknown text is special too, but then it stands for some other text.
        if controls.get(token) != text[start:stop].strip():
            continue
        if start > position:
            yield text[position:start], None
        yield text[start:stop], token
        position = stop
    if position < len(text):
        yield text[position:], None


def _control_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    decoder = tokenizer.added_tokens_decoder
    return [token.content for token in decoder.values() if token.special and token.content]


def _restore(text: str, originals: Mapping[str, str]) -> str:
    for character, control in originals.items():
        text = text.replace(character, control)
    return text
