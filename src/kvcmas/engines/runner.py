"""Runs a workflow on an engine: turn by turn, each agent's answer joins the prompts behind it.

    for each turn    messages (workflow) > token ids (chat template) > generate (engine)
    events           TurnStarted, TokenGenerated for each token, TurnFinished

The runner knows no method: what a turn reuses is between the engine and its method, which see
the agent's name in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, Self
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from kvcmas.engines.transformers.cancel import Cancellation
from kvcmas.engines.transformers.chat import Message, RenderedChat, render_chat
from kvcmas.engines.transformers.record import RequestRecord
from kvcmas.engines.transformers.sampling import SamplingParams
from kvcmas.errors import PromptError
from kvcmas.workflow.prompt import Prompt
from kvcmas.workflow.workflow import Turn, Workflow

RUN_VERSION: Literal[1] = 1


class Answer(Protocol):
    """What the runner needs of an engine's result."""

    @property
    def text(self) -> str:
        """The answer, without special tokens."""

    @property
    def finish_reason(self) -> str:
        """`"eos"`, `"stop"` or `"length"`."""

    @property
    def record(self) -> RequestRecord:
        """What the request computed and reused."""


class Engine(Protocol):
    """What the runner needs of an engine; `TransformersEngine` is one."""

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_token: Callable[[int, str], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> Answer:
        """Answer a prompt; `on_token` gets each token and the text that it makes certain."""


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """An agent's prompt is rendered and goes to the engine; `prompt_tokens` is its length."""

    agent: str
    round: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TokenGenerated:
    """A token was sampled. `piece`: the text that became certain with it, possibly none.

    The pieces of a turn join to its text.
    """

    agent: str
    piece: str


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """An agent has answered."""

    agent: str
    round: int
    record: RequestRecord
    text: str


Event = TurnStarted | TokenGenerated | TurnFinished
Render = Callable[[Sequence[Message]], RenderedChat]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TurnResult(_Model):
    """One turn of a run.

    finish_reason: `"eos"`, `"stop"` (a stop string) or `"length"` (cut at its longest).
    """

    round: int
    agent: str
    text: str
    finish_reason: str
    record: RequestRecord


class Totals(_Model):
    """Sums over turns; lengths in tokens, times in seconds.

    head, landmarks: computed tokens at the front of reused spans, and single ones inside them;
        both are part of `computed`.
    """

    turns: int = 0
    prompt: int = 0
    computed: int = 0
    reused: int = 0
    head: int = 0
    landmarks: int = 0
    generated: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0

    @classmethod
    def of(cls, turns: Sequence[TurnResult]) -> Self:
        """Add up turns: all of a run, or those of one agent."""
        records = [turn.record for turn in turns]
        return cls(
            turns=len(turns),
            prompt=sum(record.prompt for record in records),
            computed=sum(record.computed for record in records),
            reused=sum(record.reused for record in records),
            head=sum(head_tokens(record) for record in records),
            landmarks=sum(landmark_tokens(record) for record in records),
            generated=sum(record.generated for record in records),
            ttft_s=sum(record.ttft_s for record in records),
            total_s=sum(record.total_s for record in records),
        )


class WorkflowRun(_Model):
    """What a workflow did; JSON both ways (`model_dump_json`, `model_validate_json`).

    turns: in the order in which they were taken.
    notes: what rendering changed, in words, each once.
    """

    version: Literal[1] = RUN_VERSION
    workflow: str
    rounds: int
    turns: tuple[TurnResult, ...]
    totals: Totals
    notes: tuple[str, ...] = ()

    def of_agent(self, agent: str) -> tuple[TurnResult, ...]:
        """The turns of one agent."""
        return tuple(turn for turn in self.turns if turn.agent == agent)


def head_tokens(record: RequestRecord) -> int:
    """Tokens that a request computed at the front of reused spans."""
    return sum(span.head for span in record.spans)


def landmark_tokens(record: RequestRecord) -> int:
    """Single tokens that a request computed inside reused spans."""
    return sum(span.landmarks for span in record.spans)


def check_turns(workflow: Workflow, context: str | Sequence[str] | None = None) -> None:
    """Lay out every prompt with stand-ins for the answers, so that a fault shows before any run.

    Args:
        context: as in `run_workflow`.

    Raises:
        WorkflowError: more context parts than rounds, or a turn with nothing to say.
    """
    parts = workflow.context if context is None else context
    turns = list(workflow.turns())
    answers = {(turn.round, turn.agent): "..." for turn in turns}
    for turn in turns:
        workflow.messages(turn.agent, turn.round, parts, answers)


def run_workflow(
    engine: Engine,
    tokenizer: Any,
    workflow: Workflow,
    *,
    context: str | Sequence[str] | None = None,
    params: SamplingParams,
    on_event: Callable[[Event], None] | None = None,
    tenant: str = "",
    dial: str | None = None,
    render: Render | None = None,
    cancel: Cancellation | None = None,
) -> WorkflowRun:
    """Run all turns of a workflow.

    Args:
        tokenizer: of the engine's model; renders the chats unless `render` does.
        context: shared text, or one text for each round; `None` takes the workflow's own.
        params: for every turn; an agent's own `max_tokens` takes the place of theirs.
        on_event: called with each event; an exception of its own ends the run.
        tenant, dial: for every prompt (see `Prompt`).
        render: makes token ids of messages; by default the model's chat template, as
            `partial(render_chat, tokenizer)` does.
        cancel: stops the run from another thread.

    Raises:
        WorkflowError: more context parts than rounds, or a turn with nothing to say; before any
            compute.
        PromptError: a chat cannot be rendered or is too long for the model; names the turn.
        CancelledError: `cancel` was used.
    """
    check_turns(workflow, context)
    parts = workflow.context if context is None else context
    tell = on_event or _ignore
    make_ids = render or partial(render_chat, tokenizer)
    run_id = uuid4().hex
    outputs: dict[tuple[int, str], str] = {}
    turns: list[TurnResult] = []
    notes: dict[str, None] = {}
    for turn in workflow.turns():
        messages = workflow.messages(turn.agent, turn.round, parts, outputs)
        try:
            rendered = make_ids(messages)
            notes |= dict.fromkeys(rendered.notes)
            tell(TurnStarted(turn.agent, turn.round, len(rendered.ids)))
            prompt = Prompt(rendered.ids, turn.agent, f"{run_id}-{len(turns)}", tenant, dial)
            answer = engine.generate(
                prompt,
                _params_of(workflow, turn, params),
                on_token=_token_teller(turn, tell),
                cancel=cancel,
            )
        except PromptError as error:
            raise PromptError(f"agent {turn.agent!r} in round {turn.round}: {error}") from error
        outputs[turn.round, turn.agent] = answer.text
        turns.append(
            TurnResult(
                round=turn.round,
                agent=turn.agent,
                text=answer.text,
                finish_reason=answer.finish_reason,
                record=answer.record,
            )
        )
        tell(TurnFinished(turn.agent, turn.round, answer.record, answer.text))
    return WorkflowRun(
        workflow=workflow.name,
        rounds=workflow.rounds,
        turns=tuple(turns),
        totals=Totals.of(turns),
        notes=tuple(notes),
    )


def _params_of(workflow: Workflow, turn: Turn, params: SamplingParams) -> SamplingParams:
    longest = workflow.agent(turn.agent).max_tokens
    return params if longest is None else replace(params, max_tokens=longest)


def _token_teller(turn: Turn, tell: Callable[[Event], None]) -> Callable[[int, str], None]:
    def on_token(token_id: int, piece: str) -> None:
        tell(TokenGenerated(turn.agent, piece))

    return on_token


def _ignore(event: Event) -> None:
    """Nobody listens."""
