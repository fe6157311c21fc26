"""The usual shapes of a team, as functions that draw the edges between agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from kvcmas.errors import WorkflowError
from kvcmas.workflow.agents import Agent
from kvcmas.workflow.workflow import Workflow

Edges = tuple[tuple[str, ...], tuple[str, ...]]
"""What one agent reads, and what it recalls."""


def chain(
    agents: Sequence[Agent], rounds: int = 1, name: str = "chain", context: Sequence[str] = ()
) -> Workflow:
    """Each agent reads the one before it; the first recalls what the last one concluded.

    Raises:
        WorkflowError: an agent brings edges of its own, or see `Workflow`.
    """
    return _build(agents, rounds, name, context, _chain_edges)


def star(
    agents: Sequence[Agent], rounds: int = 1, name: str = "star", context: Sequence[str] = ()
) -> Workflow:
    """The first agent is the hub: all others read it, and it recalls all of them.

    Raises:
        WorkflowError: an agent brings edges of its own, or see `Workflow`.
    """
    return _build(agents, rounds, name, context, _star_edges)


def fully_connected(
    agents: Sequence[Agent],
    rounds: int = 1,
    name: str = "fully_connected",
    context: Sequence[str] = (),
) -> Workflow:
    """Each agent reads all before it, and recalls all after it.

    Raises:
        WorkflowError: an agent brings edges of its own, or see `Workflow`.
    """
    return _build(agents, rounds, name, context, _full_edges)


def dag(
    agents: Sequence[Agent], rounds: int = 1, name: str = "dag", context: Sequence[str] = ()
) -> Workflow:
    """Edges as the agents state them.

    Raises:
        WorkflowError: see `Workflow`.
    """
    return Workflow(tuple(agents), rounds, name, tuple(context))


TOPOLOGIES: Final[dict[str, Callable[[Sequence[Agent], int, str, Sequence[str]], Workflow]]] = {
    "chain": chain,
    "star": star,
    "fully_connected": fully_connected,
    "dag": dag,
}
"""Topologies by the name that workflow files use."""


def _build(
    agents: Sequence[Agent],
    rounds: int,
    name: str,
    context: Sequence[str],
    edges: Callable[[Sequence[str], int], Edges],
) -> Workflow:
    for agent in agents:
        if agent.reads or agent.recalls:
            field = "reads" if agent.reads else "recalls"
            raise WorkflowError(
                f"agent {agent.name!r}: {field} is given, but the topology draws the edges; "
                "remove it, or use the topology dag"
            )
    names = [agent.name for agent in agents]
    drawn = []
    for place, agent in enumerate(agents):
        reads, recalls = edges(names, place)
        drawn.append(replace(agent, reads=reads, recalls=recalls))
    return dag(drawn, rounds, name, context)


def _chain_edges(names: Sequence[str], place: int) -> Edges:
    if place:
        return (names[place - 1],), ()
    return (), tuple(names[1:][-1:])


def _star_edges(names: Sequence[str], place: int) -> Edges:
    return ((names[0],), ()) if place else ((), tuple(names[1:]))


def _full_edges(names: Sequence[str], place: int) -> Edges:
    return tuple(names[:place]), tuple(names[place + 1 :])
