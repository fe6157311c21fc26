"""Running workflows: order, prompts, events, limits, and what is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch

from kvcmas.engines.runner import (
    Event,
    TokenGenerated,
    Totals,
    TurnFinished,
    TurnStarted,
    WorkflowRun,
    check_turns,
    run_workflow,
)
from kvcmas.engines.transformers import (
    Cancellation,
    RenderedChat,
    RequestRecord,
    SamplingParams,
    SpanRecord,
    TransformersEngine,
    model_info,
    render_chat,
)
from kvcmas.engines.transformers.chat import PLAIN_TEMPLATE, Message
from kvcmas.errors import CancelledError, PromptError, WorkflowError
from kvcmas.methods import create
from kvcmas.workflow.agents import Agent
from kvcmas.workflow.prompt import Prompt
from kvcmas.workflow.topologies import chain
from kvcmas.workflow.workflow import Workflow

from .small_files import chat_tokenizer
from .tiny import tiny_model

AGENTS = (Agent("planner", "You plan.", "Plan.", max_tokens=3), Agent("judge", task="Judge."))
PARAMS = SamplingParams(max_tokens=5)


def team(rounds: int = 2) -> Workflow:
    return chain(AGENTS, rounds)


@dataclass(frozen=True)
class FakeAnswer:
    text: str
    record: RequestRecord
    finish_reason: str = "eos"


@dataclass
class FakeEngine:
    """Answers each prompt with its number, in two tokens."""

    prompts: list[Prompt] = field(default_factory=list)
    params: list[SamplingParams | None] = field(default_factory=list)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_token: Callable[[int, str], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> FakeAnswer:
        if cancel is not None:
            cancel.check()
        self.prompts.append(prompt)
        self.params.append(params)
        text = f"answer {len(self.prompts)}"
        if on_token is not None:
            on_token(1, "answer")
            on_token(2, f" {len(self.prompts)}")
        return FakeAnswer(text, record_of(prompt))


def record_of(prompt: Prompt) -> RequestRecord:
    spans = (
        SpanRecord(start=0, stop=4, kind="compute", computed=4, reused=0),
        SpanRecord(
            start=4, stop=len(prompt), kind="reuse", computed=3, reused=1, head=2, landmarks=1
        ),
    )
    return RequestRecord(
        request_id=prompt.request_id,
        agent=prompt.agent,
        method="fake",
        prompt=len(prompt),
        computed=7,
        reused=len(prompt) - 7,
        generated=2,
        passes=1,
        exact=False,
        spans=spans,
        notes=(),
        **dict.fromkeys(("ttft_s", "match_s", "correct_s", "forward_s"), 0.25),
        **dict.fromkeys(("other_s", "decode_s", "finish_s"), 0.0),
        total_s=0.5,
    )


def run_fake(
    engine: FakeEngine, workflow: Workflow | None = None, **options: object
) -> WorkflowRun:
    options = {"params": PARAMS, "context": "The text.", **options}
    return run_workflow(engine, chat_tokenizer(), workflow or team(), **options)  # type: ignore[arg-type]


def test_turns_events_and_record() -> None:
    engine, events = FakeEngine(), list[Event]()
    run = run_fake(engine, on_event=events.append, tenant="acme", dial="strict")
    turns = [(1, "planner"), (1, "judge"), (2, "planner"), (2, "judge")]
    assert [(turn.round, turn.agent) for turn in run.turns] == turns
    assert [turn.text for turn in run.turns] == [f"answer {i}" for i in (1, 2, 3, 4)]
    assert events == [
        event
        for number, (turn, (round_number, agent)) in enumerate(zip(run.turns, turns, strict=True))
        for event in (
            TurnStarted(agent, round_number, len(engine.prompts[number])),
            TokenGenerated(agent, "answer"),
            TokenGenerated(agent, f" {number + 1}"),
            TurnFinished(agent, round_number, turn.record, turn.text),
        )
    ]
    assert [prompt.agent for prompt in engine.prompts] == [agent for _, agent in turns]
    assert {(prompt.tenant, prompt.dial) for prompt in engine.prompts} == {("acme", "strict")}
    assert len({prompt.request_id for prompt in engine.prompts}) == 4
    assert WorkflowRun.model_validate_json(run.model_dump_json()) == run
    assert (run.workflow, run.rounds, run.notes) == ("chain", 2, ())


def test_prompts_hold_what_was_answered_before() -> None:
    engine, tokenizer = FakeEngine(), chat_tokenizer()
    run_fake(engine)
    judge = tokenizer.decode(engine.prompts[1].token_ids.tolist())
    assert judge.count("The text.") == 1
    assert "planner (round 1):\nanswer 1" in judge
    expected = render_chat(
        tokenizer,
        team().messages(
            "planner", 2, "The text.", {(1, "planner"): "answer 1", (1, "judge"): "answer 2"}
        ),
    )
    assert np.array_equal(engine.prompts[2].token_ids, expected.ids)


def test_an_agent_has_its_own_longest_answer() -> None:
    engine = FakeEngine()
    run_fake(engine, params=SamplingParams(max_tokens=5, temperature=0.5, seed=3))
    assert engine.params[:2] == [
        SamplingParams(max_tokens=3, temperature=0.5, seed=3),
        SamplingParams(max_tokens=5, temperature=0.5, seed=3),
    ]


def test_the_workflows_own_context_is_the_default() -> None:
    workflow = chain(AGENTS, 2, context=["First.", "Second."])
    engine, tokenizer = FakeEngine(), chat_tokenizer()
    run_fake(engine, workflow, context=None)
    texts = [tokenizer.decode(prompt.token_ids.tolist()) for prompt in engine.prompts]
    assert ["First." in text for text in texts] == [True] * 4
    assert ["Second." in text for text in texts] == [False, False, True, True]
    run_fake(engine, workflow, context="Other.")
    assert "Other." in tokenizer.decode(engine.prompts[4].token_ids.tolist())


def test_totals() -> None:
    run = run_fake(FakeEngine())
    prompts = sum(turn.record.prompt for turn in run.turns)
    assert run.totals == Totals(
        turns=4,
        prompt=prompts,
        computed=28,
        reused=prompts - 28,
        head=8,
        landmarks=4,
        generated=8,
        ttft_s=1.0,
        total_s=2.0,
    )
    assert Totals.of(run.of_agent("judge")).turns == 2
    assert Totals.of(()) == Totals()


def test_render_and_its_notes() -> None:
    def render(messages: Sequence[Message]) -> RenderedChat:
        return RenderedChat(np.arange(9, dtype=np.int64), "", ("merged", f"{len(messages)}"))

    engine = FakeEngine()
    run = run_fake(engine, render=render)
    assert [len(prompt) for prompt in engine.prompts] == [9] * 4
    assert run.notes == ("merged", "2", "1")


@pytest.mark.parametrize(
    ("workflow", "context", "message"),
    [
        (chain(AGENTS, 1), ["a", "b"], "2 parts"),
        (chain((Agent("mute"),)), "", "'mute' in round 1 is empty"),
    ],
)
def test_faults_of_a_workflow_show_before_any_run(
    workflow: Workflow, context: str | list[str], message: str
) -> None:
    engine = FakeEngine()
    with pytest.raises(WorkflowError, match=message):
        run_fake(engine, workflow, context=context)
    with pytest.raises(WorkflowError, match=message):
        check_turns(workflow, context)
    assert engine.prompts == []


def test_errors_name_the_turn() -> None:
    with pytest.raises(PromptError, match=r"agent 'planner' in round 1: .*no chat template"):
        run_workflow(FakeEngine(), chat_tokenizer(None), team(), context="x", params=PARAMS)


def test_cancel() -> None:
    cancel, engine = Cancellation(), FakeEngine()

    def stop(event: Event) -> None:
        if isinstance(event, TurnFinished):
            cancel.cancel()

    with pytest.raises(CancelledError):
        run_fake(engine, cancel=cancel, on_event=stop)
    assert len(engine.prompts) == 1


@pytest.mark.parametrize("method", ["nonshared", "fullshared"])
def test_a_team_on_a_real_engine(method: str) -> None:
    model, tokenizer = tiny_model("llama", torch.device("cpu")), chat_tokenizer()
    engine = TransformersEngine(model, tokenizer, create(method, model_info(model)))
    events: list[Event] = []
    run = run_workflow(
        engine,
        tokenizer,
        team(),
        context="A document that everybody reads, long enough to be worth sharing. " * 2,
        params=SamplingParams(max_tokens=4, ignore_eos=True),
        on_event=events.append,
        render=partial(render_chat, tokenizer, template=PLAIN_TEMPLATE),
    )
    for turn in run.turns:
        assert turn.record.computed + turn.record.reused == turn.record.prompt
        assert turn.record.method == method
    assert [turn.record.generated for turn in run.turns] == [3, 4, 3, 4]
    pieces = "".join(event.piece for event in events if isinstance(event, TokenGenerated))
    assert pieces == "".join(turn.text for turn in run.turns)
    # Blind reuse takes the document from the planner; without sharing the judge computes it.
    assert (run.turns[1].record.reused > 100) == (method == "fullshared")
    assert run.turns[2].record.reused > 100
