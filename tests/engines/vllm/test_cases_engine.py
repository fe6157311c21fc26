"""Cases of docs/cases.md in a real engine: input that broke other systems which reuse KV."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from .engine import BLOCK, CRITIC, NEAR, PLANNER, Ask, Server, serving, text

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

WINDOW = 1024
BUDGET = 48 << 20
METHOD = {"learn": False, "audit": 0.0, "cold_tokens": 0, "tolerance": 1.0, "limit": 64}
NOTHING = {"reuse": False}
UNICODE = "👩\u200d👧 met 王小明 at 東京駅, café 👩🏽\u200d🚀. " * 8


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = {"method": METHOD, "device_bytes": BUDGET // 3 * 2, "host_bytes": BUDGET // 3}
    with serving(options, max_model_len=WINDOW) as one:
        yield one


@pytest.fixture(autouse=True)
def empty(server: Server) -> Iterator[None]:
    forget(server)
    assert not server.donors
    free = server.free_blocks
    yield
    server.check_idle(free)


def forget(server: Server) -> None:
    """Everything that was computed."""
    assert server.llm.reset_prefix_cache(reset_connector=True)
    server.run()
    server.one([1, 2, 3], tokens=1, salt="to let the workers forget")
    assert server.llm.reset_prefix_cache(reset_connector=True)


@pytest.fixture(scope="module")
def planner(server: Server) -> list[int]:
    return server.chat(PLANNER, text(0)[:900], "Write a plan.")


@pytest.fixture(scope="module")
def critic(server: Server) -> list[int]:
    return server.chat(CRITIC, text(0)[:900], "Write your criticism.")


def refused(match: str) -> Any:
    """vLLM refuses the request with these words, before anything is computed."""
    from vllm.exceptions import VLLMValidationError

    return pytest.raises(VLLMValidationError, match=match)


def lives(server: Server) -> None:
    """The next request is served."""
    assert len(server.one([7, 8, 9], tokens=2, salt="alive").ids) == 2


@pytest.mark.parametrize("length", [4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1])
def test_a_prompt_that_is_stored_as_a_whole(
    server: Server, planner: list[int], length: int
) -> None:
    """Case 5: from vLLM's own cache, and from its donor."""
    ids = planner[:length]
    clean = server.one(ids)
    assert clean.record.computed == length
    held = server.one(ids)
    assert held.record.computed >= 1
    assert held.difference(clean) <= NEAR
    server.forget_blocks()
    donated = server.one(ids)
    assert (donated.record.computed, donated.record.reused) == (1, length - 1)
    assert donated.difference(clean) <= NEAR


def test_segments_in_another_order(server: Server) -> None:
    """Case 6: both are reused, each from where it stood; what they say can be read from them."""
    one, other = text(1)[:800], text(2)[:800]
    server.one(server.chat(PLANNER, f"{one}\n\n{other}", "Plan."), tokens=1)
    prompt = server.chat(CRITIC, f"{other}\n\n{one}", "Repeat it word for word.")
    for document in (one, other):
        begin, end = document.index(" ", 400), document.index(" ", 480)
        said = server.llm.get_tokenizer().encode(document[begin:end])
        server.forget_blocks()
        answer = server.one([*prompt, *said])
        first, second = [span for span in answer.record.spans if span.kind == "reuse"]
        assert first.offset is not None and second.offset is not None
        assert first.offset > second.offset
        assert min(first.reused, second.reused) > 50
        assert document[end:].startswith(answer.output.outputs[0].text.rstrip())


def test_no_token_and_one(server: Server) -> None:
    """Case 8."""
    with refused("cannot be empty"):
        server.one([])
    first, second = server.one([5]), server.one([5])
    assert first.log_probs == second.log_probs
    for answer in (first, second):
        assert (answer.record.computed, answer.record.reused, answer.record.cached) == (1, 0, 0)


def test_the_models_window(server: Server) -> None:
    """Case 9: a text that fits its donor alone; the reader's role makes it too long."""
    words = server.llm.get_tokenizer().encode(text(3) * 5)
    prompt = [*words[: WINDOW - 1]]
    assert len(prompt) == WINDOW - 1
    donor = server.one(prompt[200:], tokens=1)
    assert donor.record.computed == WINDOW - 201
    fits = server.one(prompt, tokens=1)
    assert fits.record.prompt == WINDOW - 1 and fits.record.reused > 0
    for more in (1, 200):
        with refused(str(WINDOW)):
            server.one([*prompt, *prompt[:more]], tokens=1)
    lives(server)


@pytest.mark.parametrize(("one", "other"), [("x", '\x01["x"]'), ("x", "X"), ("é", "e\u0301")])
def test_salts_that_look_alike(
    server: Server, planner: list[int], critic: list[int], one: str, other: str
) -> None:
    """Cases 17 and 18: what another tenant has asked shows in nothing."""
    alone = server.one(critic, tokens=2, salt=other)
    forget(server)
    server.one(planner, tokens=2, salt=one)
    server.one(critic, tokens=2, salt=one)
    beside = server.one(critic, tokens=2, salt=other)
    assert beside.record == alone.record
    assert beside.log_probs == alone.log_probs
    assert beside.cached == alone.cached == 0


def test_changed_weights(server: Server, planner: list[int], critic: list[int]) -> None:
    """Case 24: behind a reset nothing of the old model is left."""
    server.one(planner, tokens=2)
    old = server.one(critic, tokens=2, hints=NOTHING)

    def scale(factor: float) -> Any:
        def change(model: nn.Module) -> None:
            model.get_parameter("model.layers.5.post_attention_layernorm.weight").data.mul_(factor)

        return change

    server.llm.apply_model(scale(0.5))
    try:
        forget(server)
        assert not server.donors
        answer = server.one(critic, tokens=2)
        assert (answer.record.reused, answer.record.cached) == (0, 0)
        assert answer.ids != old.ids or answer.difference(old) > 0.01
        forget(server)
        assert server.one(critic, tokens=2, hints=NOTHING).log_probs == answer.log_probs
    finally:
        server.llm.apply_model(scale(2.0))
        forget(server)
    assert server.one(critic, tokens=2, hints=NOTHING).log_probs == old.log_probs


def test_text_stays_whole(server: Server) -> None:
    """Case 32: emoji and CJK at the seams, and a stop string behind reused text."""
    server.one(server.chat(PLANNER, UNICODE, "Plan."))
    ids = server.chat(CRITIC, f"Here:{UNICODE}!", "Repeat it.")
    first = server.one(ids, tokens=24)
    assert first.record.reused > 50
    assert first.output.prompt_token_ids == ids
    assert UNICODE.strip() in server.llm.get_tokenizer().decode(ids)


def test_a_stop_string(server: Server, planner: list[int]) -> None:
    """Case 32: behind reused text the answer ends right before it, and nothing is left behind.

    vLLM looks for it outside of the engine's core, which sees an abort: there is no record.
    """
    clean = server.one(planner, tokens=24).output.outputs[0].text
    stop = clean[len(clean) // 2 :][:4]
    (donor,) = (one for one in server.donors if server.worker._pool.peek(one) is not None)
    server.forget_blocks()
    server.submit(Ask(planner, tokens=24, more={"stop": [stop]}))
    outputs: list[Any] = []
    server.steps.clear()
    while server.engine.has_unfinished_requests():
        outputs += [one for one in server.engine.step() if one.finished]
    server.settle()
    (output,) = outputs
    assert output.outputs[0].text == clean[: clean.index(stop)]
    assert server.scheduled < len(planner) // 2  # its own donor was reused
    assert output.kv_transfer_params is None
    assert donor in server.donors


def test_no_new_token_and_one(server: Server, planner: list[int], critic: list[int]) -> None:
    """Case 33: none is refused by vLLM; one is what fills the cache."""
    with refused("max_tokens must be at least 1"):
        server.one(planner, tokens=0)
    assert len(server.one(planner, tokens=1, hints={"warm": True}).ids) == 1
    answer = server.one(critic, tokens=1)
    assert len(answer.ids) == 1 and answer.record.reused > 0


@pytest.mark.parametrize("given", ["a" * 100_000, "王" * 30_000])
def test_a_long_run_is_refused(server: Server, given: str) -> None:
    """Case 35."""
    from vllm import SamplingParams

    began = time.monotonic()
    with refused(str(WINDOW)):
        server.engine.add_request("run", {"prompt": given}, SamplingParams(max_tokens=1))
    assert time.monotonic() - began < 30
    lives(server)


def test_a_run_of_one_token(server: Server, planner: list[int], critic: list[int]) -> None:
    """Case 35, within the window: every offset of the donor matches every other."""
    run = [260] * 700
    server.one([*planner[:30], *run], tokens=1)
    began = time.monotonic()
    answer = server.one([*critic[:40], *run], tokens=1)
    assert time.monotonic() - began < 30
    assert answer.record.computed >= 1
    assert answer.record.computed + answer.record.reused + answer.record.cached == 740


def test_new_mixes_in_a_small_budget(server: Server) -> None:
    """Case 37: the workers hold no more than they may, and what the scheduler believes."""
    parts = [text(number)[: 600 + 20 * number] for number in range(8)]
    reused = 0
    for number in range(12):
        role = (PLANNER, CRITIC)[number % 2]
        mixed = parts[number % 8] + "\n\n" + parts[(3 * number + 1) % 8]
        answer = server.one(server.chat(role, mixed, f"Task {number}."), tokens=1)
        reused += answer.record.reused
        assert sum(server.worker._pool.nbytes.values()) <= BUDGET
        assert server.coordinator.directory.library.store.nbytes <= BUDGET
        assert all(name in server.worker._pool for name in server.donors)
    assert reused > 500
