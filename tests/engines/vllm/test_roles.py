"""Names of agents from their prompts."""

from __future__ import annotations

import numpy as np

from kvcmas.engines.vllm.roles import RoleNames

from .fake_requests import array, ids

END = 7
SYSTEM, USER = [1, 2], [1, 3]
ROLE, OTHER = ids(1, 30), ids(2, 30)
DEFAULT = [*SYSTEM, *ids(3, 12), END, *USER]


def chat(system: list[int] | None, user: list[int]) -> list[int]:
    head = [*SYSTEM, *system, END] if system is not None else []
    return [*head, *USER, *user, END, 1, 4]


def prefix(names: RoleNames, tokens: list[int]) -> list[int]:
    return names.prefix(array(tokens)).tolist()


class TestSystemMessages:
    names = RoleNames([END, 8], array(USER))

    def test_name_the_agent_up_to_their_end(self) -> None:
        tokens = chat(ROLE, ids(4, 100))
        assert prefix(self.names, tokens) == [*SYSTEM, *ROLE, END]

    def test_same_role_same_name_whatever_is_asked(self) -> None:
        one, two = chat(ROLE, ids(4, 100)), chat(ROLE, ids(5, 10))
        assert self.names.name(array(one)) == self.names.name(array(two))
        assert self.names.name(array(one)) != self.names.name(array(chat(OTHER, ids(4, 100))))

    def test_without_one_the_first_tokens_behind_the_template_name_it(self) -> None:
        text = ids(6, 200)
        tokens = chat(None, text)
        assert prefix(self.names, tokens) == [*USER, *text[:32]]

    def test_that_holds_the_context_itself_does_not_name_the_agent_as_a_whole(self) -> None:
        tokens = chat([*ROLE, *ids(4, 500)], ids(5, 20))
        assert prefix(self.names, tokens) == tokens[:32]

    def test_longer_than_any_role_is_cut(self) -> None:
        tokens = chat(ids(4, 2000), ids(5, 3000))
        assert prefix(self.names, tokens) == tokens[:32]


class TestDefaultSystemMessage:
    names = RoleNames([END], array(DEFAULT))

    def test_is_nobodys_role(self) -> None:
        text = ids(6, 200)
        tokens = [*DEFAULT, *text, END]
        assert prefix(self.names, tokens) == [*DEFAULT, *text[:32]]

    def test_an_own_one_is(self) -> None:
        assert prefix(self.names, chat(ROLE, ids(4, 99))) == [*SYSTEM, *ROLE, END]


class TestWithoutTemplate:
    names = RoleNames()

    def test_the_first_tokens_name_the_agent(self) -> None:
        tokens = ids(1, 100)
        assert prefix(self.names, tokens) == tokens[:32]
        assert self.names.name(array(tokens[:32])) == self.names.name(array(tokens))

    def test_short_prompts_name_it_as_a_whole(self) -> None:
        assert prefix(self.names, [5, 6]) == [5, 6]
        assert prefix(self.names, []) == []

    def test_names_are_short_and_depend_on_ids_only(self) -> None:
        tokens = array(ids(1, 50))
        name = self.names.name(tokens)
        assert name.startswith("agent-") and len(name) == 18
        assert self.names.name(np.repeat(tokens, 2)[::2]) == name


def test_short_prompts_with_a_system_message() -> None:
    names = RoleNames([END], array(USER))
    tokens = chat(ROLE[:5], ids(4, 3))
    assert prefix(names, tokens) == [*SYSTEM, *ROLE[:5], END]
