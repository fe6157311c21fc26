"""From messages to token ids: always the tokenizer's ids of the whole rendered chat.

Segments and agents never change how a prompt is tokenised: the chat template renders all messages
to one text, and the tokenizer encodes that text once. The template writes the beginning-of-text
token itself where the model wants one, so none is added.

Three things a user may want to know
- Template defaults count: a default system message, or today's date, is part of the ids. A prompt
  rendered on another day has other ids from the date on. `date` fixes the day.
- A template without a system role gets the system message at the beginning of the first user
  message, separated by an empty line. `RenderedChat.notes` says so.
- Text that looks like a control token (`<|im_end|>`) becomes that token, as in every server that
  encodes a rendered chat. `literal=True` keeps it text: then no message can close its own turn.
  Added tokens that are not special to the tokenizer (such as `<think>`) are ordinary vocabulary
  and stay what they are.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from kvcmas.engines.transformers.literal import Masked, encode_literal, mask_messages
from kvcmas.errors import PromptError
from kvcmas.workflow.prompt import TokenIds

Message = Mapping[str, str]

# For base models, which were never taught a chat format: pass it as `template`.
PLAIN_TEMPLATE = (
    "{{ bos_token if bos_token is defined and bos_token else '' }}"
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'] | capitalize + ': ' }}{% endif %}"
    "{{ message['content'] + '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, eq=False)
class RenderedChat:
    """A chat as the model sees it.

    ids: `[tokens]` int64. text: what the template made of the messages. notes: what was changed
    on the way, in words.
    """

    ids: TokenIds
    text: str
    notes: tuple[str, ...] = ()


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any
) -> TokenIds:
    """Token ids of a chat, `[tokens]` int64; options and errors as in `render_chat`."""
    return render_chat(tokenizer, messages, **options).ids


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    date: datetime.date | None = None,
    template: str | None = None,
    literal: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> RenderedChat:
    """Render messages with the model's chat template and encode the text.

    messages: dictionaries with `role` and `content`, both text.
    add_generation_prompt: end with the header of the assistant's answer.
    date: the day that templates which print one shall print; `None` leaves it to the template.
    template: a Jinja chat template instead of the model's, for example `PLAIN_TEMPLATE`.
    literal: text that looks like a control token stays text.
    variables: further values for the template, for example `{"enable_thinking": False}`.

    Raises PromptError: no messages, empty ones, no template, a template that refuses the messages,
    or `literal` with a tokenizer that cannot keep control tokens apart.
    """
    checked = _check(messages)
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            f"the model's tokenizer ({type(tokenizer).__name__}) has no chat template: it is a "
            "base model, or the template's file is missing. Use an instruction-tuned model, give a "
            "template, or use kvcmas.engines.transformers.chat.PLAIN_TEMPLATE for plain text"
        )
    options = {**(variables or {}), **_date_variables(date)}
    masked = mask_messages(tokenizer, checked) if literal else Masked(checked, {})
    text, notes = _render(tokenizer, masked.messages, template, add_generation_prompt, options)
    if masked.originals:
        ids = encode_literal(tokenizer, text, masked.originals)
        text = masked.restore(text)
    else:
        ids = encode(tokenizer, text)
    if not ids:
        raise PromptError("the chat template made no text of the messages; check the template")
    return RenderedChat(np.asarray(ids, dtype=np.int64), text, notes)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a rendered text; nothing is added to it."""
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def encode_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> TokenIds:
    """Ids of a prompt that is no chat, `[tokens]` int64, with the model's beginning-of-text token.

    The token is not doubled if the text already begins with it. Raises PromptError if the text is
    empty or only white space.
    """
    if not text.strip():
        raise PromptError(f"the prompt is empty (got {text[:20]!r}); give at least one word")
    begin = tokenizer.bos_token
    has_begin = isinstance(begin, str) and bool(begin) and text.startswith(begin)
    ids = tokenizer(text, add_special_tokens=not has_begin)["input_ids"]
    return np.asarray(ids, dtype=np.int64)


def _check(messages: Sequence[Message]) -> list[dict[str, str]]:
    if isinstance(messages, str | Mapping) or not messages:
        raise PromptError(
            "a chat needs at least one message: a list of {'role': ..., 'content': ...}; got "
            f"{'none' if not messages else type(messages).__name__}"
        )
    checked: list[dict[str, str]] = []
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role.strip():
            raise PromptError(f"message {index} has no role; expected system, user or assistant")
        if not isinstance(content, str):
            raise PromptError(
                f"message {index} ({role}) has content of type {type(content).__name__}, expected "
                "text"
            )
        # What an agent answered may be empty; what is asked may not.
        if role != "assistant" and not content.strip():
            raise PromptError(
                f"message {index} ({role}) is empty; give it text or leave the message out"
            )
        checked.append({"role": role, "content": content})
    return checked


def _date_variables(date: datetime.date | None) -> dict[str, Any]:
    """The two ways in which templates ask for the day: a variable, and a function of a format."""
    if date is None:
        return {}
    return {"date_string": date.strftime("%d %b %Y"), "strftime_now": date.strftime}


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    template: str | None,
    add_generation_prompt: bool,
    options: dict[str, Any],
) -> tuple[str, tuple[str, ...]]:
    def apply(chat: list[dict[str, str]]) -> str:
        text = tokenizer.apply_chat_template(
            chat,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **options,
        )
        return str(text)

    try:
        text = apply(messages)
        if _shows_system(text, messages):
            return text, ()
        refusal = "it drops the system message"
    except TemplateError as error:
        refusal = str(error)
    merged = _merge_system(messages)
    if merged is not None:
        try:
            note = "the chat template has no system role: merged into the first user message"
            return apply(merged), (note,)
        except TemplateError as error:
            refusal = str(error)
    roles = ", ".join(message["role"] for message in messages)
    raise PromptError(
        f"the model's chat template refuses these messages (roles: {roles}): {refusal}; most "
        "templates want an optional system message, then user and assistant in turn"
    )


def _shows_system(text: str, messages: list[dict[str, str]]) -> bool:
    first = messages[0]
    return first["role"] != "system" or first["content"].strip() in text


def _merge_system(messages: list[dict[str, str]]) -> list[dict[str, str]] | None:
    """The system message in front of the first user message, an empty line between them."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return None
    content = f"{messages[0]['content']}\n\n{messages[1]['content']}"
    return [{"role": "user", "content": content}, *messages[2:]]
