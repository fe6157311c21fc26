"""Contexts from all formats, and what is said of bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcmas.bench.contexts import Context, read_contexts, split_contexts
from kvcmas.errors import ConfigError


def test_squad_joins_the_paragraphs_of_an_article(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    articles = [
        {"title": "One", "paragraphs": [{"context": "First.", "qas": []}, {"context": "Then."}]},
        {"paragraphs": [{"context": "Other."}]},
    ]
    file.write_text(json.dumps({"version": "1.1", "data": articles}))
    assert read_contexts(file) == [
        Context("One", "First.\n\nThen."),
        Context("article 2", "Other."),
    ]


def test_jsonl_takes_a_known_or_the_named_field(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"question": "Why?", "body": "B1"}\n\n{"text": "T", "body": "B2"}\n')
    assert [context.text for context in read_contexts(file)] == ["Why?", "T"]
    assert read_contexts(file, "body") == [
        Context("a.jsonl:1", "B1"),
        Context("a.jsonl:3", "B2"),
    ]


def test_a_text_file_is_split_at_lines_of_three_hyphens(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("One\n--- not here\n---\nTwo\n\n---  \nThree")
    texts = [context.text for context in read_contexts(file)]
    assert texts == ["One\n--- not here", "Two", "Three"]


def test_a_folder_holds_one_context_a_file(tmp_path: Path) -> None:
    for name, text in (("b.md", "B\n---\nb"), ("a.txt", "A"), ("c.json", "{}")):
        (tmp_path / name).write_text(text)
    assert read_contexts(tmp_path) == [Context("a.txt", "A"), Context("b.md", "B\n---\nb")]


BAD_FILES = [
    ("a.json", "{", "is not JSON"),
    ("a.json", "[]", "is not in SQuAD format"),
    ("a.json", '{"data": [{"paragraphs": [{"text": "x"}]}]}', "is not in SQuAD format"),
    ("a.json", '{"data": []}', "holds no text"),
    ("a.jsonl", '{"text": "x"}\n{', "line 2: is not JSON"),
    ("a.jsonl", '{"body": "x"}', "name the field with --field"),
    ("a.jsonl", '{"text": 3}', "line 1: has no text"),
    ("a.jsonl", '["text"]', "line 1: has no text"),
    ("a.txt", "One\n---\n \n---\nTwo", "a.txt:2 is empty"),
    ("a.csv", "x", "no file of a known format"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD_FILES)
def test_bad_files(name: str, text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_contexts(file)
    assert str(caught.value).startswith(f"contexts {file}")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_contexts(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="save it as UTF-8"):
        read_contexts(tmp_path / "latin.txt")


def test_learning_and_testing_do_not_overlap() -> None:
    contexts = [Context(str(number), f"text {number}") for number in range(5)]
    learning, testing = split_contexts(contexts, 2, 3)
    assert [c.name for c in learning] == ["0", "1"]
    assert [c.name for c in testing] == ["2", "3", "4"]
    with pytest.raises(
        ConfigError, match=r"4 contexts to learn from and 2 to test on.*there are 5"
    ):
        split_contexts(contexts, 4, 2)
    with pytest.raises(ConfigError, match="context 5 to test on is the same text as 1"):
        split_contexts([*contexts[:2], Context("5", "text 1")], 2, 1)
