"""The thread in which a worker learns, off the path of any request."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import set_num_threads

from kvcmas.errors import KvcmasError

_log = logging.getLogger(__name__)


class LearningError(KvcmasError):
    """Learning failed and has stopped; what was learned before stays in use."""


@dataclass(frozen=True, eq=False)
class _Task:
    run: Callable[[], None]
    nbytes: int
    stream: Any  # the CUDA stream of whoever submitted it, or None


class LearningThread:
    """Runs tasks one by one in the order in which they came. Started by the first of them.

    Tasks that hold KV state its bytes; when those waiting hold more than `limit`, the oldest of
    them is given up and counted. Tasks without any are never given up.

    On a CUDA device tasks run in the stream of the thread that submits them: what either writes,
    the other then sees, without copies or waiting; their kernels share the device in turn.

    A task that raises ends learning: it is logged once, told by `failure` and `drain`, and
    further tasks are given up. Serving goes on with what was learned before.

    Args:
        limit: most bytes of KV that wait.
        device: where tasks compute.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.failure: Exception | None = None
        self.dropped = 0
        self._limit = limit
        self._device = device
        self._waiting: deque[_Task] = deque()
        self._nbytes = 0
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes of the KV that waits."""
        return self._nbytes

    def submit(self, run: Callable[[], None], nbytes: int = 0) -> None:
        """Have `run` called in the thread; after `close`, nothing happens."""
        cuda = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if cuda else None
        with self._changed:
            if self._closed:
                return
            if self.failure is not None:
                self.dropped += bool(nbytes)
                return
            self._waiting.append(_Task(run, nbytes, stream))
            self._nbytes += nbytes
            self._shrink()
            if self._thread is None:
                self._thread = self._started()
                # A thread that is still inside torch when the interpreter ends aborts the process.
                atexit.register(self.close)
            self._changed.notify_all()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to learn; false when `timeout` seconds were not enough.

        Raises:
            LearningError: a task failed.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)
            failure = self.failure
        if failure is not None:
            raise LearningError(f"learning stopped: {failure!r}") from failure
        return done

    def give_up(self) -> None:
        """Forget what waits, and let what runs end."""
        with self._changed:
            self._clear()
            self._changed.wait_for(lambda: not self._busy)

    def close(self) -> None:
        """End the thread: the task that runs is finished, the others are given up."""
        with self._changed:
            self._closed = True
            self._clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        atexit.unregister(self.close)

    def _started(self) -> threading.Thread:
        """The thread, which computes on one core.

        With more it would have an OpenMP team of its own. Two teams are more threads than cores,
        so that no team's threads spin any more: every small operation of the engine would wait
        for sleeping threads and take several times as long, also when nothing is learned. (vLLM
        on CPUs puts a function that does nothing in place of `torch.set_num_threads`.)
        """
        ready = threading.Event()

        def work() -> None:
            torch.get_num_threads()  # what is set before a thread has asked once is lost
            set_num_threads(1)
            ready.set()
            self._work()

        threads = torch.get_num_threads()
        thread = threading.Thread(target=work, name="kvcmas-learning", daemon=True)
        thread.start()
        ready.wait()
        set_num_threads(threads)  # of this thread, and of those to come
        return thread

    def _shrink(self) -> None:
        while self._nbytes > self._limit:
            oldest = next(task for task in self._waiting if task.nbytes)
            self._waiting.remove(oldest)
            self._nbytes -= oldest.nbytes
            self.dropped += 1

    def _clear(self) -> None:
        self.dropped += sum(bool(task.nbytes) for task in self._waiting)
        self._waiting.clear()
        self._nbytes = 0

    def _work(self) -> None:
        while (task := self._next()) is not None:
            failure: Exception | None = None
            try:
                with self._stream(task):
                    task.run()
            except Exception as error:
                # Kept, not hidden: requests must not die of it, `drain` raises it.
                _log.exception("kvcmas: learning stops; what was learned so far stays in use")
                failure = error
            del task  # with the KV that it holds
            with self._changed:
                self._busy = False
                if failure is not None:
                    self.failure = failure
                    self._clear()
                self._changed.notify_all()

    def _next(self) -> _Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._waiting))
            if self._closed:
                return None
            self._busy = True
            task = self._waiting.popleft()
            self._nbytes -= task.nbytes
            return task

    def _stream(self, task: _Task) -> AbstractContextManager[Any]:
        return nullcontext() if task.stream is None else torch.cuda.stream(task.stream)
