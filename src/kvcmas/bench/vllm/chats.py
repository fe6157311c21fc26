"""The unchanged chat client, text by text, until kvcmas has learned from its traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvcmas.bench.stats import ratio
from kvcmas.bench.steps import Report, silent
from kvcmas.bench.vllm.latencies import REUSING

Row = Mapping[str, Any]
Talk = Callable[[str], Sequence[Row]]
"""Has the client talk about a text at one server: a row for each answer, as `chat.talk` gives."""


def converse(
    talks: Mapping[str, Talk], texts: Sequence[str], report: Report = silent
) -> dict[str, Any]:
    """Talk about texts at `kvcmas` until all later agents reuse, or none is left.

    The other servers get the first text, so that they know the agents' own prompts, and the last
    one: a server with a prefix cache alone learns nothing from texts in between.

    talks: by name of the server; one is `kvcmas`.

    Returns:
        figures of the last text, by server: the cached share of all prompts, and of the first turns
        of all agents but the first; how many texts there were, whether reuse has shown (1 or 0),
        and the rows of all that was said.
    """
    rows: list[dict[str, Any]] = []
    last: dict[str, Sequence[Row]] = {name: () for name in talks}
    reusing = False
    report("chat client", 0, len(texts))
    for number, text in enumerate(texts, 1):
        found = {"kvcmas": talks["kvcmas"](text)}
        reusing = _all_reuse(first_turns(found["kvcmas"]))
        ended = reusing or number == len(texts)
        if ended or number == 1:
            found |= {name: talk(text) for name, talk in talks.items() if name != "kvcmas"}
        rows += [
            {"server": name, "text": number, **row} for name, said in found.items() for row in said
        ]
        report("chat client", number, len(texts))
        if ended:
            last = found
            break
    shares = {f"chat_cached_share_{name}": cached_share(found) for name, found in last.items()}
    firsts = {
        f"chat_first_turn_cached_share_{name}": cached_share(first_turns(found))
        for name, found in last.items()
    }
    count = max((row["text"] for row in rows), default=0)
    return {
        **shares,
        **firsts,
        "chat_texts": count,
        "chat_reusing": int(reusing),
        "chat_rows": rows,
    }


def first_turns(rows: Sequence[Row]) -> list[Row]:
    """First turns of all agents but the one that speaks first: what they share is others' text."""
    return [row for row in rows if row["turn"] == 1 and row["agent"] != rows[0]["agent"]]


def cached_share(rows: Sequence[Row]) -> float:
    """Share of the prompts' tokens that were cached; NaN of nothing."""
    return ratio(sum(row["cached"] for row in rows), sum(row["prompt"] for row in rows))


def _all_reuse(rows: Iterable[Row]) -> bool:
    shares = [row["cached"] > REUSING * row["prompt"] for row in rows]
    return bool(shares) and all(shares)
