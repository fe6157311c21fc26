"""What a text may hold, and where it may stand: ids are the tokenizer's, the answer is intact."""

from __future__ import annotations

import datetime
import time
from itertools import count
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from kvcmas.engines.transformers import SamplingParams, render_chat
from kvcmas.engines.transformers.chat import RenderedChat, encode_plain
from kvcmas.errors import PromptError

from ..engines.small_files import BEGIN, END, START, TEMPLATE
from .chats import CRITIC, DOCUMENT, MARKS, PLANNER, UNICODE, Chats, moved_runs, seam_tokenizer

TEXTS = {"plain": DOCUMENT, "marks": MARKS, "emoji and CJK": UNICODE}
TENANTS = count()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return seam_tokenizer()


@pytest.fixture(scope="module", params=["kvcmas", "fullshared"])
def chats(
    request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast, device: torch.device
) -> Chats:
    """One model for all texts: each test is a tenant of its own."""
    return Chats(request.param, device, tokenizer, min_length=8)


@pytest.fixture
def tenant() -> str:
    return f"tenant {next(TENANTS)}"


def chat(
    tokenizer: PreTrainedTokenizerFast, system: str | None, content: str, **options: Any
) -> RenderedChat:
    messages = [{"role": "user", "content": content}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return render_chat(tokenizer, messages, **options)


@pytest.mark.parametrize(
    ("text", "literal"),
    [("plain", False), ("marks", False), ("marks", True), ("emoji and CJK", False)],
)
@pytest.mark.parametrize("before", ["x", " ", "\n", "7", "👩"])
@pytest.mark.parametrize("after", ["s", "7", "\n\nWhat is wrong?", "\u200d👧"])
def test_a_segment_between_any_neighbours(
    text: str,
    literal: bool,
    before: str,
    after: str,
    chats: Chats,
    tokenizer: PreTrainedTokenizerFast,
    tenant: str,
) -> None:
    """Cases 1, 2, 19 and 32."""
    document = TEXTS[text]
    first = chat(tokenizer, PLANNER, document, literal=literal)
    reader = chat(tokenizer, CRITIC, before + document + after, literal=literal)
    # The ids are those of the text, and the text is the caller's own.
    assert tokenizer.decode(reader.ids) == reader.text
    assert f"user\n{before}{document}{after}{END}" in reader.text
    if not literal:
        assert reader.ids.tolist() == tokenizer(reader.text, add_special_tokens=False).input_ids
    chats.score(first.ids, "a", tenant=tenant)
    scored = chats.score(reader.ids, "b", tenant=tenant)
    assert scored.kv.token_ids[: len(reader.ids)].tolist() == reader.ids.tolist()
    assert scored.record.reused > 0.4 * len(tokenizer(document).input_ids)
    assert chats.error(scored, reader.ids) < 1e-4


def test_literal_marks_add_no_control_tokens(
    chats: Chats, tokenizer: PreTrainedTokenizerFast, tenant: str
) -> None:
    """Case 19: also next to a donor in which the same letters were control tokens."""
    controls: Any = tokenizer.convert_tokens_to_ids([BEGIN, START, END])
    plain = chat(tokenizer, PLANNER, DOCUMENT).ids.tolist()
    literal = chat(tokenizer, CRITIC, MARKS, literal=True).ids
    assert [literal.tolist().count(i) for i in controls] == [plain.count(i) for i in controls]
    opened = chat(tokenizer, PLANNER, MARKS).ids
    assert [opened.tolist().count(i) for i in controls] == [2, 4, 3]
    chats.score(opened, "a", tenant=tenant)
    scored = chats.score(literal, "b", tenant=tenant)
    assert scored.kv.token_ids[: len(literal)].tolist() == literal.tolist()
    assert chats.error(scored, literal) < 1e-4


DATED = "{{ bos_token }}Today is {{ strftime_now('%d %B %Y') }}.\n" + TEMPLATE.replace(
    "{{ bos_token }}", ""
)
FORGETFUL = TEMPLATE.replace(
    "message['content'] +",
    "(message['content'].split('</think>')[-1] if message['role'] == 'assistant' "
    "else message['content']) +",
)


@pytest.mark.parametrize("system", [None, PLANNER])
def test_another_day(
    system: str | None, chats: Chats, tokenizer: PreTrainedTokenizerFast, tenant: str
) -> None:
    """Case 4: the date is part of the ids; the document behind it is still found."""
    days = [datetime.date(2025, 1, 2), datetime.date(2026, 11, 30)]
    old, new = (chat(tokenizer, system, DOCUMENT, template=DATED, date=day).ids for day in days)
    assert old.tolist() != new.tolist()
    chats.score(old, "a", tenant=tenant)
    scored = chats.score(new, "b", tenant=tenant)
    assert scored.record.reused > 0.4 * len(tokenizer(DOCUMENT).input_ids)
    assert chats.error(scored, new) < 1e-4


def test_thoughts_that_a_template_drops(
    chats: Chats, tokenizer: PreTrainedTokenizerFast, tenant: str
) -> None:
    """Case 4: what was thought is no part of the next prompt, and no part of what is reused."""
    thought = "<think>The mayor counted the vessels in the ice himself.</think>"
    answer = "Bread grew dear, then scarce."
    question = {"role": "user", "content": DOCUMENT}
    shown = render_chat(tokenizer, [question], template=FORGETFUL)
    whole = [*shown.ids, *tokenizer(thought + answer, add_special_tokens=False).input_ids]
    chats.score(whole, "a", tenant=tenant)
    reply = {"role": "assistant", "content": thought + answer}
    after = {"role": "user", "content": "Why?"}
    later = render_chat(tokenizer, [question, reply, after], template=FORGETFUL)
    assert "think" not in later.text and answer in later.text
    scored = chats.score(later.ids, "a", tenant=tenant)
    assert scored.record.spans[0].exact
    assert scored.record.reused >= len(shown.ids) - 4
    assert chats.error(scored, later.ids) < 1e-4


@pytest.mark.parametrize("content", ["", " ", "\n\t"])
def test_no_text(content: str, chats: Chats, tokenizer: PreTrainedTokenizerFast) -> None:
    """Case 8: refused in words, before any pass."""
    with chats.counting() as passes:
        with pytest.raises(PromptError, match="empty"):
            chats.score(chat(tokenizer, PLANNER, content).ids)
        with pytest.raises(PromptError, match="empty"):
            chats.score(encode_plain(tokenizer, content))
        with pytest.raises(PromptError, match="at least one message"):
            chats.score(render_chat(tokenizer, []).ids)
        with pytest.raises(PromptError, match="at least one token"):
            chats.score([])
    assert passes == []
    assert chats.settled()


@pytest.mark.parametrize("tokens", [1, 2])
def test_tiny_prompts_are_computed(tokens: int, chats: Chats, tenant: str) -> None:
    """Case 8: nothing to share, nothing to count."""
    ids = list(range(40, 40 + tokens))
    for agent in ("a", "a", "b"):
        scored = chats.score(ids, agent, tenant=tenant)
        record = scored.record
        assert (record.computed, record.reused, record.exact) == (tokens, 0, True)
        assert all(span.computed >= 0 and span.reused >= 0 for span in record.spans)
        assert torch.equal(scored.logits, chats.dense(ids).logits)


SAID = "The brown fox and 家族👩‍👩‍👧‍👦。"


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ((), SAID, "eos"),
        (("own fox",), "The br", "stop"),
        (("族👩",), "The brown fox and 家", "stop"),
        (("👦", "cat"), "The brown fox and 家族👩‍👩‍👧‍", "stop"),
    ],
)
def test_answers_behind_reused_text(
    stop: tuple[str, ...],
    text: str,
    reason: str,
    chats: Chats,
    tokenizer: PreTrainedTokenizerFast,
    tenant: str,
) -> None:
    """Case 32: a segment that ends in an emoji, an answer that a stop string cuts."""
    eos: Any = tokenizer.convert_tokens_to_ids(END)
    chats.engine.eos_ids = frozenset((eos,))
    chats.score(chat(tokenizer, PLANNER, UNICODE).ids, "a", tenant=tenant)
    reader = chat(tokenizer, CRITIC, UNICODE + "👩‍👧")
    pieces: list[str] = []
    with chats.speaking([*tokenizer(SAID, add_special_tokens=False).input_ids, eos, eos]):
        result = chats.engine.generate(
            chats.prompt(reader.ids, "b", tenant),
            SamplingParams(max_tokens=60, stop=stop),
            on_token=lambda token, piece: pieces.append(piece),
        )
    assert (result.text, result.finish_reason) == (text, reason)
    assert "".join(pieces) == text
    assert result.record.reused > 20


@pytest.mark.parametrize("most", [0, 1])
def test_no_token_and_one(
    most: int, chats: Chats, tokenizer: PreTrainedTokenizerFast, tenant: str
) -> None:
    """Case 33: 0 warms, 1 answers with one token; what was prefilled is a donor both times."""
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    first, reader = chat(tokenizer, PLANNER, DOCUMENT).ids, chat(tokenizer, CRITIC, DOCUMENT).ids
    for agent, ids in (("a", first), ("b", reader)):
        result = chats.engine.generate(chats.prompt(ids, agent, tenant), params)
        assert (len(result.token_ids), result.finish_reason) == (most, "length")
        assert result.record.generated == most
    assert moved_runs(result.record)
    expected = int(chats.dense(reader).logits[0].argmax())
    assert list(result.token_ids) == [expected] * most


@pytest.mark.parametrize("text", ["a" * 100_000, "家" * 30_000], ids=["letters", "CJK"])
def test_a_run_of_one_character(
    text: str, chats: Chats, tokenizer: PreTrainedTokenizerFast, tenant: str
) -> None:
    """Case 35: tokenizer, matcher and refusal take seconds at most, and the next request is served.

    The stored segment is a shorter run of the same character, so every window of the prompt is
    known.
    """
    stored = chat(tokenizer, PLANNER, text[:200]).ids
    chats.score(stored, "a", tenant=tenant)
    began = time.monotonic()
    ids = chat(tokenizer, CRITIC, text, literal=True).ids
    found = chats.library.find(chats.prompt(ids, "b", tenant))
    with (
        chats.counting() as passes,
        pytest.raises(PromptError, match=r"the model's window is 1024"),
    ):
        chats.score(ids, "b", tenant=tenant)
    assert time.monotonic() - began < 10
    assert passes == []
    assert len(ids) > 10_000
    for run in found.runs:
        assert len(run) <= len(stored)
    assert chats.settled()
    assert chats.score(chat(tokenizer, CRITIC, DOCUMENT).ids, "b", tenant=tenant).record.computed
