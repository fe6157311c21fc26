"""How far an answer behind reused KV is from the answer behind a full prefill.

    learning   every role reads every learning context exactly; methods that learn see all of it
    warming    the last of these contexts is put into every arm's library, so that every agent's
               own role prefix is stored, as in service
    measuring  for every test context, in working order: the first agent is exact; each later one
               is served by every arm and by `nonshared`, whose greedy answer is the reference

Exact prefills run once, by `nonshared`, and are shown to all methods (`exact.py`). The arms of one
request run one after the other, in an order that rotates from request to request, so their times
can be compared. KL and agreement are taken on the reference's answer, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from kvcmas.bench.arms import Arm, build, teachers
from kvcmas.bench.contexts import Context
from kvcmas.bench.demo.replay import replay
from kvcmas.bench.exact import show
from kvcmas.bench.results import Learned, Row
from kvcmas.bench.roles import Role, render
from kvcmas.bench.shared_run import common_prefix, computed_of, longest_shared_run
from kvcmas.bench.steps import Report, silent
from kvcmas.core.deviation import kl_divergence, top1_agreement
from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers import (
    LoadedModel,
    SamplingParams,
    Scored,
    TransformersEngine,
    model_info,
)
from kvcmas.errors import PromptError
from kvcmas.methods import Method, create
from kvcmas.workflow.prompt import Prompt, TokenIds

EXACT = "nonshared"
_KEPT_PROMPTS = 10  # whose KV a library holds: enough that role prefixes stay stored


@dataclass(frozen=True, slots=True)
class Sizes:
    """learn, test: contexts. tokens: longest answer of the exact run."""

    learn: int
    test: int
    tokens: int


class FidelityBench:
    """Arms on one model, one team and one set of contexts; call `learn`, then `measure`.

    Args:
        learning, testing: contexts; they have no text in common.
        template: a chat template instead of the tokenizer's.
        bound: label of an arm behind whose requests a plain prompt of as many tokens as they
            computed is timed.

    Raises:
        PromptError: a prompt with its answer does not fit the model's window.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        roles: Sequence[Role],
        learning: Sequence[Context],
        testing: Sequence[Context],
        arms: Sequence[Arm],
        tokens: int,
        *,
        template: str | None = None,
        bound: str = "",
        report: Report = silent,
    ) -> None:
        self.loaded, self.roles, self.arms, self.tokens = loaded, roles, arms, tokens
        self.info = model_info(loaded)
        self.learning, self.testing = learning, testing
        self._report, self._bound = report, bound
        self.began = perf_counter()
        self._ids = {
            (context.name, role.name): render(loaded.tokenizer, role, context, template)
            for context in (*learning, *testing)
            for role in roles
        }
        self._check_window()
        self.budget = _KEPT_PROMPTS * self._longest_bytes()
        self.exact = self._engine(create(EXACT, self.info, budget_bytes=self.budget))
        self._plain = self._engine(create(EXACT, self.info, budget_bytes=0))
        self.teachers = teachers(arms, self.info, self.budget)
        self.methods: dict[str, Method] = {}
        self._engines: dict[str, TransformersEngine] = {}
        self._asked = 0

    def build(self, arm: Arm, budget: int | None = None) -> Method:
        """The arm's method with what was learned and an empty library."""
        teacher = self.teachers.get(arm.label)
        return build(arm, self.info, teacher, self.budget if budget is None else budget)

    def warmed(self, arm: Arm, shown: Sequence[tuple[Prompt, SegmentKV]]) -> Method:
        """The same, with exact prompts in its library."""
        method = self.build(arm)
        for prompt, kv in shown:
            show(method, prompt, kv, self.exact.runner)
        return method

    def ids(self, context: Context, role: Role) -> TokenIds:
        """A prompt's tokens."""
        return self._ids[context.name, role.name]

    def prompt(self, context: Context, role: Role) -> Prompt:
        """A new request."""
        return self.request(self.ids(context, role), role)

    def request(self, ids: TokenIds, role: Role) -> Prompt:
        """A new request of a role."""
        self._asked += 1
        return Prompt(ids, role.name, f"bench-{self._asked}")

    def learn(self) -> Learned:
        """Read all learning contexts exactly, and warm the arms."""
        began, tokens, total = perf_counter(), 0, len(self.learning) * len(self.roles)
        learners: list[Method] = list(dict.fromkeys(self.teachers.values()))
        for arm in self.arms:
            if arm.label not in self.teachers:
                self.methods[arm.label] = self.build(arm)
                learners.append(self.methods[arm.label])
        last: list[tuple[Prompt, SegmentKV]] = []
        self._report("learning", 0, total)
        for number, context in enumerate(self.learning):
            last = []
            for index, role in enumerate(self.roles, 1):
                prompt = self.prompt(context, role)
                kv = self.exact.prefill(prompt).kv
                for method in learners:
                    show(method, prompt, kv, self.exact.runner)
                last.append((prompt, kv))
                tokens += len(prompt)
                self._report("learning", number * len(self.roles) + index, total)
        for label in self.teachers:
            arm = next(arm for arm in self.arms if arm.label == label)
            self.methods[label] = self.warmed(arm, last)
        self._engines = {label: self._engine(method) for label, method in self.methods.items()}
        pairs = dict.fromkeys(
            pair.name
            for teacher in dict.fromkeys(self.teachers.values())
            for pair, state in teacher.book().pairs.items()
            if state.learner.correction is not None
        )
        return Learned(
            contexts=len(self.learning),
            tokens=tokens,
            seconds=perf_counter() - began,
            pairs=tuple(pairs),
        )

    def measure(self) -> list[Row]:
        """Serve all test contexts."""
        rows: list[Row] = []
        total = len(self.testing) * len(self.roles)
        self._report("measuring", 0, total)
        for number, context in enumerate(self.testing):
            for index in range(len(self.roles)):
                rows += self._serve(context, index, turn=number * len(self.roles) + index)
                self._report("measuring", number * len(self.roles) + index + 1, total)
        return rows

    def _serve(self, context: Context, index: int, turn: int) -> list[Row]:
        """One agent's request, under every arm."""
        role = self.roles[index]
        readers = [arm for arm in self.arms if index >= arm.exact_agents]
        exact_arms = [arm for arm in self.arms if index < arm.exact_agents]
        order: list[Arm | None] = [None, *readers]  # None: the exact run
        shift = turn % len(order)
        served: dict[str, Scored] = {}
        plain: dict[str, float] = {}
        answer: tuple[int, ...] = ()
        prompt = self.prompt(context, role)
        ttft = 0.0
        for arm in (*order[shift:], *order[:shift]):
            if arm is not None:
                request = self.prompt(context, role)
                served[arm.label] = self._engines[arm.label].prefill(request)
                if arm.label == self._bound:
                    ids = request.token_ids[: served[arm.label].record.computed]
                    record = self._plain.prefill(self.request(ids, role)).record
                    plain[arm.label] = record.ttft_s
            elif readers:
                params = SamplingParams(max_tokens=self.tokens)
                result = self.exact.generate(prompt, params)
                answer, ttft = result.token_ids, result.record.ttft_s
        # Behind the exact run this finds all but the last token in its prefix cache.
        reference = self.exact.score(self.prompt(context, role), answer)
        for arm in exact_arms:
            show(
                self.methods[arm.label],
                self.prompt(context, role),
                reference.kv,
                self.exact.runner,
            )
        start, stop = self._shared(context, role)
        return [
            Row(
                arm=arm.label,
                context=context.name,
                agent=role.name,
                tokens=len(answer),
                shared=stop - start,
                shared_computed=computed_of(served[arm.label].record, start, stop)
                + served[arm.label].record.encoded,
                exact_ttft_s=ttft,
                plain_ttft_s=plain.get(arm.label),
                record=served[arm.label].record,
                **self._judged(prompt, served[arm.label], reference, answer),
            )
            for arm in readers
        ]

    def _judged(
        self, prompt: Prompt, served: Scored, reference: Scored, answer: tuple[int, ...]
    ) -> dict[str, float]:
        """Means over the answer's tokens, behind the KV that the arm served."""
        kv = served.kv.slice(0, len(prompt))
        logits = replay(self.loaded.model, prompt, kv, answer)
        return {
            "kl": float(kl_divergence(reference.logits, logits).mean()),
            "top1": float(top1_agreement(reference.logits, logits).double().mean()),
        }

    def _shared(self, context: Context, role: Role) -> tuple[int, int]:
        """What the role's prompt shares with the first agent's, behind its own role prefix."""
        start, stop = longest_shared_run(self.ids(context, role), self.ids(context, self.roles[0]))
        others = [other for other in (*self.learning, *self.testing) if other.name != context.name]
        prefix = min(
            common_prefix(self.ids(context, role), self.ids(other, role)) for other in others
        )
        return max(start, min(prefix, stop)), stop

    def _engine(self, method: Method) -> TransformersEngine:
        return TransformersEngine(self.loaded.model, self.loaded.tokenizer, method)

    def _check_window(self) -> None:
        for (context, role), ids in self._ids.items():
            if self.loaded.window and len(ids) + self.tokens > self.loaded.window:
                raise PromptError(
                    f"context {context}: the prompt of {role} has {len(ids)} tokens, and with an "
                    f"answer of {self.tokens} it exceeds the model's window of "
                    f"{self.loaded.window}; shorten the context or use another model"
                )

    def _longest_bytes(self) -> int:
        longest = max(len(ids) for ids in self._ids.values()) + self.tokens
        return longest * kv_bytes_per_token(self.loaded)


def kv_bytes_per_token(loaded: LoadedModel) -> int:
    """Bytes of keys and values that a token has in all layers."""
    info = model_info(loaded)
    per_layer = info.kv_heads * (info.head_dim + info.value_dim)
    return info.layers * per_layer * loaded.model.dtype.itemsize
