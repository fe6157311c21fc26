"""Random traffic through the coordinator, step by step, against a worker that checks it all."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvcmas.engines.vllm.coordinator import Coordinator
from kvcmas.engines.vllm.metric_names import EVENT_COUNT
from kvcmas.engines.vllm.tally import Tally

from .fake_requests import Clock, FakeRequest, coordinator, ids, request
from .simulated_engine import Engine

ROLES = {name: ids(seed, 20) for seed, name in enumerate(("planner", "critic", "author"))}
DOCUMENTS = [ids(100 + size, size) for size in (30, 45, 64, 90, 150, 300)]


class Traffic:
    """Agents of two tenants that read the same documents, and go on with their conversations."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._count = 0
        self._past: dict[tuple[str, str], FakeRequest] = {}

    def next(self) -> FakeRequest:
        """A request."""
        draw, self._count = self._draw, self._count + 1
        agent, tenant = draw.choice(list(ROLES)), draw.choice(["", "", "salt"])
        task = ids(10_000 + draw.randrange(1000), draw.randint(1, 40))
        past = self._past.get((agent, tenant))
        if past is not None and past.num_tokens < 600 and draw.random() < 0.3:
            tokens = past.all_token_ids + task
        else:
            documents = draw.sample(DOCUMENTS, draw.randint(0, 3))
            tokens = [*ROLES[agent], *(token for one in documents for token in one), *task]
        more = {}
        if draw.random() < 0.15:
            more = draw.choice([{"dial": "exact"}, {"reuse": False}, {"warm": True}])
        made = request(f"r{self._count}", tokens, agent, cache_salt=tenant or None, **more)
        self._past[agent, tenant] = made
        return made


def serve(engine: Engine, clock: Clock, draw: random.Random, requests: int) -> None:
    """Requests come at random moments, some leave early."""
    traffic = Traffic(draw)
    steps = idle = 0
    while engine.busy or requests:
        if requests and draw.random() < 0.4:
            for _ in range(draw.randint(1, min(3, requests))):
                engine.add(traffic.next(), draw.randint(1, 30))
                requests -= 1
        open_requests = [*engine.waiting, *engine.running]
        if open_requests and draw.random() < 0.02:
            engine.abort(draw.choice(open_requests))
        before = dict(engine.worker.counts)
        engine.step()
        clock.now += 0.3
        steps, idle = steps + 1, idle + 1 if before == engine.worker.counts else 0
        assert idle < 100, "nothing happens any more"


def check_end(engine: Engine) -> None:
    """Nothing is left behind, and both sides hold the same donors."""
    side = engine.coordinator
    directory = side.directory
    for _ in range(3):
        engine.step()  # whatever left is dropped one step later
    directory.library.check_integrity()
    assert directory.library.pinned() == 0
    assert not side.requests and not side._held and not side._prefilled
    assert len(side.planning.inflight) == 0 and not engine.blocks.tables
    held = {info.id: info for info in directory.library.store.infos()}
    assert engine.worker.donors.keys() == held.keys() == directory._tokens.keys()
    for name, donor in engine.worker.donors.items():
        content = directory.library.content(name)
        assert [kv.token for kv in donor.kv] == content.tokens().tolist()
        assert donor.start == held[name].start and donor.tenant == held[name].tenant
    assert {segment for _, segment in directory.mirror._scores} <= held.keys()


TAKEN_BACK = {"ahead": "take back", "disagrees": 0.15, "requests": 150}
SETTINGS = {
    "roomy": {"rows": 64, "budget": 2000, "blocks": 2000},
    "small budget": {"budget": 50},
    "few rows": {"rows": 4, "budget": 1000},
    "few blocks": {"blocks": 130},
    "late reports": {"delay": 1},
    "loads fail": {"fails": 0.4},
    "captures refused": {"refuses": 0.3},
    "taken back": {**TAKEN_BACK, "requests": 300, "rows": 64, "budget": 2000, "blocks": 2000},
    "taken back, few rows": {**TAKEN_BACK, "rows": 5, "budget": 300},
    "taken back, few blocks": {**TAKEN_BACK, "blocks": 130, "fails": 0.05},
    "trusted": {"ahead": "trust", "delay": 1, "disagrees": 0.1, "requests": 250},
    "all at once": {
        "rows": 5,
        "blocks": 150,
        "budget": 100,
        "delay": 1,
        "fails": 0.05,
        "refuses": 0.1,
    },
}


def _events(side: Coordinator, name: str) -> float:
    assert isinstance(side.stats, Tally)
    counts: dict[str, float] = side.stats.data.get(EVENT_COUNT.name, {})
    return counts.get(name, 0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SETTINGS)
def test_every_token_comes_from_where_it_may(name: str, seed: int) -> None:
    draw, clock = random.Random(seed), Clock()
    side = coordinator(
        method={"limit": 64, "audit": 0.05, "cold_tokens": 40},
        clock=clock,
        device_bytes=1200,
        host_bytes=0,
        wait_s=3.0,
    )
    settings = dict(SETTINGS[name])
    requests = settings.pop("requests", 45)
    side.ahead = settings.pop("ahead", "never")
    engine = Engine(side, draw, **settings)
    serve(engine, clock, draw, requests)
    check_end(engine)
    assert len(engine.records) == requests
    total: Counter[str] = Counter()
    for record in engine.records.values():
        total.update(computed=record.computed, reused=record.reused, cached=record.cached)
    assert total["reused"] > 0 and total["cached"] > 0
    counts = engine.worker.counts
    assert counts["measured"] > 0 and counts["captured"] > 10
    if name == "few blocks":
        assert engine.preempted > 0
    if name == "taken back":
        assert _events(side, "taken_back") > 0
    if name == "trusted":
        assert any(
            "for granted" in note
            for one in engine.records.values()
            for span in one.spans
            for note in span.notes
        )
    if name == "loads fail":
        assert counts["failed"] > 0
