"""The agents of a benchmark: a system prompt and a task each, and the prompts made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from kvcmas.bench.contexts import Context
from kvcmas.bench.files import read_file
from kvcmas.engines.transformers import render_chat
from kvcmas.errors import ConfigError
from kvcmas.workflow.prompt import TokenIds

_LEAST = 2


@dataclass(frozen=True, slots=True)
class Role:
    """An agent. system: its role prompt. task: what stands behind the context."""

    name: str
    system: str
    task: str


def read_roles(path: Path | None = None) -> tuple[Role, ...]:
    """Roles in working order, from a YAML file (see `bench/data/roles.yaml`), or the default ones.

    Raises:
        ConfigError: the file cannot be read or holds something else.
    """
    if path is None:
        file = resources.files("kvcmas.bench") / "data" / "roles.yaml"
        return _parse(file.read_text(encoding="utf-8"), "the default roles")
    return _parse(read_file(path, "roles"), f"roles {path}")


def render(
    tokenizer: PreTrainedTokenizerBase, role: Role, context: Context, template: str | None = None
) -> TokenIds:
    """Token ids of the agent's prompt: its system prompt, then the context and its task."""
    messages = [
        {"role": "system", "content": role.system},
        {"role": "user", "content": f"{context.text}\n\n{role.task}"},
    ]
    return render_chat(tokenizer, messages, template=template).ids


def _parse(text: str, source: str) -> tuple[Role, ...]:
    try:
        data: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: is not YAML ({' '.join(str(error).split())})") from error
    entries = data.get("roles") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not all(_is_role(entry) for entry in entries):
        raise ConfigError(
            f"{source}: expected a list `roles` whose entries have the texts name, system and task"
        )
    roles = tuple(Role(**{key: value.strip() for key, value in entry.items()}) for entry in entries)
    _check(roles, source)
    return roles


def _is_role(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and set(entry) == {"name", "system", "task"}
        and all(isinstance(value, str) and value.strip() for value in entry.values())
    )


def _check(roles: Sequence[Role], source: str) -> None:
    if len(roles) < _LEAST:
        raise ConfigError(f"{source}: {len(roles)} roles; sharing needs at least {_LEAST}")
    names = [role.name for role in roles]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ConfigError(f"{source}: the role {double!r} is given twice; rename one of them")
