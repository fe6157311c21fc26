"""A scheduler that ignores the cap: the start-up self-test turns holes off, reuse stays right."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from .engine import NEAR, PLANNER, Server, serving, text

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

EXACT = {"reuse": False}


class _Heard(logging.Filter):
    """A filter, because vLLM takes handlers away when it sets up its log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self.lines.append(record.getMessage())
        return True


@pytest.fixture(scope="module")
def heard() -> Iterator[list[str]]:
    heard, log = _Heard(), logging.getLogger("vllm.kvcmas")
    log.addFilter(heard)
    yield heard.lines
    log.removeFilter(heard)


@pytest.fixture(scope="module")
def server(heard: list[str]) -> Iterator[Server]:
    pytest.importorskip("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from kvcmas.engines.vllm.scheduler import KvcmasScheduler

        def ignoring(self: Any, request: Any, position: int, tokens: int) -> int:
            return tokens

        broken: Any = type("Broken", (KvcmasScheduler,), {"_reserve_prefill_lookahead": ignoring})
        with serving({"method": {"learn": False}}, scheduler=broken, holes=False) as one:
            yield one


def test_holes_are_off_and_the_log_says_why(server: Server, heard: list[str]) -> None:
    assert not server.coordinator.holes
    (line,) = [one for one in heard if "prefills with holes are off" in one]
    assert "40 of 176 positions are not as planned" in line


def test_one_run_is_reused_and_right(server: Server) -> None:
    ids = server.chat(PLANNER, text(0), "Write a plan.")
    free = server.free_blocks
    plain = server.one(ids, hints=EXACT)
    server.forget_blocks()
    reused = server.one(ids)
    assert reused.record.reused > len(ids) // 2
    assert reused.record.computed + reused.record.reused == len(ids)
    assert server.scheduled == reused.record.computed + len(reused.ids) - 1
    assert plain.difference(reused) <= NEAR
    server.forget_blocks()
    assert plain.difference(server.one(ids, hints=EXACT)) == 0.0
    server.check_idle(free)
