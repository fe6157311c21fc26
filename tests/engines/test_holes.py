"""Exact KV in the holes of a plan gives the dense result, wherever the holes are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers.engine import TransformersEngine
from kvcmas.engines.transformers.results import Scored
from kvcmas.engines.transformers.sampling import SamplingParams
from kvcmas.workflow.plan import Head, Reuse

from .fake_methods import DenseMethod, StoredMethod, garbage, holes
from .tiny import FAMILIES, SLIDING, random_ids, tiny_model

TOKENS = 80
LAYOUTS = {
    "one": holes((7, 53)),
    "at the start": holes((0, 31)),
    "up to the last but one": holes((17, TOKENS - 1)),
    "all but the last": holes((0, TOKENS - 1)),
    "three unaligned": holes((3, 14), (19, 33), (41, 70)),
    "adjacent": holes((5, 20), (20, 21), (21, 60)),
    "single tokens": holes((0, 1), (9, 10), (11, 12), (78, 79)),
    "eight": holes(*((start, start + 7) for start in range(2, 74, 9))),
}


def dense(family: str, device: torch.device, attention: str = "sdpa") -> tuple[list[int], Scored]:
    """A continuation and the dense run that scores it."""
    engine = TransformersEngine(tiny_model(family, device, attention), None, DenseMethod())
    prompt = random_ids(TOKENS)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    continuation = list(engine.generate(prompt, params).token_ids)
    return continuation, engine.score(prompt, continuation)


def donor_of(scored: Scored) -> SegmentKV:
    return scored.kv.slice(0, TOKENS)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_true_holes_equal_dense(family: str, attention: str, device: torch.device) -> None:
    continuation, expected = dense(family, device, attention)
    model, prompt = tiny_model(family, device, attention), random_ids(TOKENS)
    for spans in LAYOUTS.values():
        method = StoredMethod(donor_of(expected), spans)
        engine = TransformersEngine(model, None, method)
        scored = engine.score(prompt, continuation)
        torch.testing.assert_close(scored.logits, expected.logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(scored.kv.keys, expected.kv.keys, atol=1e-4, rtol=0)
        torch.testing.assert_close(scored.kv.values, expected.kv.values, atol=1e-4, rtol=0)
        reused = sum(len(span) for span in spans)
        assert scored.record.passes == 1
        assert (scored.record.computed, scored.record.reused) == (TOKENS - reused, reused)
        assert not method.last.exact
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    assert list(engine.generate(prompt, params).token_ids) == continuation


@given(cuts=st.lists(st.integers(0, TOKENS - 1), min_size=2, max_size=12, unique=True))
@settings(max_examples=15, deadline=None)
def test_any_holes_equal_dense(cuts: list[int]) -> None:
    device = torch.device("cpu")
    edges = sorted(cuts)
    spans = holes(*zip(edges[::2], edges[1::2], strict=False))
    continuation, expected = dense("gemma3", device)
    engine = TransformersEngine(
        tiny_model("gemma3", device), None, StoredMethod(donor_of(expected), spans)
    )
    scored = engine.score(random_ids(TOKENS), continuation)
    torch.testing.assert_close(scored.logits, expected.logits, atol=1e-4, rtol=0)


def test_computed_ranges_of_the_outcome(device: torch.device) -> None:
    continuation, expected = dense("llama", device)
    method = StoredMethod(donor_of(expected), holes((3, 14), (14, 30), (40, 79)))
    TransformersEngine(tiny_model("llama", device), None, method).score(
        random_ids(TOKENS), continuation
    )
    # The continuation's last token has no KV.
    assert method.last.computed == ((0, 3), (30, 40), (79, TOKENS + 11))
    assert len(method.last.kv) == TOKENS + 11
    assert method.last.kv.token_ids.tolist() == random_ids(TOKENS) + continuation[:-1]


def test_exact_spans_leave_the_request_exact(device: torch.device) -> None:
    _, expected = dense("llama", device)
    method = StoredMethod(donor_of(expected), holes((0, 50), exact=True))
    scored = TransformersEngine(tiny_model("llama", device), None, method).prefill(
        random_ids(TOKENS)
    )
    assert method.last.exact and scored.record.exact
    assert method.last.computed == ((50, TOKENS),)
    assert scored.record.spans[0].exact


def test_garbage_behind_a_window_is_not_seen(device: torch.device) -> None:
    """A sliding layer really does not attend past its window in a pass with holes."""
    model = tiny_model("mistral", device)
    assert "mistral" in SLIDING
    prompt = random_ids(TOKENS)
    expected = TransformersEngine(model, None, DenseMethod()).prefill(prompt)
    # Two layers of 24 tokens see 47 back from the last token; [10, 20) is out of its reach, and
    # the hole of one token at 70 makes the pass one with a mask.
    far = holes((10, 20))
    near = replace(far[0], start=70, stop=71, offset=70)

    def spoil_far(out: SegmentKV) -> None:
        if int(out.positions[0, 0]) < 20:
            garbage(out)

    method = StoredMethod(donor_of(expected), [*far, near], spoil_far)
    scored = TransformersEngine(model, None, method).prefill(prompt)
    torch.testing.assert_close(scored.logits, expected.logits, atol=1e-4, rtol=0)


class TestHeads:
    """Garbage in a hole must be found at the head, and the result is then the dense one."""

    HEAD = Head(length=8, chunk=8, limit=24, tolerance=0.05, probe=12)

    def run(
        self, device: torch.device, spans: list[Reuse], *, spoilt: bool = True
    ) -> tuple[StoredMethod, Scored, Scored]:
        continuation, expected = dense("qwen3", device)
        method = StoredMethod(donor_of(expected), spans, garbage if spoilt else None)
        engine = TransformersEngine(tiny_model("qwen3", device), None, method)
        return method, engine.score(random_ids(TOKENS), continuation), expected

    def test_garbage_ends_dense(self, device: torch.device) -> None:
        method, scored, expected = self.run(device, holes((10, 60), head=self.HEAD))
        torch.testing.assert_close(scored.logits, expected.logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(scored.kv.keys, expected.kv.keys, atol=1e-4, rtol=0)
        record, span = scored.record, scored.record.spans[1]
        # 8, 16, 24 tokens, then the whole span.
        assert record.passes == 4
        assert (record.computed, record.reused, span.head, span.reused) == (TOKENS, 0, 50, 0)
        assert span.deviation is not None and span.deviation > 1
        assert len(span.notes) == 3 and span.notes[2].endswith("computed the whole span")
        assert method.last.exact
        assert method.last.computed == ((0, TOKENS + 11),)

    def test_agreement_takes_one_pass(self, device: torch.device) -> None:
        method, scored, expected = self.run(
            device, holes((10, 60), (62, 75), head=self.HEAD), spoilt=False
        )
        torch.testing.assert_close(scored.logits, expected.logits, atol=1e-4, rtol=0)
        assert scored.record.passes == 1
        for span in (scored.record.spans[1], scored.record.spans[3]):
            assert span.head == 8
            assert span.deviation is not None and span.deviation < 1e-5
            assert span.tolerance == 0.05
            assert span.notes == ()
        # One call a span: its probe and all that is reused.
        assert method.filled == [(10, 60), (62, 75)]
        assert not method.last.exact

    def test_two_spans_of_garbage(self, device: torch.device) -> None:
        method, scored, expected = self.run(device, holes((4, 30), (33, 79), head=self.HEAD))
        torch.testing.assert_close(scored.logits, expected.logits, atol=1e-4, rtol=0)
        assert method.last.exact
        assert scored.record.passes == 4

    def test_one_bad_span_leaves_the_good_one(self, device: torch.device) -> None:
        continuation, expected = dense("qwen3", device)

        def spoil_second(out: SegmentKV) -> None:
            if int(out.positions[0, 0]) > 30:
                garbage(out)

        spans = holes((4, 30), (40, 70), head=self.HEAD)
        method = StoredMethod(donor_of(expected), spans, spoil_second)
        scored = TransformersEngine(tiny_model("qwen3", device), None, method).score(
            random_ids(TOKENS), continuation
        )
        torch.testing.assert_close(scored.logits, expected.logits, atol=1e-4, rtol=0)
        assert [span.reused for span in scored.record.spans] == [0, 18, 0, 0, 0]
        assert not method.last.exact
        assert method.last.computed == ((0, 12), (30, TOKENS + 11))

    def test_the_head_grows_until_it_agrees(self, device: torch.device) -> None:
        continuation, expected = dense("qwen3", device)

        def spoil_front(out: SegmentKV) -> None:
            first = 20 - int(out.positions[0, 0])
            if first > 0:
                garbage(out.slice(0, first))

        head = replace(self.HEAD, chunk=6, limit=40, probe=4)
        method = StoredMethod(donor_of(expected), holes((10, 70), head=head), spoil_front)
        scored = TransformersEngine(tiny_model("qwen3", device), None, method).score(
            random_ids(TOKENS), continuation
        )
        # The probe's 4 tokens are clean once the head ends at 24: 18 disagrees, 24 agrees.
        span = scored.record.spans[1]
        assert (span.head, span.reused, scored.record.passes) == (14, 46, 2)
        assert span.deviation is not None and span.deviation < 1e-5
        torch.testing.assert_close(scored.logits, expected.logits, atol=1e-4, rtol=0)

    def test_a_probe_longer_than_a_chunk_keeps_its_tokens(self, device: torch.device) -> None:
        """The deviation of the longer head covers tokens of the head before it."""
        continuation, expected = dense("qwen3", device)

        def spoil_front(out: SegmentKV) -> None:
            first = 20 - int(out.positions[0, 0])
            if first > 0:
                garbage(out.slice(0, first))

        head = replace(self.HEAD, chunk=6, limit=40, probe=8)
        method = StoredMethod(donor_of(expected), holes((10, 70), head=head), spoil_front)
        scored = TransformersEngine(tiny_model("qwen3", device), None, method).score(
            random_ids(TOKENS), continuation
        )
        # [16, 24) still holds four spoilt tokens; [22, 30) is clean.
        assert (scored.record.spans[1].head, scored.record.passes) == (20, 3)

    def test_not_a_number_disagrees(self, device: torch.device) -> None:
        continuation, expected = dense("qwen3", device)

        def spoil(out: SegmentKV) -> None:
            out.values.fill_(float("nan"))

        method = StoredMethod(donor_of(expected), holes((10, 60), head=self.HEAD), spoil)
        scored = TransformersEngine(tiny_model("qwen3", device), None, method).score(
            random_ids(TOKENS), continuation
        )
        torch.testing.assert_close(scored.logits, expected.logits, atol=1e-4, rtol=0)

    def test_without_tolerance_the_deviation_is_only_recorded(self, device: torch.device) -> None:
        method, scored, _ = self.run(device, holes((10, 60), head=Head(length=5)))
        span = scored.record.spans[1]
        assert scored.record.passes == 1
        assert (span.head, span.reused, span.tolerance) == (5, 45, None)
        assert span.deviation is not None and span.deviation > 1
        assert not method.last.exact

    def test_a_tolerance_without_a_head_gets_a_chunk(self, device: torch.device) -> None:
        head = Head(length=0, chunk=4, tolerance=0.05)
        _, scored, expected = self.run(device, holes((10, 60), head=head))
        torch.testing.assert_close(scored.logits, expected.logits, atol=1e-4, rtol=0)
        assert scored.record.spans[1].reused == 0
        _, scored, _ = self.run(device, holes((10, 60), head=head), spoilt=False)
        assert scored.record.spans[1].head == 4
        assert "needs a head" in scored.record.spans[1].notes[0]

    def test_a_head_as_long_as_its_span_is_measured(self, device: torch.device) -> None:
        head = Head(length=20, tolerance=0.05, probe=6)
        method, scored, expected = self.run(device, holes((60, 80), head=head))
        torch.testing.assert_close(scored.logits, expected.logits, atol=1e-4, rtol=0)
        span = scored.record.spans[1]
        assert (span.head, span.reused, scored.record.passes) == (20, 0, 1)
        assert span.deviation is not None and span.deviation > 1
        assert method.filled == [(74, 80)]
        assert method.last.exact
