"""Matching on real tokenisation and on hostile prompts."""

from __future__ import annotations

import time

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvcmas.workflow.matching import Match, SegmentIndex

DOCUMENT = (
    "The harbour froze in the second week of January, and for eleven days no ship left it. "
    "Issue #42 of the town's paper counted 317 vessels in the ice; the mayor counted 290. "
    "Bread grew dear, then scarce. On the twelfth day the wind turned to the south-west, the "
    "ice broke with a noise like carts on a bridge, and by evening the roads were open again."
)
OTHER = (
    "A lighthouse keeper writes down the weather four times a day: wind, cloud, visibility and "
    "the height of the waves. The books of ninety years stand on one shelf, and whoever reads "
    "them in order can hear the storms grow shorter and the summers longer."
)
SEPARATORS = (
    "First # # part, then a rule --- and one more --- as in issue #42. A model's own marks, "
    "<|im_start|>system and <|im_end|>, are only letters here; so are [SEP] and </s> and \\n\\n. "
    "# # The text goes on after them as if nothing had happened, since nothing has."
)
UNICODE = (
    "家族の写真には👩‍👩‍👧‍👦と書いてあり、港の氷は一月に割れた。天気は晴れ、風は南西から吹いている。"
    "👩🏽‍🚀が月から手を振る。本は九十年分あり、棚は一つだけだ。🏳️‍🌈の旗が塔の上にある。"
)
WINDOW = 8


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer whose merges cross many word and segment borders."""
    result = Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    result.train_from_iterator([DOCUMENT, OTHER, SEPARATORS, "You are the planner.\n"], trainer)
    return result


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text).ids
    return ids


def matched_bytes(tokenizer: Tokenizer, ids: list[int], match: Match) -> bytes:
    """The bytes behind a match, which may begin or end inside a character."""
    alphabet = {letter: byte for byte, letter in _byte_letters().items()}
    letters = "".join(str(tokenizer.id_to_token(token)) for token in ids[match.start : match.stop])
    return bytes(alphabet[letter] for letter in letters)


def _byte_letters() -> dict[int, str]:
    """The byte-level alphabet of BPE: printable bytes stand for themselves."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    letters = {byte: chr(byte) for byte in kept}
    letters.update({byte: chr(256 + place) for place, byte in enumerate(moved)})
    return letters


@pytest.mark.parametrize("document", [DOCUMENT, SEPARATORS, UNICODE], ids=["plain", "marks", "cjk"])
@pytest.mark.parametrize("before", ["You are the critic.\n", "Read this: ", "x", "\n\n", "'", ""])
@pytest.mark.parametrize("after", ["\nNow judge it.", " and more", "s", "7", "👩", ""])
def test_seams_are_left_to_be_computed(
    tokenizer: Tokenizer, document: str, before: str, after: str
) -> None:
    index = SegmentIndex(WINDOW)
    alone = encode(tokenizer, document)
    index.add("document", alone)
    text = before + document + after
    ids = encode(tokenizer, text)
    matches = index.match(ids, index.guaranteed_length)
    # The prompt is the tokenizer's own; the match lies in the document and misses only seams.
    assert tokenizer.decode(ids) == text
    assert len(matches) == 1
    (match,) = matches
    content = matched_bytes(tokenizer, ids, match)
    assert content in document.encode()
    assert len(document.encode()) - len(content) <= 24
    offset = match.sources[0].offset
    assert alone[offset : offset + len(match)] == ids[match.start : match.stop]


def test_segments_in_another_order_both_match(tokenizer: Tokenizer) -> None:
    index = SegmentIndex(WINDOW)
    first = encode(tokenizer, "Role A.\n" + DOCUMENT + "\n" + OTHER + "\n")
    index.add("donor", first)
    second = encode(tokenizer, "Role B, longer.\n" + OTHER + "\n" + DOCUMENT + "\n")
    matches = index.match(second, index.guaranteed_length)
    texts = [matched_bytes(tokenizer, second, match).decode() for match in matches]
    assert len(matches) == 2
    assert OTHER[8:-8] in texts[0]
    assert DOCUMENT[8:-8] in texts[1]
    offsets = [match.sources[0].offset for match in matches]
    assert offsets[0] > offsets[1]


@pytest.mark.parametrize(
    "system", ["", "You are a helpful assistant. Today is 30 November.\n", "Today is 1 May.\n"]
)
def test_a_changed_system_text_still_hits(tokenizer: Tokenizer, system: str) -> None:
    index = SegmentIndex(WINDOW)
    index.add("donor", encode(tokenizer, "Today is 2 May.\n" + DOCUMENT))
    ids = encode(tokenizer, system + DOCUMENT)
    match = max(index.match(ids, index.guaranteed_length), key=len)
    assert DOCUMENT[8:-8].encode() in matched_bytes(tokenizer, ids, match)


def test_a_changed_word_inside_misses_exactly_there(tokenizer: Tokenizer) -> None:
    index = SegmentIndex(WINDOW)
    index.add("donor", encode(tokenizer, DOCUMENT))
    changed = DOCUMENT.replace("290", "Zq%")
    ids = encode(tokenizer, changed)
    matches = index.match(ids, index.guaranteed_length)
    texts = [matched_bytes(tokenizer, ids, match).decode() for match in matches]
    assert len(texts) == 2
    assert all("Zq%" not in text and text in changed for text in texts)


@pytest.mark.parametrize("size", [100_000])
@pytest.mark.parametrize("period", [1, 3, 16, 33, 97])
def test_periodic_text_takes_bounded_time(size: int, period: int) -> None:
    rng = np.random.default_rng(period)
    text = np.tile(rng.integers(0, 500, period), size // period + 1)[:size]
    index = SegmentIndex()
    begin = time.perf_counter()
    index.add("long", text)
    for number in range(60):
        index.add(f"short{number}", np.concatenate([[900 + number], text[: 300 + number]]))
    prompt = np.concatenate([[1000, 1001], text[3:]])
    matches = index.match(prompt, 32)
    assert time.perf_counter() - begin < 5
    covered = sum(len(match) for match in matches)
    assert covered >= size - 400  # a last piece below min_length may be left
    index.check_integrity()


def test_one_repeated_token_matches_itself_whole() -> None:
    index = SegmentIndex()
    index.add("aaa", [5] * 100_000)
    matches = index.match([1, *[5] * 100_000, 2], 32)
    assert [(match.start, match.stop) for match in matches] == [(1, 100_001)]
    assert matches[0].sources[0].offset == 0


def test_time_grows_linearly_with_a_hostile_prompt() -> None:
    """Two letters: nearly every window is known from many places."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 2, 40_000)
    index = SegmentIndex(WINDOW)
    for number in range(40):
        index.add(f"s{number}", text[37 * number : 20_000 + 97 * number])
    begin = time.perf_counter()
    index.match(rng.integers(0, 2, 100_000), 15)
    assert time.perf_counter() - begin < 10


def test_a_usual_prompt_is_matched_in_milliseconds() -> None:
    rng = np.random.default_rng(0)
    segments = [rng.integers(0, 50_000, 1000) for _ in range(50)]
    index = SegmentIndex()
    for number, ids in enumerate(segments):
        index.add(f"s{number}", ids)
    noise = rng.integers(0, 50_000, 100)
    prompt = np.concatenate([noise, *(segments[i] for i in (3, 9, 20)), noise, segments[40][:800]])
    seconds = []
    for _ in range(9):
        begin = time.perf_counter()
        matches = index.match(prompt, 32)
        seconds.append(time.perf_counter() - begin)
    assert [len(match) for match in matches] == [1000, 1000, 1000, 800]
    assert min(seconds) < 0.05  # about 1 ms on a laptop; the bound is for crowded machines
