"""Workflows from YAML files, and the examples that come with the package."""

from __future__ import annotations

from collections.abc import Hashable
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from kvcmas.errors import WorkflowError
from kvcmas.workflow.schema import workflow_from_data
from kvcmas.workflow.workflow import Workflow, suggestion

_SUFFIX = ".yaml"


class _Loader(yaml.SafeLoader):
    """The safe loader, which also refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_workflow(path: str | Path) -> Workflow:
    """Read a workflow file (see `schema.py` for its format).

    Raises:
        WorkflowError: the file cannot be read, is no YAML, or does not describe a workflow.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise WorkflowError(
            f"{path}: cannot be read ({error.strerror or error}); give the path of a YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise WorkflowError(f"{path}: is not UTF-8 text ({error}); save it as UTF-8") from error
    return parse_workflow(text, str(path))


def parse_workflow(text: str, source: str = "workflow") -> Workflow:
    """Build a workflow from YAML text; `source` begins every message.

    Raises:
        WorkflowError: the text is no YAML, or does not describe a workflow.
    """
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise WorkflowError(f"{source}: {where}{error.problem}; correct the YAML") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # PyYAML lets the errors of impossible numbers, dates and depths through as they are.
        text = " ".join(str(error).split())
        raise WorkflowError(f"{source}: is not YAML ({text}); correct it") from error
    return workflow_from_data(data, source)


def example_names() -> list[str]:
    """Names of the workflows that come with the package."""
    folder = resources.files(__package__) / "examples"
    names = [entry.name for entry in folder.iterdir()]
    return sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))


def load_example(name: str) -> Workflow:
    """A workflow that comes with the package.

    Raises:
        WorkflowError: there is none of that name.
    """
    if name not in example_names():
        raise WorkflowError(f"no example is named {name!r}; {suggestion(name, example_names())}")
    file = resources.files(__package__) / "examples" / f"{name}{_SUFFIX}"
    return parse_workflow(file.read_text(encoding="utf-8"), f"example {name}")
