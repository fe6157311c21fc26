"""The order of requests, plain prompts of a wanted length, and the figures of timed requests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvcmas.bench.vllm.client import Timed
from kvcmas.bench.vllm.job import Job
from kvcmas.bench.vllm.latencies import (
    ReaderRow,
    bound_figures,
    overhead_figures,
    reader_figures,
)
from kvcmas.bench.vllm.serving import ServingBench
from kvcmas.bench.vllm.settings import Settings
from kvcmas.bench.vllm.spread import median_interval, quartiles
from kvcmas.errors import ConfigError

from .fake_servers import FakeClient, contexts_file, small_texts


def row(ours: float, plain: float, bound: float | None, computed: int = 20) -> ReaderRow:
    return ReaderRow(
        "context",
        1,
        "critic",
        Timed("", ours, 100, 100 - computed),
        Timed("", plain, 100, 32),
        None if bound is None else Timed("", bound, 20, 0),
    )


def settings_for(path: Path, count: int = 8) -> Settings:
    return Settings(
        model="somewhere",
        contexts=contexts_file(path, count),
        warm_contexts=3,
        served_contexts=2,
        chain_contexts=1,
        served_tokens=200,
        overhead_pairs=5,
    )


def two(settings: Settings, path: Path, more: int = 0) -> tuple[ServingBench, FakeClient]:
    """A bench at fake servers; from the second context on, kvcmas's readers compute 90 tokens."""
    texts = small_texts(settings)
    calls: list[object] = []
    plain = FakeClient("vllm", texts, calls, more=more, ttft_s=2.0)
    ours = FakeClient(
        "kvcmas", texts, calls, lambda prompt, number: prompt - 90 if number >= 5 else 0, more
    )
    return ServingBench(Job(settings, path), plain, ours, texts, pause_s=0.0), ours


def test_overhead_is_the_median_of_pairs() -> None:
    found = overhead_figures([1.0, 2.2, 30.0], [1.0, 2.0, 10.0])
    assert found["idle_overhead"] == pytest.approx(0.1)
    assert found["idle_overhead_of_medians"] == pytest.approx(0.1)
    assert found["idle_pairs"] == 3
    assert found["idle_overhead_low"] == pytest.approx(0.0)
    assert found["idle_overhead_high"] == pytest.approx(2.0)


def test_the_interval_of_a_median_narrows() -> None:
    draw = random.Random(0)
    many = [draw.gauss(1, 0.1) for _ in range(400)]
    low, high = median_interval(many)
    few_low, few_high = median_interval(many[:20])
    assert low < 1 < high
    assert high - low < 0.05 < few_high - few_low
    assert all(value != value for value in (*median_interval([1.0]), *quartiles([])))


def test_reader_figures() -> None:
    rows = [row(0.5, 2.0, 0.4), row(1.0, 2.0, None), row(0.7, 4.0, 0.5), row(4.0, 4.0, None, 100)]
    found = reader_figures(rows[:3], "reader")
    assert found["reader_ttft_ratio"] == pytest.approx(0.35)
    assert found["reader_computed_share"] == pytest.approx(0.2)
    assert found["reader_computed_share_vllm"] == pytest.approx(0.68)
    assert found["reader_ttft_ratio_p25"] == pytest.approx((0.175 + 0.25) / 2)
    assert found["reader_ttft_ratio_p75"] == pytest.approx((0.25 + 0.5) / 2)
    assert found["reader_exact_requests"] == 0
    # One that was served exactly counts in the medians as well.
    whole = reader_figures(rows, "reader")
    assert (whole["reader_requests"], whole["reader_exact_requests"]) == (4, 1)
    assert whole["reader_ttft_ratio"] == pytest.approx(0.85 / 3)


def test_the_bound_has_as_many_computed_tokens() -> None:
    rows = [row(0.5, 2.0, 0.4), row(1.0, 2.0, None), row(0.7, 4.0, 0.5), row(9.0, 4.0, 0.1, 21)]
    found = bound_figures(rows)
    assert found["bound_ratio"] == pytest.approx(0.6 / 0.45)
    assert (found["bound_requests"], found["bound_requests_of_other_length"]) == (2, 1)


def test_random_chats_have_the_wanted_length(tmp_path: Path) -> None:
    texts = small_texts(settings_for(tmp_path))
    draw = random.Random(0)
    for tokens in (texts.least_chat, 60, 301):
        one, other = (texts.random_chat(draw, tokens) for _ in range(2))
        assert one != other
        for chat in (one, other):
            text = texts.tokenizer.apply_chat_template(chat)
            assert len(texts.tokenizer(text)["input_ids"]) == tokens
            assert all(message["content"] for message in chat)


def test_contexts_and_what_is_left(tmp_path: Path) -> None:
    texts = small_texts(settings_for(tmp_path, 6))
    found, left = texts.joined(300, 2)  # two texts for each
    sizes = [len(texts.tokenizer(text)["input_ids"]) for text in (*found, *left)]
    assert sizes == [300, 300, 227, 226]
    with pytest.raises(ConfigError, match="text for 3"):
        texts.joined(300, 4)


def test_the_bound_is_asked_right_behind_the_reader(tmp_path: Path) -> None:
    bench, ours = two(settings_for(tmp_path), tmp_path)
    found = bench.run()
    plain_asked = [place for place, call in enumerate(ours.calls) if call[2] is not None]
    assert len(plain_asked) == found["bound_requests"] == 2 * 3
    for place in plain_asked:
        before, bound = ours.calls[place - 1], ours.calls[place]
        assert before[0] == bound[0] == "kvcmas"
        assert bound[1].computed == before[1].computed == 90
    assert found["bound_ratio"] == pytest.approx(1.0)
    assert found["bound_requests_of_other_length"] == 0
    assert found["reader_ttft_ratio"] == pytest.approx(0.5)
    assert found["idle_overhead"] == pytest.approx(-0.5)
    assert found["warm_contexts"] == 2
    assert [name for name, _ in bench.laps] == [
        "learning",
        "reading, context",
        "reading, chain",
        "overhead",
    ]


def test_a_bound_that_is_off_is_corrected_once(tmp_path: Path) -> None:
    bench, ours = two(settings_for(tmp_path), tmp_path, more=7)
    found = bench.run()
    assert found["bound_requests"] == 6
    asked = [call[1].computed for call in ours.calls if call[2] is not None]
    assert asked == [97, 90] * 6


def test_both_servers_come_first(tmp_path: Path) -> None:
    settings = settings_for(tmp_path).model_copy(update={"overhead_pairs": 30})
    bench, ours = two(settings, tmp_path)
    bench.run()
    last = [call[0] for call in ours.calls][-60:]
    firsts = last[::2]
    assert {*last[:2]} == {"kvcmas", "vllm"}
    assert 5 < firsts.count("kvcmas") < 25
    # A pair is the same text at both servers.
    prompts = [call[1].prompt for call in ours.calls][-60:]
    assert prompts[::2] == prompts[1::2]
