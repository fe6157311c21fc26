"""An engine that answers every prompt twice, so that sharing can be compared with itself.

The sharing run gives the answer on which the conversation goes on. The other run gets the very
same token ids without sharing between agents (an agent's own exact prefix is still reused, as
every engine does). Which of the two goes first changes from turn to turn and, by the
Thue-Morse sequence, also from round to round for the same agent, so that neither gains by its
place. Then both are judged on the exact run's answer, token by token, on copies of their KV.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcmas.bench.demo.replay import Recorder, replay
from kvcmas.core.deviation import kl_divergence, top1_agreement
from kvcmas.engines.transformers import (
    Cancellation,
    RequestRecord,
    Result,
    SamplingParams,
    TransformersEngine,
)
from kvcmas.methods.base import Method
from kvcmas.workflow.plan import Plan
from kvcmas.workflow.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt, answered twice.

    compared: tokens of the exact run's answer.
    same: those of them for which the sharing run, behind the same words, picks the same token.
    kl: mean divergence of the sharing run from the exact one over these tokens, in nats.
    """

    sharing: RequestRecord
    nonshared: RequestRecord
    exact_text: str
    compared: int
    same: int
    kl: float


class PairedEngine:
    """Answers with the sharing method, and compares with the exact answer.

    Args:
        method: the one to show. Its requests and what it learns are those of a run of its own.
        reference: an exact one, with nothing but own prefixes reused.
        on_plan: told of each plan of `method` before it is executed.
        on_exact: called before the exact run of a turn.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        method: Method,
        reference: Method,
        *,
        on_plan: Callable[[Plan], None] | None = None,
        on_exact: Callable[[], None] | None = None,
    ) -> None:
        self._model = model
        self._sharing = Recorder(method, on_plan)
        self._exact = Recorder(reference)
        self.sharing = TransformersEngine(model, tokenizer, self._sharing)
        self.nonshared = TransformersEngine(model, tokenizer, self._exact)
        self._on_exact = on_exact
        self.comparisons: list[Comparison] = []

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_token: Callable[[int, str], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> Result:
        """The sharing run's answer; `on_token` hears only of that run.

        Raises:
            PromptError, ConfigError, CancelledError: as `TransformersEngine.generate`.
        """
        exact_first = len(self.comparisons).bit_count() % 2 == 1
        if exact_first:
            exact = self._run_exact(prompt, params, cancel)
            answer = self.sharing.generate(prompt, params, on_token=on_token, cancel=cancel)
        else:
            answer = self.sharing.generate(prompt, params, on_token=on_token, cancel=cancel)
            exact = self._run_exact(prompt, params, cancel)
        self.comparisons.append(self._compare(prompt, answer, exact))
        return answer

    def _run_exact(
        self, prompt: Prompt, params: SamplingParams | None, cancel: Cancellation | None
    ) -> Result:
        if self._on_exact is not None:
            self._on_exact()
        return self.nonshared.generate(prompt, params, cancel=cancel)

    def _compare(self, prompt: Prompt, answer: Result, exact: Result) -> Comparison:
        tokens = exact.token_ids
        wanted = replay(self._model, prompt, self._exact.take(), tokens)
        given = replay(self._model, prompt, self._sharing.take(), tokens)
        return Comparison(
            sharing=_named(answer.record, self._sharing),
            nonshared=_named(exact.record, self._exact),
            exact_text=exact.text,
            compared=len(tokens),
            same=int(top1_agreement(wanted, given).sum()),
            kl=float(kl_divergence(wanted, given).mean()),
        )


def _named(record: RequestRecord, recorder: Recorder) -> RequestRecord:
    return record.model_copy(update={"method": recorder.method.name})
