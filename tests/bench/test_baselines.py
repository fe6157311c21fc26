"""The fidelity benchmark with methods that ask for encodings or compute before they can reuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcmas.bench.arms import Arm
from kvcmas.bench.fidelity import FidelityBench
from kvcmas.bench.results import Row
from kvcmas.engines.transformers import load

from .small_team import ROLES, context, model_folder

KNOWN = {"gate": "known"}
ARMS = (
    Arm("fullshared", "fullshared"),
    Arm("epic", "epic"),
    Arm("kvcomm", "kvcomm", KNOWN),
    Arm("kvcmas-anchors", "kvcmas-anchors", KNOWN),
    Arm("graphflow", "graphflow"),
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder: Path = tmp_path_factory.mktemp("model")
    bench = FidelityBench(
        load(model_folder(folder)),
        ROLES,
        [context(n) for n in range(3)],
        [context(3)],
        ARMS,
        tokens=5,
    )
    bench.learn()
    return bench.measure()


def of(rows: list[Row], arm: str) -> list[Row]:
    return [row for row in rows if row.arm == arm]


def test_encodings_count_as_computed(rows: list[Row]) -> None:
    first, second = of(rows, "kvcomm")
    # The first reader pays for both; the text is encoded once.
    assert first.record.encoded >= first.shared - 16
    assert first.shared_computed >= first.record.encoded
    assert second.record.encoded == 0
    assert second.shared_computed < 0.2 * second.shared
    assert all(row.record.encoded == 0 for row in rows if row.arm != "kvcomm")


def test_what_was_shown_is_used(rows: list[Row]) -> None:
    for arm in ("kvcomm", "kvcmas-anchors"):
        for row in of(rows, arm):
            assert "anchors" in {span.correction for span in row.record.spans}
    heads = [max(span.head for span in row.record.spans) for row in of(rows, "epic")]
    assert heads == [16, 16]


def test_new_texts_are_blind_reuse_for_graphflow(rows: list[Row]) -> None:
    pairs = list(zip(of(rows, "graphflow"), of(rows, "fullshared"), strict=True))
    assert len(pairs) == 2
    for one, other in pairs:
        assert one.kl == pytest.approx(other.kl, rel=1e-3, abs=1e-7)
