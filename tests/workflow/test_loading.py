"""Workflow files: what they mean, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcmas.errors import WorkflowError
from kvcmas.workflow.agents import Agent
from kvcmas.workflow.loading import example_names, load_example, load_workflow, parse_workflow
from kvcmas.workflow.topologies import chain, dag

ONE = "agents: [{name: a}]"


def test_a_file_says_what_python_says(tmp_path: Path) -> None:
    path = tmp_path / "team.yaml"
    path.write_text(
        "name: team\nrounds: 2\ncontext: [one, two]\nagents:\n"
        "  - {name: planner, role: Plan., task: Go., max_tokens: 8}\n"
        "  - {name: coder, reads: [planner], recalls: all}\n"
        "  - {name: judge, reads: [planner, coder], recalls: [coder]}\n",
        encoding="utf-8",
    )
    assert load_workflow(path) == dag(
        [
            Agent("planner", "Plan.", "Go.", max_tokens=8),
            Agent("coder", reads=("planner",), recalls=("planner", "judge")),
            Agent("judge", reads=("planner", "coder"), recalls=("coder",)),
        ],
        2,
        "team",
        ["one", "two"],
    )


def test_topologies_draw_edges_and_a_text_is_one_part() -> None:
    workflow = parse_workflow("topology: chain\ncontext: text\nagents: [{name: a}, {name: b}]")
    assert workflow == chain([Agent("a"), Agent("b")], 1, "workflow", ["text"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.yaml: expected a mapping with the key 'agents', got None"),
        ("[]", "f.yaml: expected a mapping"),
        ("rounds: 2", r"f.yaml: agents: is missing; add a list of at least one agent"),
        ("agents: []", r"f.yaml: agents: got \[\], expected a list of at least one agent"),
        ("agents: [planner]", r"agents\[0\]: got 'planner', expected a mapping with a name"),
        ("agents: [{nam: a}]", r"agents\[0\].nam: unknown key; did you mean 'name'\?"),
        ("agents: [{name: a, name of: x}]", r"agents\[0\].name of: unknown key"),
        ("agents: [{name: yes}]", r"agents\[0\].name: got True, .* put it in quotes"),
        ("agents: [{name: a, reads: b}]", r"agents\[0\].reads: got 'b', .* write \[b\]"),
        ("agents: [{name: a, reads: [3]}]", r"agents\[0\].reads\[0\]: got 3, expected text"),
        ("agents: [{name: a, recalls: al}]", "recalls: got 'al', .* the word all"),
        ("agents: [{name: a, recalls: [1]}]", r"yaml: agents\[0\].recalls\[0\]: got 1, expected t"),
        ("agents: [{name: a, max_tokens: 0}]", r"max_tokens: got 0, expected a whole number"),
        ("agents: [{name: a, max_tokens: true}]", r"max_tokens: got True, expected a whole"),
        (f"topologie: star\n{ONE}", "f.yaml: topologie: unknown key; did you mean 'topology'"),
        (f"topology: chian\n{ONE}", "topology: got 'chian', .* did you mean 'chain'"),
        (f"5: 3\n{ONE}", "unknown key; keys are text"),
        (f"rounds: 1.5\n{ONE}", "rounds: got 1.5, expected a whole number of at least 1"),
        (f"rounds: '2'\n{ONE}", "rounds: got '2', expected a whole number"),
        (f"rounds: 0\n{ONE}", "rounds: got 0, expected a whole number of at least 1"),
        (f"context: 3\n{ONE}", "context: got 3, expected a text or a list of texts"),
        (f"context: [a, 2]\n{ONE}", r"yaml: context\[1\]: got 2, expected text; put it in quo"),
        (f"context: [a, b]\n{ONE}", "f.yaml: the context has 2 parts, but rounds is 1"),
        (f"{ONE}\n{ONE}", "f.yaml: line 2, column 1: the key 'agents' is given twice"),
        ("agents: [", "f.yaml: line 1, column 10: "),
        ("a: *b", "f.yaml: line 1, column 4: found undefined alias"),
        ("rounds: 2026-13-45", "f.yaml: is not YAML"),
        ("a: \x00", "f.yaml: is not YAML"),
        ("[" * 1200, "f.yaml: is not YAML"),
        ("agents: !!python/object:os.system [a]", "line 1, column 9: could not determine a con"),
        ("agents: [{name: a, reads: [a]}]", "f.yaml: agent 'a': reads lists the agent itself"),
        (
            "agents: [{name: a, reads: [b]}, {name: b, reads: [a]}]",
            "f.yaml: the agents read each other in a cycle: a reads b reads a",
        ),
        ("agents: [{name: planner}, {name: b, reads: [planer]}]", "did you mean 'planner'"),
        (
            "topology: star\nagents: [{name: a}, {name: b, recalls: all}]",
            "'b': recalls is given, but the topology draws the edges",
        ),
    ],
)
def test_wrong_files_are_refused_in_plain_words(text: str, message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        parse_workflow(text, "f.yaml")


def test_long_values_are_shortened() -> None:
    with pytest.raises(WorkflowError) as caught:
        parse_workflow(f"rounds: {'x' * 10_000}\n{ONE}")
    assert len(str(caught.value)) < 200


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match=r"absent.yaml: cannot be read \(No such file"):
        load_workflow(tmp_path / "absent.yaml")
    with pytest.raises(WorkflowError, match="cannot be read"):
        load_workflow(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(WorkflowError, match="is not UTF-8 text"):
        load_workflow(tmp_path / "latin.yaml")


def test_examples_come_with_the_package() -> None:
    assert example_names() == ["chain", "debate", "star"]
    for name in example_names():
        workflow = load_example(name)
        assert workflow.rounds >= 2
        assert len(workflow.order) >= 3
        for agent in workflow.agents:
            assert agent.role and agent.task and agent.max_tokens
    assert load_example("chain").order == ("planner", "analyst", "critic", "judge")
    with pytest.raises(WorkflowError, match="did you mean 'debate'"):
        load_example("debat")
