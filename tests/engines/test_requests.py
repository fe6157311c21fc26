"""What a request promises whatever happens to it: limits, finish, cancellation, record."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers.cancel import Cancellation
from kvcmas.engines.transformers.engine import TransformersEngine
from kvcmas.engines.transformers.inputs import unpad
from kvcmas.engines.transformers.record import RequestRecord
from kvcmas.engines.transformers.results import Result
from kvcmas.engines.transformers.sampling import SamplingParams
from kvcmas.errors import CancelledError, ConfigError, PlanError, PromptError, UnsupportedModelError
from kvcmas.workflow.plan import Head, Plan, Reuse
from kvcmas.workflow.prompt import Prompt

from .fake_methods import DenseMethod, StoredMethod, holes
from .tiny import EOS, LIMIT, VOCAB, byte_tokenizer, random_ids, tiny_model

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture
def method() -> DenseMethod:
    return DenseMethod()


@pytest.fixture
def engine(method: DenseMethod, device: torch.device) -> TransformersEngine:
    return TransformersEngine(tiny_model("llama", device), byte_tokenizer(), method)


class TestLimits:
    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            ([], "empty"),
            (np.zeros((2, 3), dtype=np.int64), "unpad"),
            ([1.5, 2.0], "integers"),
            ([3, VOCAB], r"\[0, 257\)"),
            ([-1, 3], r"\[0, 257\)"),
            (random_ids(LIMIT - 3), "window is 512"),
        ],
    )
    def test_refused_before_the_method_hears_of_it(
        self, engine: TransformersEngine, method: DenseMethod, ids: Any, message: str
    ) -> None:
        with pytest.raises(PromptError, match=message):
            engine.generate(ids, FOUR)
        with pytest.raises(PromptError, match=message):
            engine.stream(ids, FOUR)
        with pytest.raises(PromptError, match=message):
            engine.score(ids, [3] * 4)
        assert method.calls == []

    @pytest.mark.parametrize("excess", [-1, 0])
    def test_up_to_the_window(self, engine: TransformersEngine, excess: int) -> None:
        result = engine.generate(random_ids(LIMIT - 4 + excess), FOUR)
        assert len(result.token_ids) == 4

    def test_continuation_is_checked(self, engine: TransformersEngine) -> None:
        with pytest.raises(PromptError, match="token ids"):
            engine.score([3, 4], [VOCAB])

    @pytest.mark.parametrize(
        "ids", [[5, 6, 7], np.array([5, 6, 7]), torch.tensor([5, 6, 7]), torch.tensor([[5, 6, 7]])]
    )
    def test_forms_of_one_prompt(self, engine: TransformersEngine, ids: Any) -> None:
        expected = engine.generate([5, 6, 7], FOUR)
        assert engine.generate(ids, FOUR).token_ids == expected.token_ids


def test_padded_rows_equal_each_row_alone(engine: TransformersEngine) -> None:
    rows = [random_ids(5, 1), random_ids(17, 2), random_ids(11, 3)]
    left = [[0] * (17 - len(row)) + row for row in rows]
    mask = [[0] * (17 - len(row)) + [1] * len(row) for row in rows]
    unpadded = unpad(torch.tensor(left), torch.tensor(mask))
    assert [row.tolist() for row in unpadded] == rows
    right = [row + [0] * (17 - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (17 - len(row)) for row in rows]
    assert [row.tolist() for row in unpad(np.array(right), np.array(mask))] == rows
    with pytest.raises(PromptError, match=r"\(3, 17\)"):
        unpad(left, [[1]])


def test_left_padded_batch_agrees_with_transformers(
    engine: TransformersEngine, device: torch.device
) -> None:
    rows = [random_ids(5, 1), random_ids(17, 2)]
    ids = torch.tensor([[0] * 12 + rows[0], rows[1]], device=device)
    mask = torch.tensor([[0] * 12 + [1] * 5, [1] * 17], device=device)
    model: Any = engine.runner.model
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False
    )
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    for row, expected in zip(unpad(ids, mask), output[:, 17:], strict=True):
        assert list(engine.generate(row, params).token_ids) == expected.tolist()


class TestFinish:
    def test_once_with_an_outcome(self, engine: TransformersEngine, method: DenseMethod) -> None:
        engine.generate(random_ids(9), FOUR)
        engine.score(random_ids(9), [5, 6])
        list(engine.stream(random_ids(9), FOUR))
        assert method.calls == ["plan", "finish"] * 3
        assert all(outcome is not None for outcome in method.outcomes)
        assert len(method.last.kv) == 9 + 3

    def test_cancelled_before_the_plan(
        self, engine: TransformersEngine, method: DenseMethod
    ) -> None:
        cancel = Cancellation()
        cancel.cancel()
        with pytest.raises(CancelledError):
            engine.generate(random_ids(9), FOUR, cancel=cancel)
        assert method.calls == []

    def test_cancelled_between_tokens(
        self, engine: TransformersEngine, method: DenseMethod
    ) -> None:
        cancel, seen = Cancellation(), []

        def on_token(token: int, piece: str) -> None:
            seen.append(token)
            if len(seen) == 5:
                cancel.cancel()

        params = SamplingParams(max_tokens=50, ignore_eos=True)
        with pytest.raises(CancelledError):
            engine.generate(random_ids(9), params, on_token=on_token, cancel=cancel)
        assert len(seen) == 5
        assert method.calls == ["plan", "finish"]
        assert method.outcomes == [None]

    def test_an_error_of_the_callback(
        self, engine: TransformersEngine, method: DenseMethod
    ) -> None:
        def on_token(token: int, piece: str) -> None:
            raise KeyError(token)

        with pytest.raises(KeyError):
            engine.generate(random_ids(9), FOUR, on_token=on_token)
        assert method.outcomes == [None]

    def test_a_closed_stream(self, engine: TransformersEngine, method: DenseMethod) -> None:
        stream = engine.stream(list(b"hello"), SamplingParams(max_tokens=200, ignore_eos=True))
        assert isinstance(next(stream), str)
        del stream
        assert method.outcomes == [None]

    def test_a_stream_that_is_never_read(
        self, engine: TransformersEngine, method: DenseMethod
    ) -> None:
        engine.stream(random_ids(9), FOUR)
        assert method.calls == []

    def test_cancelled_while_filling(self, device: torch.device) -> None:
        model, cancel = tiny_model("llama", device), Cancellation()
        donor = TransformersEngine(model, None, DenseMethod()).prefill(random_ids(30)).kv

        def cancel_now(out: SegmentKV) -> None:
            cancel.cancel()

        method = StoredMethod(donor, holes((3, 9), (12, 20)), cancel_now)
        with pytest.raises(CancelledError):
            TransformersEngine(model, None, method).generate(random_ids(30), FOUR, cancel=cancel)
        assert method.calls == ["plan", "fill", "finish"]
        assert method.outcomes == [None]

    def test_a_plan_for_another_prompt(self, device: torch.device) -> None:
        class WrongMethod(DenseMethod):
            def plan(self, prompt: Prompt) -> Plan:
                return Plan.dense(len(prompt) + 1)

        method = WrongMethod()
        with pytest.raises(PlanError, match="planned 10 tokens for a prompt of 9"):
            TransformersEngine(tiny_model("llama", device), None, method).prefill(random_ids(9))
        assert method.outcomes == [None]

    def test_a_method_that_fails_to_fill(self, device: torch.device) -> None:
        class FailingMethod(StoredMethod):
            def fill(
                self, prompt: Prompt, span: Reuse, start: int, stop: int, out: SegmentKV
            ) -> None:
                raise PlanError("unknown segment")

        model = tiny_model("llama", device)
        donor = TransformersEngine(model, None, DenseMethod()).prefill(random_ids(30)).kv
        method = FailingMethod(donor, holes((3, 9)))
        with pytest.raises(PlanError, match="unknown segment"):
            TransformersEngine(model, None, method).prefill(random_ids(30))
        assert method.outcomes == [None]


class TestMaxTokens:
    def test_zero_warms(self, engine: TransformersEngine, method: DenseMethod) -> None:
        result = engine.generate(random_ids(9), SamplingParams(max_tokens=0))
        assert (result.token_ids, result.text, result.finish_reason) == ((), "", "length")
        assert len(method.last.kv) == 9
        assert result.record.generated == 0

    def test_one(self, engine: TransformersEngine, method: DenseMethod) -> None:
        result = engine.generate(random_ids(9), SamplingParams(max_tokens=1, ignore_eos=True))
        assert len(result.token_ids) == 1
        assert len(method.last.kv) == 9


def test_end_token_ends(device: torch.device, method: DenseMethod) -> None:
    model = tiny_model("llama", device)
    free = TransformersEngine(model, None, method).generate(
        random_ids(9), SamplingParams(max_tokens=8, ignore_eos=True)
    )
    end = free.token_ids[3]
    model.generation_config.eos_token_id = [EOS, end]
    first = free.token_ids.index(end)
    result = TransformersEngine(model, byte_tokenizer(), method).generate(
        random_ids(9), SamplingParams(max_tokens=8)
    )
    assert result.token_ids == free.token_ids[: first + 1]
    assert result.finish_reason == "eos"


class TestRecord:
    def test_numbers(self, device: torch.device) -> None:
        model = tiny_model("llama", device)
        donor = TransformersEngine(model, None, DenseMethod()).prefill(random_ids(40)).kv
        method = StoredMethod(donor, holes((4, 20), head=Head(length=3)))
        ids = np.array(random_ids(40))
        prompt = Prompt(ids, agent="judge", request_id="r1")
        record = TransformersEngine(model, None, method).generate(prompt, FOUR).record
        assert (record.agent, record.request_id, record.method) == ("judge", "r1", "stored")
        assert (record.prompt, record.computed, record.reused, record.generated) == (40, 27, 13, 4)
        assert (record.passes, record.exact) == (1, False)
        kinds = [(span.start, span.stop, span.kind, span.computed) for span in record.spans]
        assert kinds == [(0, 4, "compute", 4), (4, 20, "reuse", 3), (20, 40, "compute", 20)]
        parts = record.match_s + record.correct_s + record.forward_s + record.other_s
        assert parts == pytest.approx(record.ttft_s)
        assert min(record.match_s, record.correct_s, record.forward_s, record.other_s) >= 0
        assert record.decode_s > 0
        assert record.total_s >= record.ttft_s + record.decode_s + record.finish_s

    def test_json_both_ways(self, engine: TransformersEngine) -> None:
        record = engine.generate(random_ids(9), FOUR).record
        assert record.notes == ("nothing is stored",)
        assert RequestRecord.model_validate_json(record.model_dump_json()) == record


def test_threads_share_an_engine(engine: TransformersEngine) -> None:
    prompts = [random_ids(20 + 7 * seed, seed) for seed in range(4)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [engine.generate(prompt, params).token_ids for prompt in prompts]
    results: dict[int, Result] = {}

    def work(number: int) -> None:
        results[number] = engine.generate(prompts[number], params)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[number].token_ids for number in range(4)] == expected


def test_a_request_inside_a_stream(engine: TransformersEngine) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = engine.generate(list(b"one"), params)
    other = engine.generate(list(b"two"), params)
    pieces: list[str] = []
    for piece in engine.stream(list(b"one"), params):
        assert engine.generate(list(b"two"), params).token_ids == other.token_ids
        if isinstance(piece, Result):
            assert piece.token_ids == expected.token_ids
        else:
            pieces.append(piece)
    assert "".join(pieces) == expected.text


class TestModels:
    def test_training_mode_is_refused(self, method: DenseMethod) -> None:
        model = tiny_model("llama", torch.device("cpu")).train()
        with pytest.raises(ConfigError, match=r"model\.eval\(\)"):
            TransformersEngine(model, None, method)

    def test_flash_attention_is_refused_by_name(self, method: DenseMethod) -> None:
        model = tiny_model("llama", torch.device("cpu"))
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(UnsupportedModelError, match="flash_attention_2"):
            TransformersEngine(model, None, method)

    def test_chunked_layers_are_refused_by_name(self, method: DenseMethod) -> None:
        model = tiny_model("llama", torch.device("cpu"))
        model.config.layer_types = ["chunked_attention"] * 3
        with pytest.raises(UnsupportedModelError, match="chunked_attention"):
            TransformersEngine(model, None, method)

    def test_layers_of_another_shape_are_refused(self, method: DenseMethod) -> None:
        model = tiny_model("llama", torch.device("cpu"))
        model.config.head_dim = 8
        with pytest.raises(UnsupportedModelError, match="differ in shape"):
            TransformersEngine(model, None, method).prefill([3, 4, 5])
        assert method.outcomes == [None]
