"""`kvcmas run`: a workflow on a model, with the sharing method of your choice."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from functools import partial
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcmas import __version__
from kvcmas.cli.options import (
    STDOUT,
    Attention,
    Device,
    DType,
    JsonFile,
    Model,
    TextOnly,
    parse_settings,
)
from kvcmas.cli.output import check_json_target, read_text, write_json
from kvcmas.errors import ConfigError, WorkflowError

if TYPE_CHECKING:
    from kvcmas.engines.runner import WorkflowRun
    from kvcmas.engines.transformers import LoadedModel, SamplingParams
    from kvcmas.workflow.workflow import Workflow


def run(
    workflow: Annotated[
        str,
        typer.Argument(
            metavar="WORKFLOW", help="A YAML file, or an example: chain, debate or star."
        ),
    ],
    context: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="The text that all agents read; repeat it to add one in each round. "
            "- reads standard input.",
        ),
    ] = None,
    model: Model = "demo",
    method: Annotated[str, typer.Option(help="See `kvcmas methods`.")] = "kvcmas",
    dial: Annotated[
        str | None, typer.Option(help="How careful the method is, for every prompt.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="Of the method; repeat it."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="How often each agent speaks, in place of the file's.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer of every agent, in place of the file's.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    dtype: DType = "float32",
    device: Device = "auto",
    attention: Attention = None,
    text_only: TextOnly = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Plain text in place of the model's chat template.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Run a team of agents on one model and show what each turn computed and reused."""
    settings = parse_settings(option or [])
    check_json_target(json)
    team = _adjusted(_load(workflow), rounds, max_tokens)
    parts = tuple(_read_context(path) for path in context) if context else None

    from rich.console import Console

    from kvcmas.cli.run_view import RunView, turns_table
    from kvcmas.engines.runner import check_turns
    from kvcmas.engines.transformers import SamplingParams, load

    check_turns(team, parts)
    _check_method(method, settings)
    params = SamplingParams(temperature=temperature, seed=seed)
    results = Console(stderr=json == STDOUT)
    with RunView(Console(stderr=True), results, team) as view:
        if not (parts or team.context):
            view.note("the workflow has no context to share; give one with --context FILE")
        loaded = load(
            model,
            dtype=dtype,
            device=device,
            attention=attention,
            text_only=text_only,
            progress=view.status,
        )
        for note in loaded.notes:
            view.note(note)
        finished = _run(loaded, team, parts, method, settings, params, dial, plain, view)
    for note in finished.notes:
        view.note(note)
    results.print(turns_table(finished))
    if json is not None:
        data = _record(loaded, method, settings, dial, params, finished)
        write_json(data, json)


def _run(
    loaded: LoadedModel,
    team: Workflow,
    parts: tuple[str, ...] | None,
    method: str,
    settings: dict[str, Any],
    params: SamplingParams,
    dial: str | None,
    plain: bool,
    view: Any,
) -> WorkflowRun:
    from kvcmas.engines.runner import run_workflow
    from kvcmas.engines.transformers import TransformersEngine, model_info, render_chat
    from kvcmas.engines.transformers.chat import PLAIN_TEMPLATE
    from kvcmas.methods import create

    engine = TransformersEngine(
        loaded.model, loaded.tokenizer, create(method, model_info(loaded), **settings)
    )
    template = PLAIN_TEMPLATE if plain else None
    return run_workflow(
        engine,
        loaded.tokenizer,
        team,
        context=parts,
        params=params,
        on_event=view.on_event,
        dial=dial,
        render=partial(render_chat, loaded.tokenizer, template=template),
    )


def _load(name: str) -> Workflow:
    """A file if there is one of that name, otherwise an example.

    Raises:
        WorkflowError: neither, or a bad file.
    """
    from kvcmas.workflow.loading import example_names, load_example, load_workflow
    from kvcmas.workflow.workflow import suggestion

    if Path(name).exists():
        return load_workflow(name)
    if name in example_names():
        return load_example(name)
    raise WorkflowError(
        f"{name}: there is no such file, and no example of that name "
        f"({suggestion(name, example_names())})"
    )


def _adjusted(workflow: Workflow, rounds: int | None, max_tokens: int | None) -> Workflow:
    """The workflow with what the command line says in place of the file's."""
    agents = workflow.agents
    if max_tokens is not None:
        agents = tuple(replace(agent, max_tokens=max_tokens) for agent in agents)
    return replace(workflow, agents=agents, rounds=workflow.rounds if rounds is None else rounds)


def _read_context(path: Path) -> str:
    if str(path) != STDOUT:
        return read_text(path, "--context")
    text = sys.stdin.read()
    if not text.strip():
        raise ConfigError("--context -: standard input is empty; pipe a text into it")
    return text


def _check_method(name: str, settings: dict[str, Any]) -> None:
    """Refuse an unknown method, option or value before the model is loaded.

    Raises:
        ConfigError: says what is known.
    """
    from kvcmas.methods import describe
    from kvcmas.workflow.workflow import suggestion

    description = describe(name)
    for option in settings:
        if option not in description.defaults:
            raise ConfigError(
                f"method {name!r} has no option {option!r}; "
                f"{suggestion(option, description.defaults)}"
            )
    description.config(**settings)


def _record(
    loaded: LoadedModel,
    method: str,
    settings: dict[str, Any],
    dial: str | None,
    params: SamplingParams,
    finished: WorkflowRun,
) -> dict[str, Any]:
    return {
        "version": 1,
        "kvcmas": __version__,
        "model": {
            "name": loaded.name,
            "source": loaded.source,
            "fingerprint": loaded.fingerprint.digest,
            "dtype": loaded.support.dtype,
            "device": str(loaded.model.device),
        },
        "method": {"name": method, "options": settings, "dial": dial},
        "params": asdict(params),
        # By way of text, which has null for NaN.
        "run": loads(finished.model_dump_json()),
    }
