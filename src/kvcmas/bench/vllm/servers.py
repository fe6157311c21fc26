"""Servers in processes of their own: started, waited for, and ended."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvcmas.bench.vllm.variables import server_variables
from kvcmas.engines.vllm.command import installed_vllm
from kvcmas.errors import UnsupportedError

_START_S = 420.0
_END_S = 30.0
_POLL_S = 1.0
_TAIL_LINES = 15
NAME = "model"
_FLAGS = (
    *("--served-model-name", NAME),
    *("--max-model-len", "4096", "--enable-prompt-tokens-details"),
    *("--host", "127.0.0.1"),
)
_CPU_FLAGS = ("--dtype", "float32", "--block-size", "32", "--enforce-eager")


def plain_command(model: str, port: int) -> list[str]:
    """vLLM's own server, with the flags that `kvcmas serve` would set."""
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    cpu = _CPU_FLAGS if installed_vllm().cpu else ()
    return [*program, *cpu, *_FLAGS, "--port", str(port)]


def kvcmas_command(model: str, port: int, *options: str) -> list[str]:
    """`kvcmas serve` with options of its own."""
    program = [sys.executable, "-m", "kvcmas", "serve", model, *options]
    return [*program, "--", *_FLAGS, "--port", str(port)]


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listens to."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Server:
    """A server while its `with` block runs; `ready` waits until it answers.

    Args:
        name: for messages. log: takes its output.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        log: Path,
        variables: Mapping[str, str],
    ) -> None:
        self.name, self.port = name, port
        self._command, self._log, self._variables = list(command), log, dict(variables)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What an OpenAI client takes as its base."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._variables,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        if process is None:
            return
        if error is not None and process.poll() is not None:
            error.add_note(f"{self.name} had ended by then; its output:\n{self._tail()}")
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def ready(self) -> None:
        """Wait until it answers.

        Raises:
            UnsupportedError: it ended, or did not answer in time; with the end of its output.
        """
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise UnsupportedError(f"{self.name} ended while it started:\n{self._tail()}")
            if self._answers():
                return
            time.sleep(_POLL_S)
        raise UnsupportedError(
            f"{self.name} did not answer within {_START_S:.0f} s:\n{self._tail()}"
        )

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as got:
                return bool(got.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def both(model: str, folder: Path, *options: str) -> tuple[Server, Server]:
    """vLLM alone, and with kvcmas; not started."""
    one, two = free_ports(2)
    variables = server_variables(model)
    return (
        Server("vllm", plain_command(model, one), one, folder / "vllm.log", variables),
        Server(
            "kvcmas", kvcmas_command(model, two, *options), two, folder / "kvcmas.log", variables
        ),
    )
