"""The demo itself: learn on earlier texts, then let the team work on the report."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

import kvcmas
from kvcmas.bench.demo.paired import PairedEngine
from kvcmas.bench.demo.results import AgentSums, DemoResult, DemoTurn, Learning, Sums
from kvcmas.bench.demo.settings import DemoSettings
from kvcmas.bench.demo.summary import summary_line, verdict
from kvcmas.bench.demo.watch import Watcher
from kvcmas.engines.runner import Event, TurnFinished, run_workflow
from kvcmas.engines.transformers import (
    LoadedModel,
    SamplingParams,
    TransformersEngine,
    model_info,
    render_chat,
)
from kvcmas.methods.registry import create
from kvcmas.workflow.prompt import Prompt
from kvcmas.workflow.workflow import Workflow

_REFERENCE = "nonshared"
_START_TOKENS = 256


def run_demo(
    loaded: LoadedModel,
    settings: DemoSettings,
    team: Workflow,
    report: Sequence[str],
    earlier: Sequence[str],
    watcher: Watcher,
) -> DemoResult:
    """Run the demo on a loaded model; the caller enters and leaves the watcher.

    Args:
        team: its rounds count, not those of `settings`.
        report: one text for each round.
        earlier: texts that every agent reads exactly beforehand.

    Raises:
        ConfigError: the method's name is unknown.
        PromptError: a prompt does not fit the model's window.
        WorkflowError: more texts than rounds.
    """
    began = perf_counter()
    info = model_info(loaded)
    engine = PairedEngine(
        loaded.model,
        loaded.tokenizer,
        create(settings.method, info, **settings.options),
        create(_REFERENCE, info),
        on_plan=watcher.planned,
        on_exact=watcher.comparing,
    )
    _wake_up(loaded, TransformersEngine(loaded.model, None, create(_REFERENCE, info)))
    learning = learn(engine.sharing, loaded, team, earlier, watcher)
    watcher.learned(learning)
    turns: list[DemoTurn] = []

    def on_event(event: Event) -> None:
        watcher.event(event)
        if isinstance(event, TurnFinished):
            turns.append(_turn(event, engine))
            watcher.turn(turns[-1])

    run = run_workflow(
        engine,
        loaded.tokenizer,
        team,
        context=report,
        params=SamplingParams(max_tokens=settings.max_tokens),
        on_event=on_event,
    )
    readers = Sums.of([turn for turn in turns if turn.agent != team.order[0]])
    return DemoResult(
        kvcmas=kvcmas.__version__,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        model=loaded.name,
        fingerprint=loaded.fingerprint.digest,
        method=settings.method,
        options=dict(settings.options),
        rounds=team.rounds,
        max_tokens=settings.max_tokens,
        learning=learning,
        turns=tuple(turns),
        agents=tuple(AgentSums.of_agent(agent, turns) for agent in team.order),
        readers=readers,
        summary=summary_line(settings.method, readers),
        verdict=verdict(readers),
        total_s=perf_counter() - began,
        notes=(*loaded.notes, *run.notes),
    )


def learn(
    engine: TransformersEngine,
    loaded: LoadedModel,
    team: Workflow,
    texts: Sequence[str],
    watcher: Watcher,
) -> Learning:
    """Let every agent read each text exactly, without an answer.

    The dial `exact` makes each of these prompts a full prefill, from which a method may learn how
    one agent's KV of a text differs from another's.
    """
    began = perf_counter()
    silent = {(1, agent.name): "" for agent in team.agents}
    requests = tokens = 0
    finish_s = 0.0
    for number, text in enumerate(texts, start=1):
        for agent in team.order:
            messages = team.messages(agent, 1, text, silent)
            ids = render_chat(loaded.tokenizer, messages).ids
            watcher.learning(number, len(texts), agent, len(ids))
            prompt = Prompt(ids, agent, f"earlier-{number}-{agent}", dial="exact")
            done = engine.generate(prompt, SamplingParams(max_tokens=0))
            finish_s += done.record.finish_s
            requests, tokens = requests + 1, tokens + len(ids)
    return Learning(
        texts=len(texts),
        requests=requests,
        tokens=tokens,
        seconds=perf_counter() - began,
        finish_s=finish_s,
    )


def _wake_up(loaded: LoadedModel, engine: TransformersEngine) -> None:
    """One pass that nobody times: the first one of a process is slow."""
    length = min(_START_TOKENS, (loaded.window or _START_TOKENS) // 2)
    ids = render_chat(
        loaded.tokenizer, [{"role": "user", "content": "Good morning. " * length}]
    ).ids
    engine.prefill(Prompt(ids[:length], "", "start"))


def _turn(event: TurnFinished, engine: PairedEngine) -> DemoTurn:
    comparison = engine.comparisons[-1]
    return DemoTurn(
        round=event.round,
        agent=event.agent,
        text=event.text,
        exact_text=comparison.exact_text,
        sharing=comparison.sharing,
        nonshared=comparison.nonshared,
        compared=comparison.compared,
        same=comparison.same,
        kl=comparison.kl,
    )
