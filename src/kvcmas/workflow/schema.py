"""The format of workflow files, and its errors in plain words.

name: report-team            # optional
topology: chain              # chain, star, fully_connected, or dag (default: reads are stated)
rounds: 3                    # optional, 1
context: text                # optional: a text, or a list with one text for each round
agents:
  - name: planner
    role: You are ...        # system prompt, optional
    task: Write ...          # closes each prompt, optional
    max_tokens: 64           # optional
    reads: [other]           # dag only
    recalls: [other]         # dag only; `all` for everybody
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from kvcmas.errors import WorkflowError
from kvcmas.workflow.agents import Agent
from kvcmas.workflow.topologies import TOPOLOGIES
from kvcmas.workflow.workflow import Workflow, suggestion

_SHOWN_CHARACTERS: Final = 60
_EXPECTED: Final = {
    "name": "a name",
    "topology": f"one of {', '.join(TOPOLOGIES)}",
    "rounds": "a whole number of at least 1",
    "context": "a text or a list of texts",
    "agents": "a list of at least one agent",
    "role": "text",
    "task": "text",
    "max_tokens": "a whole number of at least 1",
    "reads": "a list of names",
    "recalls": "a list of names or the word all",
}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class AgentSchema(_Model):
    """One entry of `agents`."""

    name: str
    role: str = ""
    task: str = ""
    max_tokens: int | None = Field(default=None, ge=1)
    reads: list[str] = []
    recalls: list[str] | Literal["all"] = []


class WorkflowSchema(_Model):
    """A whole file."""

    name: str = "workflow"
    topology: Literal["chain", "star", "fully_connected", "dag"] = "dag"
    rounds: int = Field(default=1, ge=1)
    context: str | list[str] = []
    agents: list[AgentSchema] = Field(min_length=1)


def workflow_from_data(data: object, source: str) -> Workflow:
    """Check plain data (as parsed from YAML) and build the workflow.

    Args:
        source: where the data comes from; begins every message.

    Raises:
        WorkflowError: names source, field, what was given, what was expected, and the fix.
    """
    if not isinstance(data, Mapping):
        raise WorkflowError(
            f"{source}: expected a mapping with the key 'agents', got {_shown(data)}"
        )
    try:
        schema = WorkflowSchema.model_validate(data)
    except ValidationError as error:
        raise WorkflowError(f"{source}: {_explain(error)}") from error
    try:
        return _build(schema)
    except WorkflowError as error:
        raise WorkflowError(f"{source}: {error}") from error


def _build(schema: WorkflowSchema) -> Workflow:
    names = [agent.name for agent in schema.agents]
    agents = [
        Agent(
            name=entry.name,
            role=entry.role,
            task=entry.task,
            reads=tuple(entry.reads),
            recalls=tuple(
                (name for name in names if name != entry.name)
                if entry.recalls == "all"
                else entry.recalls
            ),
            max_tokens=entry.max_tokens,
        )
        for entry in schema.agents
    ]
    context = [schema.context] if isinstance(schema.context, str) else schema.context
    return TOPOLOGIES[schema.topology](agents, schema.rounds, schema.name, context)


def _explain(error: ValidationError) -> str:
    """One fault for each field, in words."""
    faults: dict[str, str] = {}
    for details in error.errors(include_url=False):
        steps = _steps(details["loc"])
        faults.setdefault(_place(steps), _fault(details, steps))
    # The fault of one entry of a list says more than that of the list.
    places = [
        place
        for place in faults
        if not any(other.startswith(f"{place}[") for other in faults if other != place)
    ]
    return "; ".join(f"{place}: {faults[place]}" for place in places)


def _steps(location: tuple[str | int, ...]) -> list[str | int]:
    """The path to a value, without the labels of the alternatives that were tried on it."""
    return [
        step
        for step in location
        if isinstance(step, int) or not (step == "str" or step.startswith(("list[", "literal[")))
    ]


def _place(steps: list[str | int]) -> str:
    """`agents[1].reads[0]` for `["agents", 1, "reads", 0]`."""
    text = ""
    for step in steps:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _fault(details: ErrorDetails, steps: list[str | int]) -> str:
    kind, last = details["type"], steps[-1]
    if kind == "extra_forbidden":
        model = AgentSchema if len(steps) > 1 else WorkflowSchema
        return f"unknown key; {suggestion(str(last), model.model_fields)}"
    if kind == "invalid_key":
        return "unknown key; keys are text"
    if kind == "missing":
        return f"is missing; add {_EXPECTED[str(last)]}"
    given = details["input"]
    if isinstance(last, int):
        expected = "a mapping with a name" if steps[0] == "agents" and len(steps) == 2 else "text"
    else:
        expected = _EXPECTED[last]
    text = f"got {_shown(given)}, expected {expected}"
    if last == "topology":
        return f"{text}; {suggestion(str(given), TOPOLOGIES)}"
    if isinstance(given, bool | int | float) and kind == "string_type":
        return f"{text}; put it in quotes"
    if isinstance(given, str) and kind in ("list_type", "literal_error"):
        return f"{text}; write [{given}]"
    return text


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
