"""`kvcmas serve` beside vLLM's own server: TTFT of readers, of plain requests, and a chat client.

Both servers run side by side; one request is under way at a time, and they take turns request by
request, so that whatever else the machine does meets both. Nothing is asked while the server
behind the last answer still keeps and learns: `_PAUSE_S` is left for it.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvcmas.bench.roles import Role
from kvcmas.bench.stats import median, ratio
from kvcmas.bench.vllm.client import Client, Messages, Timed
from kvcmas.bench.vllm.job import Job
from kvcmas.bench.vllm.servers import NAME, both
from kvcmas.bench.vllm.texts import Texts, padded_chat

Workflow = Literal["context", "chain"]

_PAUSE_S = 0.3
_ANSWER = 8
_CHAIN_ANSWER = 48  # long enough that a later reader reuses it
_REUSING = 0.5  # share of its prompt that a reader must be spared before anything is measured
_OVERHEAD_WORDS = (300, 500)
_NOTHING = {"reuse": False}


@dataclass(frozen=True, slots=True)
class ReaderRow:
    """One reader's request at both servers; bound: a plain prompt of as many computed tokens."""

    workflow: Workflow
    context: int
    agent: str
    kvcmas: Timed
    vllm: Timed
    bound_s: float | None


def run(job: Job) -> dict[str, Any]:
    """All of it."""
    plain, ours = both(job.settings.model, job.folder)
    with ExitStack() as stack:
        for number, server in enumerate((plain, ours)):
            job.report("starting servers", number, 2)
            stack.enter_context(server)
            server.ready()
        job.report("starting servers", 2, 2)
        bench = ServingBench(job, Client(plain.url), Client(ours.url))
        found = bench.run()
        found |= _chat(job, bench.texts, {"vllm": plain.url, "kvcmas": ours.url})
    return found


class ServingBench:
    """Two servers, one team."""

    def __init__(self, job: Job, plain: Client, ours: Client) -> None:
        from transformers import AutoTokenizer

        settings = job.settings
        self._job, self._plain, self._ours = job, plain, ours
        self.texts = Texts(settings, AutoTokenizer.from_pretrained(settings.model))
        self._draw = random.Random(settings.seed)
        count = settings.warm_contexts + settings.served_contexts + settings.chain_contexts
        self._contexts = self.texts.joined(settings.served_tokens, count)
        self._frame = _frame_tokens(self.texts.tokenizer)
        self._turn = 0

    def run(self) -> dict[str, Any]:
        """Warm up, then measure readers, then plain requests."""
        settings = self._job.settings
        warmed = self._warm(settings.warm_contexts)
        rows = self._read("context", settings.warm_contexts, settings.served_contexts)
        later = settings.warm_contexts + settings.served_contexts
        chain = self._read("chain", later, settings.chain_contexts)
        # Last, so that random words are not what the team's corrections are fitted to.
        overhead = self._overhead(settings.overhead_pairs)
        return {
            **overhead,
            **reader_figures(rows, "reader"),
            **reader_figures(chain, "chain_reader"),
            "bound_ratio": bound_ratio(rows),
            "bound_ttft_s": median(row.bound_s for row in rows if row.bound_s is not None),
            "warm_contexts": warmed,
            "serving_rows": [asdict(row) for row in (*rows, *chain)],
        }

    # plain requests ----------------------------------------------------------------------------

    def _overhead(self, pairs: int) -> dict[str, Any]:
        """New random text each time: nothing to match, at either server."""
        ours: list[float] = []
        plain: list[float] = []
        self._job.report("idle overhead", 0, pairs)
        for number in range(-2, pairs):  # the first two are for warming up
            length = self._draw.randint(*_OVERHEAD_WORDS)
            one, two = (padded_chat(self.texts.words(self._draw, length)) for _ in range(2))
            served = self._in_turn(one, two, _ANSWER)
            if number >= 0:
                ours.append(served[0].ttft_s)
                plain.append(served[1].ttft_s)
                self._job.report("idle overhead", number + 1, pairs)
        return overhead_figures(ours, plain)

    # readers -----------------------------------------------------------------------------------

    def _warm(self, most: int) -> int:
        """Have the team read contexts at kvcmas until every reader is spared most of one."""
        self._job.report("learning", 0, most)
        for number in range(most):
            messages = [self._messages(role, self._contexts[number]) for role in self.texts.roles]
            served = [self._ours.ask(one, _ANSWER) for one in messages]
            time.sleep(_PAUSE_S)
            self._job.report("learning", number + 1, most)
            if all(one.cached > _REUSING * one.prompt for one in served[1:]):
                return number + 1
        return most

    def _read(self, workflow: Workflow, first: int, count: int) -> list[ReaderRow]:
        rows: list[ReaderRow] = []
        phase = f"reading, {workflow}"
        self._job.report(phase, 0, count)
        for number in range(first, first + count):
            rows += self._read_one(workflow, number)
            self._job.report(phase, number + 1 - first, count)
        return rows

    def _read_one(self, workflow: Workflow, number: int) -> list[ReaderRow]:
        """All agents; those behind the first are readers."""
        rows: list[ReaderRow] = []
        earlier: list[tuple[Role, str]] = []
        tokens = _CHAIN_ANSWER if workflow == "chain" else _ANSWER
        for index, role in enumerate(self.texts.roles):
            said = earlier if workflow == "chain" else []
            messages = self._messages(role, self._contexts[number], said)
            ours, plain = self._in_turn(messages, messages, tokens)
            # The same answer goes on at both, so that their prompts stay the same.
            earlier.append((role, plain.text))
            if index:
                bound = self._bound(ours.computed) if workflow == "context" else None
                rows.append(ReaderRow(workflow, number, role.name, ours, plain, bound))
        return rows

    def _bound(self, computed: int) -> float | None:
        """TTFT of a plain request of as many tokens as were computed, at the same server."""
        words = computed - self._frame
        if words < 2:
            return None
        chat = padded_chat(self.texts.words(self._draw, words))
        served = self._ours.ask(chat, _ANSWER, _NOTHING)
        time.sleep(_PAUSE_S)
        return served.ttft_s

    def _messages(
        self, role: Role, text: str, earlier: list[tuple[Role, str]] | None = None
    ) -> Messages:
        said = "".join(f"\n\n{other.name}: {words}" for other, words in earlier or [])
        return [
            {"role": "system", "content": role.system},
            {"role": "user", "content": f"{text}{said}\n\n{role.task}"},
        ]

    def _in_turn(self, ours: Messages, plain: Messages, tokens: int) -> tuple[Timed, Timed]:
        """Ask both, the other one first every other time; answers in the order of arguments."""
        self._turn += 1
        order = [(self._ours, ours), (self._plain, plain)]
        found: dict[Client, Timed] = {}
        for client, messages in order if self._turn % 2 else reversed(order):
            found[client] = client.ask(messages, tokens)
            time.sleep(_PAUSE_S)
        return found[self._ours], found[self._plain]


def overhead_figures(ours: list[float], plain: list[float]) -> dict[str, Any]:
    """The median over pairs of the ratio of TTFTs, less 1, and both medians."""
    pairs = list(zip(ours, plain, strict=True))
    return {
        "idle_overhead": median(ratio(one, other) for one, other in pairs) - 1,
        "idle_overhead_of_medians": ratio(median(ours), median(plain)) - 1,
        "idle_ttft_s": median(ours),
        "idle_ttft_s_vllm": median(plain),
        "idle_pairs": len(pairs),
    }


def reader_figures(rows: list[ReaderRow], prefix: str) -> dict[str, Any]:
    """Medians over readers' requests, and which share of their prompts went through the model."""
    ours, plain = (median(getattr(row, name).ttft_s for row in rows) for name in ("kvcmas", "vllm"))
    shares = {
        name: ratio(
            sum(getattr(row, name).computed for row in rows),
            sum(getattr(row, name).prompt for row in rows),
        )
        for name in ("kvcmas", "vllm")
    }
    return {
        f"{prefix}_ttft_ratio": ratio(ours, plain),
        f"{prefix}_ttft_s": ours,
        f"{prefix}_ttft_s_vllm": plain,
        f"{prefix}_computed_share": shares["kvcmas"],
        f"{prefix}_computed_share_vllm": shares["vllm"],
        f"{prefix}_requests": len(rows),
    }


def bound_ratio(rows: list[ReaderRow]) -> float:
    """Median TTFT of readers over that of plain requests of their computed length."""
    timed = [row for row in rows if row.bound_s is not None]
    return ratio(
        median(row.kvcmas.ttft_s for row in timed),
        median(row.bound_s for row in timed if row.bound_s is not None),
    )


def _frame_tokens(tokenizer: Any) -> int:
    """Tokens that the chat template adds around two messages of plain words."""
    messages = padded_chat(" the the the the")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return len(ids) - 4


def _chat(job: Job, texts: Texts, urls: dict[str, str]) -> dict[str, Any]:
    """The unchanged client at both servers, on a text that neither has seen."""
    from kvcmas.bench.vllm.chat import talk

    settings = job.settings
    text = texts.words(random.Random(settings.seed + 1), settings.served_tokens // 2).strip()
    found: dict[str, Any] = {}
    job.report("chat client", 0, len(urls))
    for number, (name, url) in enumerate(urls.items(), 1):
        rows = talk(url, NAME, text)
        found[f"chat_cached_share_{name}"] = ratio(
            sum(row["cached"] for row in rows), sum(row["prompt"] for row in rows)
        )
        found[f"chat_rows_{name}"] = rows
        job.report("chat client", number, len(urls))
    return found
