"""The dashboard in docs asks only for metrics and label values that exist, and for all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvcmas.engines.vllm.metric_names import METRICS, series

FILE = Path(__file__).parents[3] / "docs" / "grafana.json"
VLLM_LABELS = {"model_name", "engine"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return loaded


def expressions(dashboard: dict[str, Any]) -> list[str]:
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [*panels, *(one.get("query", "") for one in dashboard["templating"]["list"])]


def test_every_metric_exists_and_every_one_is_shown(dashboard: dict[str, Any]) -> None:
    asked = set(re.findall(r"vllm:\w+", " ".join(expressions(dashboard))))
    existing = {name for metric in METRICS for name in series(metric)}
    assert asked <= existing
    for metric in METRICS:
        assert asked & set(series(metric)), f"{metric.name} is not shown"


def test_every_label_and_value_exists(dashboard: dict[str, Any]) -> None:
    known = {metric.label: metric.values for metric in METRICS if metric.label}
    for expression in expressions(dashboard):
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', expression):
            assert label in VLLM_LABELS or value in known[label], expression
        for label in re.findall(r"by \((\w+)\)", expression):
            assert label in {*known, "le"}, expression
        for label in re.findall(r"\{\{(\w+)\}\}", expression):
            assert label in known


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)
