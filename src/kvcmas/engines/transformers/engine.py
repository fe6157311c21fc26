"""The embedded engine: runs a method's plans on a model of transformers.

A request, step by step:

    check      the prompt fits the model's window      inputs.py
    plan       the method says what each token does    method.plan, from request.py
    prefill    fill, one forward pass, measure heads   executor.py, heads.py
    decode     token by token                          decode.py, sampling.py, text.py
    finish     the method captures and learns          method.finish, from request.py

Several threads may use one engine: it runs one forward pass at a time, and requests interleave
between passes. It does not batch; the rows of a padded batch are run one by one (`unpad`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcmas.engines.transformers.cancel import Cancellation
from kvcmas.engines.transformers.clock import Clock
from kvcmas.engines.transformers.decode import decode
from kvcmas.engines.transformers.forward import ModelRunner
from kvcmas.engines.transformers.inputs import TokenInput, as_prompt, check_prompt, token_row
from kvcmas.engines.transformers.request import open_request
from kvcmas.engines.transformers.results import Result, Scored
from kvcmas.engines.transformers.sampling import SamplingParams
from kvcmas.engines.transformers.text import TextStream, Tokenizer
from kvcmas.errors import ConfigError
from kvcmas.methods.base import Method
from kvcmas.workflow.prompt import Prompt, TokenIds

OnToken = Callable[[int, str], None]
_Events = Generator[tuple[int, str], None, Result]


class TransformersEngine:
    """Executes a method's plans on a causal language model of transformers.

    Args:
        model: in evaluation mode, on one device, with rotary positions and eager or sdpa
            attention.
        tokenizer: turns generated ids into text; without one, results have no text.
        method: decides what is reused.

    Raises:
        ConfigError: the model is in training mode.
        UnsupportedModelError: the model cannot take KV by position.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer | None, method: Method) -> None:
        self.runner = ModelRunner(model)
        self.tokenizer = tokenizer
        self.method = method
        self.eos_ids = _eos_ids(model)

    def generate(
        self,
        prompt: TokenInput,
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: Cancellation | None = None,
    ) -> Result:
        """Answer a prompt.

        Args:
            prompt: token ids, or a `Prompt` that says who asks.
            params: greedy, 256 tokens when not given. With `max_tokens=0` the prompt is only
                prefilled and captured, and the result holds no token.
            on_token: called with each token and the text that became certain with it; an
                exception of its own ends the request.
            cancel: stops the request from another thread.

        Raises:
            PromptError: the prompt is empty, does not fit the window, or holds unknown ids.
            ConfigError: stop strings without a tokenizer.
            CancelledError: `cancel` was used.
        """
        clock = Clock(self.runner.device)
        with closing(self._start(prompt, params, cancel, clock)) as events:
            while True:
                try:
                    token, piece = next(events)
                except StopIteration as done:
                    result: Result = done.value
                    return result
                if on_token is not None:
                    on_token(token, piece)

    def stream(
        self,
        prompt: TokenInput,
        params: SamplingParams | None = None,
        *,
        cancel: Cancellation | None = None,
    ) -> Iterator[str | Result]:
        """Answer a prompt piece by piece: non-empty texts, and at the end the `Result`.

        The prompt is checked at once; everything else happens while the iterator is read, so
        times count from the first read. An iterator that is closed or dropped before the
        `Result` cancels the request.

        Raises:
            PromptError, ConfigError, CancelledError: as `generate`.
        """
        return _pieces(self._start(prompt, params, cancel, None))

    def prefill(self, prompt: TokenInput, *, cancel: Cancellation | None = None) -> Scored:
        """Run the prefill alone; `logits` is the one row that follows the prompt.

        Raises:
            PromptError, CancelledError: as `generate`.
        """
        return self.score(prompt, (), cancel=cancel)

    def score(
        self,
        prompt: TokenInput,
        continuation: Sequence[int] | TokenIds | Tensor,
        *,
        cancel: Cancellation | None = None,
    ) -> Scored:
        """Logits for a given continuation: run the plan, then one pass over the continuation.

        Raises:
            PromptError, CancelledError: as `generate`.
        """
        clock, cancel = Clock(self.runner.device), cancel or Cancellation()
        request_prompt, given = as_prompt(prompt), token_row(continuation)
        self._check(request_prompt, given)
        with open_request(
            self.runner, self.method, request_prompt, len(given), clock, cancel
        ) as request:
            logits = request.prefill.logits[None]
            if len(given) > 1:
                cancel.check()
                rows = request.state.append(torch.from_numpy(given[:-1]), logits=len(given) - 1)
                logits = torch.cat((logits, rows))
            request.answer_s = clock.elapsed()
        return Scored(logits, request.kv(), request.record(self.method))

    def _start(
        self,
        prompt: TokenInput,
        params: SamplingParams | None,
        cancel: Cancellation | None,
        clock: Clock | None,
    ) -> _Events:
        params = params or SamplingParams()
        if params.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer; give the engine one")
        checked = as_prompt(prompt)
        self._check(checked, params.max_tokens)
        return self._events(checked, params, cancel or Cancellation(), clock)

    def _check(self, prompt: Prompt, new: int | TokenIds) -> None:
        check_prompt(prompt.token_ids, new, self.runner.vocab, self.runner.max_tokens)

    def _events(
        self, prompt: Prompt, params: SamplingParams, cancel: Cancellation, clock: Clock | None
    ) -> _Events:
        clock = clock or Clock(self.runner.device)
        text = TextStream(self.tokenizer, params.stop)
        pieces: list[str] = []
        with open_request(
            self.runner, self.method, prompt, params.max_tokens, clock, cancel
        ) as request:
            steps = decode(request, params, text, self.eos_ids, cancel)
            while True:
                try:
                    token, piece = next(steps)
                except StopIteration as done:
                    answer = done.value
                    break
                pieces.append(piece)
                yield token, piece
        return Result(
            answer.token_ids, "".join(pieces), answer.finish_reason, request.record(self.method)
        )


def _pieces(events: _Events) -> Iterator[str | Result]:
    with closing(events):
        while True:
            try:
                _, piece = next(events)
            except StopIteration as done:
                result: Result = done.value
                break
            if piece:
                yield piece
    yield result


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """End tokens of the model's generation config: none, one or several."""
    eos: Any = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset((eos,))
