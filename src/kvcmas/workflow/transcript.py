"""What an agent sees: the layout of its prompt.

    system   role
    user     context part 1
             answers of round 1 that it sees
             context part 2
             answers of round 2 that it sees
             ...
             task

Shared text is the same, letter for letter, in every prompt that contains it: a context part as
it was given, an answer as it was written behind one line that names its author and round. Blank
lines stand between the pieces; nothing is ever cut out of a text or searched in it.

Within a round come first the answers that the agent reads, then its own and those that it only
recalls. All before the task therefore only grows: what an agent sees in a round begins with all
that it saw in the round before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvcmas.errors import WorkflowError
from kvcmas.workflow.agents import Agent

Outputs = Mapping[tuple[int, str], str]
"""Answers by (round, name of the agent); rounds count from 1."""

_SEPARATOR = "\n\n"


def context_parts(context: str | Sequence[str], rounds: int) -> tuple[str, ...]:
    """The parts of a shared context, one for each round, at most `rounds`.

    Raises:
        WorkflowError: more parts than rounds, so that some would never be read.
    """
    parts = (context,) if isinstance(context, str) else tuple(context)
    if len(parts) > rounds:
        raise WorkflowError(
            f"the context has {len(parts)} parts, but rounds is {rounds} and each round adds one; "
            f"set rounds to {len(parts)} or join the last parts"
        )
    return parts


def introduction(author: str, round_number: int) -> str:
    """The line before an answer; the same for every reader."""
    return f"{author} (round {round_number}):\n"


def user_content(
    agent: Agent, order: Sequence[str], round_number: int, parts: Sequence[str], outputs: Outputs
) -> str:
    """The text of the user's message.

    Args:
        order: names of all agents in the order in which they speak.
        round_number: from 1.
        parts: see `context_parts`.

    Raises:
        WorkflowError: an answer that the agent sees is missing, or there is nothing to say.
    """
    pieces = [*_seen(agent, order, round_number, parts, outputs), agent.task]
    content = _SEPARATOR.join(piece for piece in pieces if piece)
    if not content:
        raise WorkflowError(
            f"the prompt of agent {agent.name!r} in round {round_number} is empty: no context, no "
            "answers to read, no task; give one of them"
        )
    return content


def _seen(
    agent: Agent, order: Sequence[str], round_number: int, parts: Sequence[str], outputs: Outputs
) -> Iterator[str]:
    """Context parts and introduced answers; empty texts are left out."""
    read = [name for name in order if name in agent.reads]
    recalled = [
        name
        for name in order
        if name not in agent.reads and (name == agent.name or name in agent.recalls)
    ]
    for past in range(1, round_number + 1):
        if past <= len(parts):
            yield parts[past - 1]
        for author in read if past == round_number else read + recalled:
            text = outputs.get((past, author))
            if text is None:
                raise WorkflowError(
                    f"agent {agent.name!r} in round {round_number} reads what {author!r} answered "
                    f"in round {past}, which is missing; run the turns in their order"
                )
            if text:
                yield introduction(author, past) + text
