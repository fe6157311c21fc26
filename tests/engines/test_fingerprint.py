"""Fingerprints: every difference that changes the KV shows, and by its name."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcmas.engines.transformers.fingerprint import fingerprint, weights_digest
from kvcmas.engines.transformers.loading import LoadedModel, load
from kvcmas.errors import StateMismatchError, UnsupportedModelError

from .small_files import chat_tokenizer, save_folder, small_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def loaded(saved: Path) -> LoadedModel:
    return load(saved)


def test_one_changed_bit_changes_the_weights_digest(loaded: LoadedModel) -> None:
    weight = loaded.model.get_parameter("model.layers.1.mlp.up_proj.weight")
    before = weights_digest(loaded.model)
    weight.view(torch.int32)[17, 3] ^= 1
    assert weights_digest(loaded.model) != before
    weight.view(torch.int32)[17, 3] ^= 1
    assert weights_digest(loaded.model) == before


def test_digest_of_large_tensors_does_not_depend_on_chunks_being_equal(
    monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel
) -> None:
    monkeypatch.setattr("kvcmas.engines.transformers.fingerprint._CHUNK", 64)
    before = weights_digest(loaded.model)
    weight = loaded.model.get_parameter("lm_head.weight")
    weight[:] = weight[torch.arange(len(weight) - 1, -1, -1)]
    assert weights_digest(loaded.model) != before


def test_fingerprint_names_what_differs(loaded: LoadedModel) -> None:
    own = loaded.fingerprint
    assert own.differences(dataclasses.asdict(own)) == ()
    own.require(own)
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["new"])
    other = small_model(seed=1)
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 20000.0}
    theirs = fingerprint(other, tokenizer)
    assert own.differences(theirs) == ("rope", "config", "weights", "tokenizer")
    assert own.digest != theirs.digest
    with pytest.raises(StateMismatchError, match=r"different rope .*20000.* instead of"):
        own.require(theirs)
    with pytest.raises(StateMismatchError, match=r"dtype .None instead of 'float32'."):
        own.require({**dataclasses.asdict(own), "dtype": None})


def test_fingerprint_ignores_where_a_model_lies_and_how_it_is_padded(
    loaded: LoadedModel, saved: Path, tmp_path: Path
) -> None:
    moved = load(shutil.copytree(saved, tmp_path / "moved"), attention="eager")
    moved.tokenizer(["a", "abc"], padding=True, truncation=True, max_length=8)
    assert fingerprint(moved.model, moved.tokenizer) == loaded.fingerprint


def test_adapter_is_part_of_the_fingerprint(loaded: LoadedModel) -> None:
    class Settings:
        def to_dict(self) -> dict[str, Any]:
            return {"r": 8, "target_modules": {"q_proj", "v_proj"}}

    model: Any = loaded.model
    model.peft_config = {"translator": Settings()}
    found = fingerprint(model, loaded.tokenizer)
    assert found.differences(loaded.fingerprint) == ("adapter",)
    assert found.adapter.startswith("translator:")


def test_offloaded_weights_have_no_fingerprint() -> None:
    model: Any = small_model()
    with pytest.raises(UnsupportedModelError, match="are not in memory"):
        fingerprint(model.to("meta"))
