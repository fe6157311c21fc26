"""A workflow: agents, who reads whom, and how many rounds they speak."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvcmas.errors import WorkflowError
from kvcmas.workflow.agents import Agent
from kvcmas.workflow.transcript import Outputs, context_parts, user_content


@dataclass(frozen=True, slots=True)
class Turn:
    """`agent` speaks in `round` (from 1)."""

    round: int
    agent: str


@dataclass(frozen=True, slots=True)
class Workflow:
    """Agents that read one shared context and each other.

    Edges (`Agent.reads`) form an acyclic graph. In every round each agent speaks once, after all
    that it reads; agents that wait for nobody speak in the order in which they are listed. So in
    round r an agent sees

    - the first r parts of the shared context,
    - of rounds 1 to r, the answers of the agents that it reads,
    - of rounds 1 to r - 1, also its own answers and those of the agents that it recalls.

    See `transcript.py` for the layout of a prompt.

    context: a default for whoever runs the workflow; one part for each round, at most `rounds`.

    Raises:
        WorkflowError: no agents, two of one name, an edge to an unknown agent, a cycle (its path
            is named), `rounds` below 1, or more context parts than rounds.
    """

    agents: tuple[Agent, ...]
    rounds: int = 1
    name: str = "workflow"
    context: tuple[str, ...] = ()
    order: tuple[str, ...] = field(init=False, compare=False)
    """Names of the agents in the order in which they speak."""

    def __post_init__(self) -> None:
        if not self.agents:
            raise WorkflowError(f"{self.name}: agents is empty, expected at least one agent")
        if self.rounds < 1:
            raise WorkflowError(f"{self.name}: rounds is {self.rounds}, expected at least 1")
        context_parts(self.context, self.rounds)
        names = [agent.name for agent in self.agents]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise WorkflowError(
                f"{self.name}: two agents are named {twice!r}; give each a name of its own"
            )
        for agent in self.agents:
            _check_known(agent, "reads", agent.reads, names)
            _check_known(agent, "recalls", agent.recalls, names)
        object.__setattr__(self, "order", _speaking_order(self.agents))

    def agent(self, name: str) -> Agent:
        """The agent of that name.

        Raises:
            WorkflowError: there is none.
        """
        for agent in self.agents:
            if agent.name == name:
                return agent
        names = [agent.name for agent in self.agents]
        raise WorkflowError(f"{self.name} has no agent {name!r}; {suggestion(name, names)}")

    def turns(self) -> Iterator[Turn]:
        """All turns, in an order in which everything that a turn reads comes before it."""
        for number in range(1, self.rounds + 1):
            for name in self.order:
                yield Turn(number, name)

    def messages(
        self, agent: str, round_number: int, context: str | Sequence[str], outputs: Outputs
    ) -> list[dict[str, str]]:
        """The chat messages of one turn: the role as system prompt (if any), then one user turn.

        Args:
            context: shared text, or one text for each round; pass `workflow.context` for its own.
            outputs: answers up to now, by (round, agent); more than the agent sees do not matter.

        Raises:
            WorkflowError: an unknown agent or round, too many context parts, a missing answer,
                or an empty prompt.
        """
        speaker = self.agent(agent)
        if not 1 <= round_number <= self.rounds:
            raise WorkflowError(
                f"{self.name}: round {round_number} does not exist; rounds are 1 to {self.rounds}"
            )
        parts = context_parts(context, self.rounds)
        content = user_content(speaker, self.order, round_number, parts, outputs)
        system = [{"role": "system", "content": speaker.role}] if speaker.role else []
        return [*system, {"role": "user", "content": content}]


def suggestion(given: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for a near name, otherwise all known names."""
    names = list(known)
    near = difflib.get_close_matches(given, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known are {', '.join(names)}" if names else "none is known"


def _check_known(agent: Agent, where: str, listed: Sequence[str], names: Sequence[str]) -> None:
    for name in listed:
        if name not in names:
            others = [other for other in names if other != agent.name]
            raise WorkflowError(
                f"agent {agent.name!r}: {where} lists {name!r}, which is no agent of this "
                f"workflow; {suggestion(name, others)}"
            )


def _speaking_order(agents: Sequence[Agent]) -> tuple[str, ...]:
    """Topological order; of several that could speak next, the one listed first."""
    order: list[str] = []
    waiting = list(agents)
    while waiting:
        ready = next((a for a in waiting if all(name in order for name in a.reads)), None)
        if ready is None:
            path = _cycle(waiting)
            raise WorkflowError(
                f"the agents read each other in a cycle: {' reads '.join(path)}; remove one of "
                "these from reads, or move it to recalls to read answers of earlier rounds"
            )
        order.append(ready.name)
        waiting.remove(ready)
    return tuple(order)


def _cycle(waiting: Sequence[Agent]) -> list[str]:
    """A cycle among agents of which each reads at least one other of them."""
    names = {agent.name: agent for agent in waiting}
    path = [waiting[0].name]
    while True:
        following = next(name for name in names[path[-1]].reads if name in names)
        if following in path:
            return [*path[path.index(following) :], following]
        path.append(following)
