"""A word that two prompts have in common behind a shared text does not hide other donors."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcmas.methods.gathering import EDGE, gather
from kvcmas.workflow.matching import Match, Source

from ..engines.tiny import random_ids
from .team import DOCUMENT, OTHER_ROLE, ROLE, Team


def test_the_first_agent_stays_a_donor(device: torch.device) -> None:
    team = Team("fullshared", device)
    word, judge = random_ids(2, 7), random_ids(30, 8)
    team.ask([*ROLE, *DOCUMENT, 5, 6, 7, 8, 9], "planner", tokens=1)
    team.score([*OTHER_ROLE, *DOCUMENT, *word, 11, 12, 13], "analyst", dial="exact")
    prompt = team.prompt([*judge, *DOCUMENT, *word, 14, 15, 16], "judge")
    (run,) = team.library.find(prompt).runs
    assert (run.start, run.stop) == (len(judge), len(judge) + len(DOCUMENT))
    assert [source.info.agent for source in run.sources] == ["analyst", "planner"]
    for source in run.sources:
        ids = team.library.kv(source.segment).token_ids.tolist()
        assert ids[source.offset : source.offset + len(run)] == DOCUMENT


EDGES = st.lists(st.integers(0, 1), min_size=EDGE, max_size=EDGE)


@given(EDGES, EDGES, st.lists(st.tuples(EDGES, EDGES), max_size=3))
def test_all_holders_have_the_whole_run(
    before: list[int], behind: list[int], others: list[tuple[list[int], list[int]]]
) -> None:
    core = list(range(10, 10 + 6 * EDGE))
    prompt = np.array([3, *before, *core, *behind, 4])
    match = Match(1, len(prompt) - 1, (Source("whole", 1),))
    texts = [prompt, *(np.array([*one, *core, *two]) for one, two in others)]
    holders = [
        (Source(str(number), int(np.flatnonzero(text == core[0])[0])), text)
        for number, text in enumerate(texts)
    ]
    found = gather(match, prompt, holders)
    assert match.start <= found.start <= match.start + EDGE
    assert match.stop - EDGE <= found.stop <= match.stop
    run = prompt[found.start : found.stop].tolist()
    for source, (_, text) in zip(found.sources, holders, strict=True):
        assert text[source.offset : source.offset + len(run)].tolist() == run
    if not others:
        assert (found.start, found.stop) == (match.start, match.stop)
