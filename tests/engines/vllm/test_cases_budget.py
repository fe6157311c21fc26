"""Case 37: always new mixes of the same documents, in a budget that cannot hold them all."""

from __future__ import annotations

import random

import pytest

from .fake_requests import coordinator, ids, request
from .served import ROLE, clean, serve

DOCUMENTS = [ids(700 + number, 60) for number in range(14)]
MIXES = 500


def test_500_mixes_keep_the_budget_and_a_steady_hit_rate() -> None:
    budget = 3000  # bytes, and tokens: 14 mixes of 210 tokens
    side = coordinator(device_bytes=budget, host_bytes=0)
    store = side.directory.library.store
    draw = random.Random(0)
    shares = []
    for number in range(MIXES):
        chosen = draw.sample(DOCUMENTS, 3)
        agent = draw.choice(sorted(ROLE))
        tokens = [*ROLE[agent], *(token for text in chosen for token in text), *ids(number, 10)]
        record, _ = serve(side, request(f"m{number}", tokens, agent))
        assert min(record.computed, record.reused, record.cached) >= 0
        assert record.computed + record.reused + record.cached == len(tokens)
        assert store.nbytes <= budget
        store.check_integrity()
        shares.append(record.reused / len(tokens))
    assert clean(side)
    early, late = (sum(part) / len(part) for part in (shares[50:275], shares[275:]))
    assert early > 0.4
    assert late == pytest.approx(early, abs=0.05)
