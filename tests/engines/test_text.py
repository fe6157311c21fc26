"""Text while it arrives: whole characters, stop strings, spaces."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvcmas.engines.transformers.cancel import Cancellation
from kvcmas.engines.transformers.decode import Answer, decode
from kvcmas.engines.transformers.engine import TransformersEngine
from kvcmas.engines.transformers.results import Result
from kvcmas.engines.transformers.sampling import SamplingParams
from kvcmas.engines.transformers.text import Detokenizer, StopStrings, TextStream
from kvcmas.errors import ConfigError

from .fake_methods import DenseMethod
from .tiny import byte_tokenizer, tiny_model

BYTES = byte_tokenizer()
TEXTS = [
    "plain",
    "👩‍👩‍👧‍👦 family",
    "一个中文句子。",
    "e\u0301 café, naïve",
    "a 👍🏽 b 🇩🇪",
    "🙂",
    "",
]


def bytefallback_tokenizer() -> PreTrainedTokenizerFast:
    """Words with a leading space mark, and bytes for everything else, as Llama-2 and Gemma."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("▁hello", "▁world", "▁", "a", "b"):
        vocab[word] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, fuse_unk=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


FALLBACK = bytefallback_tokenizer()


def pieces_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def byte_ids(text: str) -> list[int]:
    ids: list[int] = BYTES.encode(text, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_characters_stay_whole(text: str) -> None:
    pieces = pieces_of(BYTES, byte_ids(text))
    assert "".join(pieces) == text
    # A token a byte: a piece holds at most the one character that its byte completes.
    assert all(len(piece) <= 1 for piece in pieces)
    assert "".join(pieces_of(FALLBACK, list(text.encode()))) == text


@given(st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_text_comes_back(text: str) -> None:
    # Where the text ends in the replacement character itself, that is taken for half a character.
    assert "".join(pieces_of(BYTES, byte_ids(text))) == text.rstrip("\ufffd")


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte level", "byte fallback"])
def test_half_a_character_at_the_end_is_dropped(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = byte_ids("ok 🙂") if tokenizer is BYTES else list("ok 🙂".encode())
    pieces = pieces_of(tokenizer, ids[:-1])
    assert "".join(pieces) == "ok "


def test_bytes_that_are_no_text_do_not_block_what_follows() -> None:
    ids = [byte_ids("ÿ")[0]] * 40 + byte_ids("after")
    text = "".join(pieces_of(BYTES, ids))
    assert text.endswith("after")
    assert set(text.removesuffix("after")) == {"\ufffd"}


def test_spaces_between_words_of_a_sentencepiece_tokenizer() -> None:
    words = ["▁hello", "▁world", "▁", "a", "b", "▁hello"]
    ids = [FALLBACK.get_vocab()[word] for word in words]
    pieces = pieces_of(FALLBACK, ids)
    assert pieces == ["hello", " world", " ", "a", "b", " hello", ""]
    assert "".join(pieces) == FALLBACK.decode(ids)


class TestStopStrings:
    def test_across_pieces(self) -> None:
        stops = StopStrings(("own fox",))
        pieces = [stops.push(piece) for piece in ("the br", "own", " ", "fo", "x jumps")]
        assert pieces == ["the br", "", "", "", ""]
        assert stops.found == "own fox"

    def test_held_text_comes_back(self) -> None:
        stops = StopStrings(("own fox",))
        pieces = [stops.push(piece) for piece in ("br", "own f", "ish")]
        assert pieces == ["br", "", "own fish"]
        assert stops.push(" own") + stops.flush() == " own"
        assert stops.found is None

    def test_the_first_one_wins(self) -> None:
        stops = StopStrings(("cd", "bc", "bcd"))
        assert stops.push("abcde") == "a"
        assert stops.found == "bcd"

    @given(
        text=st.text("ab", max_size=14),
        stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
        cuts=st.lists(st.integers(0, 14), max_size=6),
    )
    def test_any_cut_gives_the_same(self, text: str, stops: list[str], cuts: list[int]) -> None:
        checker = StopStrings(tuple(stops))
        edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
        out = ""
        for start, stop in itertools.pairwise(edges):
            out += checker.push(text[start:stop])
            if checker.found is not None:
                break
        else:
            out += checker.flush()
        # A stop string that is complete earlier ends the text before one that begins earlier but
        # is complete later; both orders keep every stop string out of the text.
        assert text.startswith(out)
        assert not any(stop in out for stop in stops)
        assert (checker.found is not None) == any(stop in text for stop in stops)


class Scripted:
    """Stands in for a request whose model answers with given tokens."""

    class _Clock:
        def elapsed(self) -> float:
            return 0.0

    class _State:
        filled = 0

        def __init__(self, ids: list[int]) -> None:
            self.rows = torch.nn.functional.one_hot(torch.tensor(ids), 300).float()
            self.token_ids = torch.zeros(1, dtype=torch.int64)
            self.next = 0

        def append(self, token_ids: torch.Tensor) -> torch.Tensor:
            self.next += 1
            return self.rows[self.next : self.next + 1]

    class _Prefill:
        def __init__(self, logits: torch.Tensor) -> None:
            self.logits = logits

    def __init__(self, ids: list[int]) -> None:
        self.clock, self.state = self._Clock(), self._State(ids)
        self.prefill = self._Prefill(self.state.rows[0])
        self.generated, self.ttft_s, self.answer_s = 0, 0.0, 0.0


def answer(
    text: str, params: SamplingParams, eos: frozenset[int] = frozenset()
) -> tuple[str, Answer]:
    """Decode a model that says `text`, a byte a token."""
    stream = TextStream(BYTES, params.stop)
    steps = decode(Scripted(byte_ids(text)), params, stream, eos, Cancellation())  # type: ignore[arg-type]
    pieces = []
    while True:
        try:
            pieces.append(next(steps)[1])
        except StopIteration as done:
            return "".join(pieces), done.value


def test_generation_stops_inside_the_text() -> None:
    text, end = answer("the brown fox jumps", SamplingParams(stop=("own fox",)))
    assert (text, end.finish_reason) == ("the br", "stop")
    assert len(end.token_ids) == len("the brown fox")


def test_generation_stops_in_emoji_and_cjk() -> None:
    text, end = answer("数据👩‍👧。完", SamplingParams(stop=("👧",)))
    assert (text, end.finish_reason) == ("数据👩\u200d", "stop")


def test_length_cuts_no_character() -> None:
    text, end = answer("ab🙂", SamplingParams(max_tokens=4))
    assert (text, end.finish_reason, len(end.token_ids)) == ("ab", "length", 4)


def test_text_held_for_a_stop_string_is_given_back_at_the_end() -> None:
    text, end = answer("brown f", SamplingParams(max_tokens=7, stop=("own fox",)))
    assert (text, end.finish_reason) == ("brown f", "length")


def test_end_token_is_no_text() -> None:
    eos = byte_ids("!")[0]
    text, end = answer("yes!no", SamplingParams(stop=("s!",)), frozenset((eos,)))
    assert (text, end.finish_reason) == ("yes", "eos")


def test_stream_pieces_join_to_the_text(device: torch.device) -> None:
    engine = TransformersEngine(tiny_model("qwen2", device), BYTES, DenseMethod())
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
    *pieces, result = engine.stream(byte_ids("hello"), params)
    assert isinstance(result, Result)
    assert all(isinstance(piece, str) and piece for piece in pieces)
    assert "".join(str(piece) for piece in pieces) == result.text
    again = engine.generate(byte_ids("hello"), params)
    assert (again.token_ids, again.text) == (result.token_ids, result.text)


def test_stop_strings_need_a_tokenizer(device: torch.device) -> None:
    engine = TransformersEngine(tiny_model("qwen2", device), None, DenseMethod())
    with pytest.raises(ConfigError, match="tokenizer"):
        engine.generate([5, 6], SamplingParams(stop=("x",)))
