"""A worker whose KV are words about where it comes from. It checks whatever it is told to do."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

from kvcmas.engines.vllm.messages import (
    Capture,
    Facts,
    Lesson,
    Load,
    Measure,
    PairName,
    Report,
    Scores,
    StepWork,
    Sums,
)

from .fake_requests import BLOCK, FakeRequest
from .simulated_blocks import Blocks, Content, exact_kv


@dataclass(frozen=True)
class Row:
    """Positions `[start, stop)` of a request that a step computes."""

    request: FakeRequest
    start: int
    stop: int


@dataclass(frozen=True)
class Donor:
    """What the worker holds of a segment."""

    tenant: str
    agent: str
    start: int
    kv: list[Content]


class Worker:
    """Does a step's work.

    fails, refuses: shares of loads and captures that do not succeed. disagrees: of measurements.
    """

    def __init__(
        self,
        blocks: Blocks,
        draw: random.Random,
        fails: float,
        refuses: float,
        disagrees: float,
    ) -> None:
        self.blocks = blocks
        self.donors: dict[str, Donor] = {}
        self.requests: dict[str, FakeRequest] = {}
        self.counts: Counter[str] = Counter()
        self.failed_blocks: dict[str, int] = {}
        self._draw = draw
        self._fails, self._refuses, self._disagrees = fails, refuses, disagrees
        self._seen: Counter[PairName] = Counter()
        self._refused: set[str] = set()

    def step(self, work: StepWork, rows: list[Row]) -> Report:
        """Drops, loads, the forward pass, and what comes behind it."""
        report = Report()
        self.failed_blocks = {}
        for segment in work.drops:
            self.donors.pop(segment, None)
        for load in work.loads:
            self._load(load, report)
        for row in rows:
            # What stands behind a bad block is of no use, and is computed again.
            bad = self.failed_blocks.get(row.request.request_id)
            self._compute(row, row.stop if bad is None else min(row.stop, bad * BLOCK))
        for measure in work.measures:
            if measure.request_id not in report.failed:
                self._measure(measure, report)
        for capture in work.captures:
            self._capture(capture, report)
        for lesson in work.lessons:
            self._learn(lesson, report)
        return report

    def _load(self, load: Load, report: Report) -> None:
        source = load.source
        assert load.block_ids == tuple(self.blocks.tables[load.request_id])
        first = source.start // BLOCK
        touched = load.block_ids[first : -(-source.stop // BLOCK)]
        unlucky = self._draw.random() < self._fails and not self.blocks.shared(touched)
        if unlucky or (source.segment not in self.donors and source.segment in self._refused):
            report.failed.add(load.request_id)
            self.failed_blocks.setdefault(load.request_id, first)
            self.counts["failed"] += 1
            return
        donor = self.donors[source.segment]
        request = self.requests[load.request_id]
        assert donor.tenant == source.tenant == (request.cache_salt or "")
        for position in range(source.start, source.stop):
            there = source.offset + position - source.start
            kv = donor.kv[there]
            assert kv.token == request.all_token_ids[position]
            assert not kv.moved
            if donor.start + there != position or source.corrected:
                kv = Content(True, kv.tenant, kv.token, (kv, source.reader, source.corrected))
            self.blocks.write(load.block_ids, position, kv)
        self.counts["loaded"] += len(source)

    def _compute(self, row: Row, stop: int) -> None:
        if stop <= row.start:
            return
        request = row.request
        table = self.blocks.tables[request.request_id]
        behind = 0
        for position, kv in enumerate(self.blocks.read(table, 0, row.start)):
            assert kv is not None, f"{request.request_id}: {position} is not in place"
            assert kv.token == request.all_token_ids[position]
            assert kv.tenant == (request.cache_salt or "")
            behind = hash((behind, kv))
        for position in range(row.start, stop):
            token = request.all_token_ids[position]
            kv = Content(False, request.cache_salt or "", token, behind)
            behind = hash((behind, kv))
            self.blocks.write(table, position, kv)
        self.counts["computed"] += stop - row.start

    def _measure(self, measure: Measure, report: Report) -> None:
        source = measure.source
        held = self.blocks.read(measure.block_ids, source.start, source.stop)
        donor = self.donors[source.segment]
        theirs = donor.kv[source.offset : source.offset + len(source)]
        for kv, other in zip(held, theirs, strict=True):
            assert kv is not None and not kv.moved
            assert (kv.token, kv.tenant) == (other.token, other.tenant)
        disagrees = self._draw.random() < self._disagrees
        error = self._draw.choice([0.25, float("nan")]) if disagrees else 1e-4
        sums = Sums(np.array([error]), np.ones(1))
        report.deviations[measure.request_id, measure.span, source.stop] = sums
        self.counts["measured"] += 1

    def _capture(self, capture: Capture, report: Report) -> None:
        kv: list[Content] = []
        request = self.requests[capture.request_id]
        for place in self.blocks.read(capture.block_ids, capture.start, capture.stop):
            assert place is not None and not place.moved
            assert place.tenant == capture.tenant == (request.cache_salt or "")
            kv.append(place)
        assert [place.token for place in kv] == capture.token_ids.tolist()
        if capture.exact:
            tokens = request.all_token_ids[: capture.stop]
            assert kv == exact_kv(capture.tenant, tokens)[capture.start :]
        if capture.continues is not None and capture.continues not in self._refused:
            older = self.donors.pop(capture.continues)
            assert (older.start, older.tenant) == (capture.start, capture.tenant)
            assert older.kv == kv[: capture.kept] and capture.kept == len(older.kv)
            self.counts["continued"] += 1
        if self._draw.random() < self._refuses:
            report.refused[capture.segment] = "no room"
            self._refused.add(capture.segment)
            return
        assert capture.segment not in self.donors
        self.donors[capture.segment] = Donor(capture.tenant, capture.agent, capture.start, kv)
        report.captured[capture.segment] = 1
        self.counts["captured"] += 1

    def _learn(self, lesson: Lesson, report: Report) -> None:
        source = lesson.source
        request = self.requests[lesson.request_id]
        tokens = request.all_token_ids[: source.stop]
        exact = exact_kv(source.tenant, tokens)[source.start :]
        assert self.blocks.read(lesson.block_ids, source.start, source.stop) == exact
        donor = self.donors.get(source.segment)
        if donor is None:
            return  # it was continued in this very step
        theirs = donor.kv[source.offset : source.offset + len(source)]
        assert [kv.token for kv in theirs] == tokens[source.start :]
        pair = PairName(source.tenant, donor.agent, source.reader)
        self._seen[pair] += len(source)
        seen = self._seen[pair]
        report.facts[0, pair] = Facts(seen, version=seen // 200, audits=1, audited=0.05)
        base = np.array([self._draw.random() for _ in donor.kv], dtype=np.float32)
        report.scores[0, pair, source.segment] = Scores(base, 0.1, 0.0)
        self.counts["learned"] += 1
