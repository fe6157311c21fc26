"""The default team, other teams, and what is said of bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcmas.bench.contexts import Context
from kvcmas.bench.roles import Role, read_roles, render
from kvcmas.errors import ConfigError

from ..engines.small_files import chat_tokenizer


def test_the_default_team() -> None:
    roles = read_roles()
    assert [role.name for role in roles] == ["planner", "analyst", "critic", "judge"]
    for role in roles:
        assert 30 <= len(role.system.split()) <= 60
        assert "\n" not in role.system
        assert role.task.endswith(".")


def test_roles_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "roles.yaml"
    file.write_text(
        "roles:\n- {name: a, system: Sys a., task: Do.}\n- {name: b, system: Sys b., task: Go.}\n"
    )
    assert read_roles(file) == (Role("a", "Sys a.", "Do."), Role("b", "Sys b.", "Go."))


def test_the_context_stands_between_role_and_task() -> None:
    tokenizer = chat_tokenizer()
    ids = render(tokenizer, Role("a", "Sys.", "Do it."), Context("c", "The text."))
    text = tokenizer.decode(ids)
    assert "<|im_start|>system\nSys.<|im_end|>" in text
    assert "<|im_start|>user\nThe text.\n\nDo it.<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


BAD_ROLES = [
    ("roles: [", "is not YAML"),
    ("[]", "expected a list `roles`"),
    ("roles: [{name: a, system: s}]", "name, system and task"),
    ("roles: [{name: a, system: s, task: ''}]", "name, system and task"),
    ("roles: [{name: a, system: s, task: t, more: u}]", "name, system and task"),
    ("roles: [{name: a, system: s, task: t}]", "sharing needs at least 2"),
    (
        "roles: [{name: a, system: s, task: t}, {name: a, system: s, task: t}]",
        "'a' is given twice",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD_ROLES)
def test_bad_roles(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "roles.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_roles(file)
    assert str(caught.value).startswith(f"roles {file}")
