"""`kvcmas serve` beside vLLM's own server: TTFT of readers, of plain requests, and a chat client.

Both servers run side by side; one request is under way at a time, and which of them is asked first
is drawn anew each time, so that whatever else the machine does meets both. Nothing is asked while
the server behind the last answer still keeps and learns: `_PAUSE_S` is left for it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from kvcmas.bench.roles import Role
from kvcmas.bench.vllm.chats import converse
from kvcmas.bench.vllm.client import Client, Messages, Timed
from kvcmas.bench.vllm.job import Job
from kvcmas.bench.vllm.latencies import (
    ReaderRow,
    Workflow,
    bound_figures,
    overhead_figures,
    reader_figures,
    reused,
)
from kvcmas.bench.vllm.servers import NAME, both
from kvcmas.bench.vllm.texts import Texts

_PAUSE_S = 0.3
_ANSWER = 2  # tokens: the first one is what is timed
_CHAIN_ANSWER = 48  # long enough that a later reader reuses it
_CHAT_ANSWER = 8
_OVERHEAD_TOKENS = (320, 520)
_NOTHING = {"reuse": False}


def run(job: Job) -> dict[str, Any]:
    """All of it."""
    began = time.perf_counter()
    plain, ours = both(job.settings.model, job.folder)
    with ExitStack() as stack:
        servers = [stack.enter_context(server) for server in (plain, ours)]
        job.report("starting servers", 0, len(servers))
        for number, server in enumerate(servers, 1):
            server.ready()
            job.report("starting servers", number, len(servers))
        bench = ServingBench(job, Client(plain.url), Client(ours.url))
        bench.lap("start", began)
        found = bench.run()
        found |= bench.chat({"kvcmas": ours.url, "vllm": plain.url})
    return {**found, "serving_seconds": bench.laps}


class ServingBench:
    """Two servers, one team.

    pause_s: left to a server behind each answer.
    laps: name and seconds of what was done.
    """

    def __init__(
        self,
        job: Job,
        plain: Client,
        ours: Client,
        texts: Texts | None = None,
        pause_s: float = _PAUSE_S,
    ) -> None:
        settings = job.settings
        self._job, self._plain, self._ours = job, plain, ours
        self._pause_s = pause_s
        self.texts = _texts(job) if texts is None else texts
        self.laps: list[tuple[str, float]] = []
        self._draw = random.Random(settings.seed)
        count = settings.warm_contexts + settings.served_contexts + settings.chain_contexts
        self._contexts, self._left = self.texts.joined(settings.served_tokens, count)

    def lap(self, name: str, began: float) -> None:
        """Note how long something took."""
        self.laps.append((name, round(time.perf_counter() - began, 1)))

    def run(self) -> dict[str, Any]:
        """Warm up, then measure readers, then plain requests."""
        settings = self._job.settings
        warmed = self._warm(settings.warm_contexts)
        rows = self._read("context", settings.warm_contexts, settings.served_contexts)
        later = settings.warm_contexts + settings.served_contexts
        chain = self._read("chain", later, settings.chain_contexts)
        # Behind the readers, so that random words are not what corrections are fitted to.
        overhead = self._overhead(settings.overhead_pairs)
        # What nobody has read yet is for the chat client.
        self._left = [*self._contexts[warmed : settings.warm_contexts], *self._left]
        return {
            **overhead,
            **reader_figures(rows, "reader"),
            **reader_figures(chain, "chain_reader"),
            **bound_figures(rows),
            "warm_contexts": warmed,
            "serving_rows": [asdict(row) for row in (*rows, *chain)],
        }

    def chat(self, urls: Mapping[str, str]) -> dict[str, Any]:
        """The unchanged client, see `converse`, on texts that neither server has seen."""
        from kvcmas.bench.vllm.chat import talk

        began = time.perf_counter()
        talks = {name: partial(talk, url, NAME, tokens=_CHAT_ANSWER) for name, url in urls.items()}
        texts = self._left[: self._job.settings.chat_texts]
        found = converse(talks, texts, self._job.report)
        self.lap("chat", began)
        return found

    # plain requests ----------------------------------------------------------------------------

    def _overhead(self, pairs: int) -> dict[str, Any]:
        """New random text for each pair: nothing to match, at either server."""
        began = time.perf_counter()
        ours: list[float] = []
        plain: list[float] = []
        self._job.report("idle overhead", 0, pairs)
        for number in range(-2, pairs):  # the first two are for warming up
            length = self._draw.randint(*_OVERHEAD_TOKENS)
            chat = self.texts.random_chat(self._draw, length)
            served = self._in_turn(chat, _ANSWER)
            if number >= 0:
                ours.append(served[0].ttft_s)
                plain.append(served[1].ttft_s)
                self._job.report("idle overhead", number + 1, pairs)
        self.lap("overhead", began)
        return overhead_figures(ours, plain)

    # readers -----------------------------------------------------------------------------------

    def _warm(self, most: int) -> int:
        """Have the team read contexts at kvcmas until every reader is spared most of one."""
        began = time.perf_counter()
        count = most
        self._job.report("learning", 0, most)
        for number in range(most):
            messages = [self._messages(role, self._contexts[number]) for role in self.texts.roles]
            served = [self._ours.ask(one, _ANSWER) for one in messages]
            time.sleep(self._pause_s)
            self._job.report("learning", number + 1, most)
            if all(reused(one) for one in served[1:]):
                count = number + 1
                break
        self.lap("learning", began)
        return count

    def _read(self, workflow: Workflow, first: int, count: int) -> list[ReaderRow]:
        began = time.perf_counter()
        rows: list[ReaderRow] = []
        phase = f"reading, {workflow}"
        self._job.report(phase, 0, count)
        for number in range(first, first + count):
            rows += self._read_one(workflow, number)
            self._job.report(phase, number + 1 - first, count)
        self.lap(phase, began)
        return rows

    def _read_one(self, workflow: Workflow, number: int) -> list[ReaderRow]:
        """All agents; those behind the first are readers."""
        rows: list[ReaderRow] = []
        earlier: list[tuple[Role, str]] = []
        chain = workflow == "chain"
        for index, role in enumerate(self.texts.roles):
            last = index + 1 == len(self.texts.roles)
            messages = self._messages(role, self._contexts[number], earlier if chain else [])
            ours, plain, bound = self._in_turn(
                messages,
                _CHAIN_ANSWER if chain and not last else _ANSWER,
                bounded=bool(index) and not chain,
            )
            # The same answer goes on at both, so that their prompts stay the same.
            earlier.append((role, plain.text))
            if index:
                rows.append(ReaderRow(workflow, number, role.name, ours, plain, bound))
        return rows

    def _bound(self, computed: int) -> Timed | None:
        """A plain request of as many tokens as were computed, at the same server."""
        length, served = computed, None
        # Once more, should the server's template or its prefix cache make it another number.
        for _ in range(2):
            if length < self.texts.least_chat:
                break
            chat = self.texts.random_chat(self._draw, length)
            served = self._ask(self._ours, chat, _ANSWER, _NOTHING)
            if served.computed == computed:
                break
            length += computed - served.computed
        return served

    def _messages(
        self, role: Role, text: str, earlier: list[tuple[Role, str]] | None = None
    ) -> Messages:
        said = "".join(f"\n\n{other.name}: {words}" for other, words in earlier or [])
        return [
            {"role": "system", "content": role.system},
            {"role": "user", "content": f"{text}{said}\n\n{role.task}"},
        ]

    def _in_turn(
        self, messages: Messages, tokens: int, *, bounded: bool = False
    ) -> tuple[Timed, Timed, Timed | None]:
        """Ask both, in random order: kvcmas's answer, vLLM's, and the plain one behind kvcmas's."""
        plain = None
        if self._draw.random() < 0.5:
            plain = self._ask(self._plain, messages, tokens)
        ours = self._ask(self._ours, messages, tokens)
        bound = self._bound(ours.computed) if bounded else None
        if plain is None:
            plain = self._ask(self._plain, messages, tokens)
        return ours, plain, bound

    def _ask(
        self,
        client: Client,
        messages: Messages,
        tokens: int,
        hints: Mapping[str, Any] | None = None,
    ) -> Timed:
        served = client.ask(messages, tokens, hints)
        time.sleep(self._pause_s)
        return served


def _texts(job: Job) -> Texts:
    from transformers import AutoTokenizer

    return Texts(job.settings, AutoTokenizer.from_pretrained(job.settings.model))
