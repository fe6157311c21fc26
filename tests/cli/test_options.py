"""Texts from the command line as values, and where JSON goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcmas.cli.options import parse_numbers, parse_settings
from kvcmas.cli.output import check_json_target, read_text, write_json
from kvcmas.errors import ConfigError


def test_settings() -> None:
    texts = ["rank=8", "tolerance=1e-3", "online=false", "dial= strict ", "seed=none", "a-b=x=y"]
    assert parse_settings(texts) == {
        "rank": 8,
        "tolerance": 0.001,
        "online": False,
        "dial": "strict",
        "seed": None,
        "a_b": "x=y",
    }
    assert isinstance(parse_settings(["n=8"])["n"], int)
    assert parse_settings([]) == {}
    assert parse_settings(["kvcmas-anchors.min-length=8"]) == {"kvcmas-anchors.min_length": 8}


@pytest.mark.parametrize("texts", [["rank"], ["=8"], ["rank=8", "rank=9"]])
def test_bad_settings(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="--option"):
        parse_settings(texts)


def test_numbers() -> None:
    assert parse_numbers("200, 3000", "--lengths") == (200, 3000)
    for text in ("", "a", "1;2", "1.5"):
        with pytest.raises(ConfigError, match="--lengths"):
            parse_numbers(text, "--lengths")


def test_json_target(tmp_path: Path) -> None:
    check_json_target(None)
    check_json_target("-")
    check_json_target(str(tmp_path / "out.json"))
    with pytest.raises(ConfigError, match="is a folder"):
        check_json_target(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no folder"):
        check_json_target(str(tmp_path / "no" / "out.json"))


def test_write_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    write_json({"name": "Zoë"}, str(file))
    assert file.read_text(encoding="utf-8") == '{\n  "name": "Zoë"\n}\n'
    write_json([1], "-")
    assert json.loads(capsys.readouterr().out) == [1]
    with pytest.raises(ConfigError, match="cannot be written"):
        write_json([1], str(tmp_path))


def test_read_text(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Zoë\n", encoding="utf-8")
    assert read_text(file, "--context") == "Zoë\n"
    file.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        read_text(file, "--context")
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_text(file, "--context")
    with pytest.raises(ConfigError, match="No such file"):
        read_text(tmp_path / "none", "--context")
