"""What is checked of vLLM before anything of it is relied on."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from kvcmas.errors import UnsupportedError

pytest.importorskip("vllm")

from kvcmas.engines.vllm import compat

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.33.1", "0.32.0+cpu", "0.33.0rc1"])
def test_versions_that_were_looked_at(version: str) -> None:
    compat.check_version(version)


def test_the_installed_one_is_known() -> None:
    compat.check_version()


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.32.0", "dev", "", "0.3x"])
def test_others_are_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(UnsupportedError, match=r"tested with .*0\.32\.0.*found") as error:
        compat.check_version(version)
    assert version in str(error.value) and "install a known version" in str(error.value)


def test_the_real_scheduler_is_as_expected() -> None:
    assert compat.scheduler_problems() == []
    assert compat.scheduler_problems(compat.AsyncScheduler) == []


class Other(compat.Scheduler):
    """A scheduler whose budgets are cut elsewhere."""

    def _reserve_prefill_lookahead(self, request: Any, tokens: int) -> int:
        return tokens


class Reordered(compat.Scheduler):
    """A scheduler that asks the connector before it caps running requests."""

    def schedule(self, throttle_prefills: bool = False) -> Any:
        token_budget = self.max_num_scheduled_tokens
        self.connector.get_num_new_matched_tokens(None, 0)
        return self._reserve_prefill_lookahead(None, 0, token_budget)


class Strict(compat.Scheduler):
    """A scheduler that fails over rows that it does not know."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        raise KeyError(scheduler_output)


def test_a_changed_signature_is_named() -> None:
    (problem,) = compat.scheduler_problems(Other)
    assert "_reserve_prefill_lookahead" in problem and "['self', 'request', 'tokens']" in problem


def test_a_changed_order_is_named() -> None:
    (problem,) = compat.scheduler_problems(Reordered)
    assert "Scheduler.schedule does not call" in problem and "max_num_active_reqs" in problem


def test_unknown_rows_that_are_not_skipped_are_named() -> None:
    (problem, other) = compat.scheduler_problems(Strict)
    assert "sampled tokens" in other
    assert "no longer skips rows" in problem


def test_a_missing_method_is_named() -> None:
    class Empty:
        """Nothing at all."""

    problems = compat.scheduler_problems(Empty)
    assert "Scheduler._preempt_request is missing" in problems and len(problems) == 5


def test_the_order_is_that_of_the_source() -> None:
    # Where this fails, the rest of the module has to be looked at again.
    assert "num_running >= self.max_num_active_reqs" in inspect.getsource(compat.Scheduler.schedule)
