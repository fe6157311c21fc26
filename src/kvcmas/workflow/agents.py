"""An agent: a role, a task, and whose answers it reads."""

from __future__ import annotations

from dataclasses import dataclass

from kvcmas.errors import WorkflowError


@dataclass(frozen=True, slots=True)
class Agent:
    """One member of a workflow.

    name: unique in its workflow; introduces its answers in the prompts of its readers.
    role: system prompt; empty for none.
    task: closes every prompt of this agent; empty for none.
    reads: agents whose answers it reads in the same round (they speak before it) and of all
        earlier rounds.
    recalls: agents whose answers it reads of earlier rounds only, so that later speakers can be
        listed. It always recalls its own.
    max_tokens: longest answer; `None` leaves it to whoever runs the workflow.

    Raises:
        WorkflowError: an unusable name or `max_tokens`, the agent reads itself, or a name is
            listed twice.
    """

    name: str
    role: str = ""
    task: str = ""
    reads: tuple[str, ...] = ()
    recalls: tuple[str, ...] = ()
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.strip() or not self.name.isprintable():
            raise WorkflowError(
                f"agent name {self.name!r}: expected printable text on one line, not empty and "
                "without spaces around it; choose another name"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise WorkflowError(
                f"agent {self.name!r}: max_tokens is {self.max_tokens}, expected at least 1; "
                "leave it out to use the default"
            )
        if self.name in self.reads:
            raise WorkflowError(
                f"agent {self.name!r}: reads lists the agent itself; remove it (an agent sees its "
                "own answers of earlier rounds anyway)"
            )
        for field, names in (("reads", self.reads), ("recalls", self.recalls)):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise WorkflowError(
                    f"agent {self.name!r}: {field} lists {twice[0]!r} more than once; list each "
                    "agent once"
                )
