"""`kvcmas methods`, and that the command line starts quickly."""

from __future__ import annotations

import json
import subprocess
import sys

from typer.testing import CliRunner

from kvcmas.cli.main import app
from kvcmas.methods import describe, names


def test_methods() -> None:
    result = CliRunner().invoke(app, ["methods"])
    assert result.exit_code == 0
    for name in names():
        description = describe(name)
        assert f"{name}: {description.summary}\n" in result.stdout
        assert description.link in result.stdout
    assert "    --option min_prefix=16\n" in result.stdout


def test_methods_as_json() -> None:
    result = CliRunner().invoke(app, ["methods", "--json"])
    found = json.loads(result.stdout)
    assert [method["name"] for method in found] == list(names())
    for method in found:
        assert set(method) == {"name", "summary", "paper", "link", "options"}
        assert list(method["options"]) == list(describe(method["name"]).defaults)


def test_help_loads_no_engine() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom kvcmas.cli.main import app\n"
        "for command in ([], ['run'], ['doctor'], ['methods']):\n"
        "    assert CliRunner().invoke(app, [*command, '--help']).exit_code == 0\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
