"""The learning thread: order, bounds, failures, and the engine's inference mode."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch._C import set_num_threads

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.vllm.lessons import LearningError, LearningThread
from kvcmas.engines.vllm.messages import Lesson, StepWork
from kvcmas.methods.kvcmas.pair import Pair

from ...methods.kvcmas_team import document, prompt_of
from ..tiny import random_ids
from .rank import ROLE, Rank, dense_kv, source_of

CPU = torch.device("cpu")


@pytest.fixture
def thread() -> Iterator[LearningThread]:
    made = LearningThread(100, CPU)
    yield made
    made.close()


class Gate:
    """A task that runs until it is let go."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(60)


def learning_threads() -> int:
    return sum(thread.name == "kvcmas-learning" for thread in threading.enumerate())


class TestThread:
    def test_starts_with_the_first_task(self) -> None:
        before = learning_threads()
        thread = LearningThread(100, CPU)
        assert thread.drain(0)
        assert learning_threads() == before
        thread.submit(lambda: None)
        assert learning_threads() == before + 1
        thread.close()
        assert learning_threads() == before

    def test_a_task_that_runs_when_the_program_ends_is_finished(self) -> None:
        script = (
            "import torch, time\n"
            "from kvcmas.engines.vllm.lessons import LearningThread\n"
            "def learn():\n"
            "    for _ in range(200): torch.randn(300, 300) @ torch.randn(300, 300)\n"
            "    print('finished')\n"
            "LearningThread(1, torch.device('cpu')).submit(learn)\n"
            "time.sleep(0.05)\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "finished\n", "")

    def test_keeps_the_order(self, thread: LearningThread) -> None:
        done: list[int] = []
        for number in range(50):
            thread.submit(partial(done.append, number))
        assert thread.drain(60)
        assert done == list(range(50))

    def test_drain_waits_for_the_task_that_runs(self, thread: LearningThread) -> None:
        gate = Gate()
        thread.submit(gate)
        assert gate.entered.wait(60)
        assert not thread.drain(0.01)
        gate.opened.set()
        assert thread.drain(60)

    def test_gives_up_the_oldest_when_too_much_waits(self, thread: LearningThread) -> None:
        gate, done = Gate(), list[str]()
        thread.submit(gate, 90)
        assert gate.entered.wait(60)
        thread.submit(partial(done.append, "first"), 60)
        thread.submit(partial(done.append, "no bytes"))
        thread.submit(partial(done.append, "second"), 40)
        assert (thread.nbytes, thread.dropped) == (100, 0)
        thread.submit(partial(done.append, "third"), 30)
        assert (thread.nbytes, thread.dropped) == (70, 1)
        thread.submit(partial(done.append, "too large"), 101)
        assert (thread.nbytes, thread.dropped) == (0, 4)
        thread.submit(partial(done.append, "last"), 1)
        gate.opened.set()
        assert thread.drain(60)
        assert done == ["no bytes", "last"]
        assert thread.nbytes == 0

    def test_a_failure_ends_learning_and_is_told(
        self, thread: LearningThread, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail() -> None:
            raise ValueError("of a test")

        gate, done = Gate(), list[int]()
        thread.submit(gate)
        thread.submit(fail)
        thread.submit(partial(done.append, 1), 10)
        with caplog.at_level(logging.ERROR):
            gate.opened.set()
            with pytest.raises(LearningError, match="of a test"):
                thread.drain(60)
        assert isinstance(thread.failure, ValueError)
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        thread.submit(partial(done.append, 2), 10)
        with pytest.raises(LearningError):
            thread.drain(60)
        assert (done, thread.dropped, thread.nbytes) == ([], 2, 0)

    def test_close_finishes_the_running_task_alone(self) -> None:
        gate, done = Gate(), list[int]()
        thread = LearningThread(100, CPU)
        thread.submit(gate)
        assert gate.entered.wait(60)
        thread.submit(partial(done.append, 1), 10)
        closing = threading.Thread(target=thread.close)
        closing.start()
        gate.opened.set()
        closing.join(60)
        assert not closing.is_alive()
        thread.submit(partial(done.append, 2))
        assert thread.drain(0)
        assert (done, thread.dropped) == ([], 1)
        thread.close()


class TestCores:
    def test_the_thread_computes_on_one_and_changes_nothing_elsewhere(self) -> None:
        before = torch.get_num_threads()
        set_num_threads(2)
        try:
            thread = LearningThread(0, torch.device("cpu"))
            seen: list[int] = []
            thread.submit(lambda: seen.append(torch.get_num_threads()))
            assert thread.drain(5)
            assert (seen, torch.get_num_threads()) == ([1], 2)
            thread.close()
        finally:
            set_num_threads(before)


class TestLessons:
    def test_the_reader_is_copied_when_the_step_ends(self) -> None:
        """Blocks that are reused at once, or a donor that leaves, change nothing."""
        rank, calm = Rank(), Rank()
        calm.teach(5)
        for number in range(5):
            gate = Gate()
            rank.capture(f"a{number}", "a", dense_kv(prompt_of("a", document(number))))
            assert rank.worker.drain(60)
            rank.worker._thread.submit(gate)
            rank.lesson(source_of(f"a{number}"), dense_kv(prompt_of("b", document(number))))
            rank.worker.before_forward(StepWork(drops=[f"a{number}"]))
            gate.opened.set()
            assert rank.worker.drain(60)
        learned = rank.worker.book().correction(Pair("a", "b"))
        expected = calm.worker.book().correction(Pair("a", "b"))
        assert learned is not None
        assert expected is not None
        assert torch.equal(learned.outward, expected.outward)
        assert rank.worker._known.feature_bytes() == 0

    def test_loads_do_not_wait_for_learning(self) -> None:
        rank, gate = Rank(), Gate()
        rank.teach(5)
        expected = rank.load(source_of("a0"))

        def learn() -> None:
            with rank.worker.book()._lock:  # as `observe` holds it
                gate()

        rank.worker._thread.submit(learn)
        assert gate.entered.wait(60)
        assert all(map(torch.equal, rank.load(source_of("a0")), expected))
        assert not gate.opened.is_set()
        gate.opened.set()
        assert rank.worker.drain(60)

    def test_a_full_queue_is_counted(self) -> None:
        rank = Rank()
        rank.capture("a0", "a", dense_kv(prompt_of("a", document(0))))
        assert rank.worker.drain(60)
        rank.worker._thread._limit = 1000
        rank.lesson(source_of("a0"), dense_kv(prompt_of("b", document(0))))
        assert rank.worker.drain(60)
        assert rank.worker.dropped == 1
        assert rank.worker.book().pairs == {}

    def test_failure_leaves_the_rest_working(self) -> None:
        rank = Rank()
        rank.capture("a0", "a", dense_kv(prompt_of("a", document(0))))
        assert rank.worker.drain(60)

        def fail() -> None:
            raise ValueError("of a test")

        rank.worker._thread.submit(fail)
        with pytest.raises(LearningError):
            rank.worker.drain(60)
        assert isinstance(rank.worker.failure, ValueError)
        rank.capture("a1", "a", dense_kv(prompt_of("a", document(1))))
        report = rank.worker.report()
        assert report is not None
        assert report.captured == {"a0": 1, "a1": 1}
        keys, _ = rank.load(source_of("a1"))
        assert torch.equal(keys, rank.fake.held["a1"].keys[:, :, ROLE : ROLE + 100])

    def test_close_is_clean(self) -> None:
        before = learning_threads()
        rank = Rank()
        rank.teach(2)
        assert learning_threads() == before + 1
        rank.worker.close()
        rank.worker.close()
        assert learning_threads() == before
        rank.capture("late", "a", dense_kv(prompt_of("a", document(9))))


class TestInferenceMode:
    """Engines compute in inference mode, whose tensors take no part in training."""

    def test_a_hidden_layer_is_trained(self) -> None:
        learned = [self._learned(inference) for inference in (False, True)]
        for correction in learned:
            assert correction.hidden is not None
        assert torch.equal(learned[0].outward, learned[1].outward)

    @staticmethod
    def _learned(inference: bool):  # type: ignore[no-untyped-def]
        rank = Rank(hidden=8, fit_tokens=5000, own_dim=64)
        generator = torch.Generator().manual_seed(0)
        with torch.inference_mode(inference):
            for number in range(8):
                ids = random_ids(1000, number)
                states = torch.randn(3, 2, 1000, 16, generator=generator)
                values = torch.randn(3, 2, 1000, 16, generator=generator)
                tokens, positions = torch.tensor(ids), torch.arange(1000)[None]
                donor = SegmentKV(states, values, tokens, positions)
                # An absolute value: nothing that a linear map could tell.
                reader = SegmentKV(states, values + values[..., :1].abs(), tokens, positions)
                rank.capture(f"a{number}", "a", donor)
                source = source_of(f"a{number}", start=20, stop=1000)
                blocks = rank.prefill(reader)
                rank.worker.after_forward(StepWork(lessons=[Lesson("", source, True, blocks)]))
                rank.cache.free(blocks)
                rank.load(source)
        assert rank.worker.drain(120)
        correction = rank.worker.book().correction(Pair("a", "b"))
        assert correction is not None
        return correction
