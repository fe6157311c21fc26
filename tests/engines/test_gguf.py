"""GGUF files: converted once, whole or not at all, and refused when damaged."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from kvcmas.engines.transformers import gguf as gguf_module
from kvcmas.engines.transformers.chat import render
from kvcmas.engines.transformers.gguf import convert_gguf, default_cache_dir
from kvcmas.engines.transformers.loading import load
from kvcmas.errors import ConfigError, UnsupportedModelError

from .small_files import save_gguf


def converted_folders(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir())


def test_gguf_is_converted_once(tmp_path: Path) -> None:
    file, cache, steps = save_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache", list[str]()
    first = load(file, cache_dir=cache, progress=steps.append)
    assert steps[0] == "converting tiny.gguf (once)"
    steps.clear()
    second = load(file, cache_dir=cache, progress=steps.append)
    assert steps == [f"loading {file}"]
    assert first.fingerprint == second.fingerprint
    assert first.source == str(file)
    assert len(converted_folders(cache)) == 1
    ids = render(first.tokenizer, [{"role": "user", "content": "hello"}])
    with torch.no_grad():
        logits = [m.model(input_ids=torch.tensor(ids)[None]).logits for m in (first, second)]
    assert torch.equal(*logits)


def test_gguf_alone_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    save_gguf(tmp_path / "models" / "one.gguf")
    loaded = load(tmp_path / "models", cache_dir=tmp_path / "cache")
    assert loaded.source.endswith("one.gguf")
    shutil.copy(loaded.source, tmp_path / "models" / "two.gguf")
    with pytest.raises(ConfigError, match=r"several GGUF files, name one of them: one.gguf, two"):
        load(tmp_path / "models")


def test_another_content_or_dtype_is_another_conversion(tmp_path: Path) -> None:
    file, cache = save_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    single = load(file, cache_dir=cache)
    half = load(file, cache_dir=cache, dtype="bfloat16")
    assert half.fingerprint.differences(single.fingerprint) == ("dtype", "weights")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    changed = load(file, cache_dir=cache)
    assert changed.fingerprint.differences(single.fingerprint) == ("weights",)
    assert len(converted_folders(cache)) == 3


def test_interrupted_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = save_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"

    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gguf_module, "_sync", interrupt)
        convert_gguf(file, cache_dir=cache)
    assert converted_folders(cache) == []
    assert convert_gguf(file, cache_dir=cache).fresh


def test_damaged_cache_is_converted_again_and_leftovers_are_swept(tmp_path: Path) -> None:
    file, cache = save_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    folder = convert_gguf(file, cache_dir=cache).folder
    assert folder is not None
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    old, young = cache / "models" / ".tmp-old", cache / "models" / ".tmp-young"
    for path in (old, young):
        path.mkdir()
    os.utime(old, (0, 0))
    again = convert_gguf(file, cache_dir=cache)
    assert (again.fresh, again.folder) == (True, folder)
    assert (folder / "model.safetensors").read_bytes() == whole
    assert converted_folders(cache) == [".tmp-young", folder.name]


def test_of_two_conversions_at_once_the_first_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = save_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    move, times = gguf_module._move, list[int]()

    def other_process_is_faster(temporary: Path, folder: Path) -> None:
        shutil.copytree(temporary, folder)
        times.append((folder / "model.safetensors").stat().st_mtime_ns)
        move(temporary, folder)

    monkeypatch.setattr(gguf_module, "_move", other_process_is_faster)
    folder = convert_gguf(file, cache_dir=cache).folder
    assert folder is not None
    assert converted_folders(cache) == [folder.name]
    assert (folder / "model.safetensors").stat().st_mtime_ns == times[0]


def test_full_disk_still_gives_the_model_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save_gguf(tmp_path / "tiny.gguf")
    cached = load(file, cache_dir=tmp_path / "cache")

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_module, "_sync", full)
    loaded = load(file, cache_dir=tmp_path / "other")
    assert "was not cached" in loaded.notes[0]
    assert "No space left on device" in loaded.notes[0]
    assert loaded.fingerprint == cached.fingerprint
    assert converted_folders(tmp_path / "other") == []


def test_cache_folder_that_is_a_file(tmp_path: Path) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("")
    loaded = load(save_gguf(tmp_path / "tiny.gguf"), cache_dir=blocked)
    assert "was not cached" in loaded.notes[0]


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs", b"GG"])
def test_not_a_gguf_file(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        load(file, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kept", [40, 3000, -2000])
def test_truncated_gguf(kept: int, tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigError, match="cannot be read"):
        load(file, cache_dir=tmp_path / "cache")


def test_gguf_that_lacks_weights_is_not_cached(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "tiny.gguf", left_out="blk.1.ffn_up.weight")
    with pytest.raises(ConfigError, match=r"lacks 1 weights .*layers.1.mlp.up_proj.weight"):
        load(file, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_gguf_of_an_unknown_architecture(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "tiny.gguf", architecture="mystery")
    with pytest.raises(UnsupportedModelError, match="mystery"):
        load(file, cache_dir=tmp_path / "cache")


def test_default_cache_folder_is_the_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_cache_dir() == Path("/caches/kvcmas")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == Path.home() / ".cache" / "kvcmas"
    monkeypatch.setattr("sys.platform", "darwin")
    assert default_cache_dir() == Path.home() / "Library" / "Caches" / "kvcmas"


def test_no_progress_bars_off_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(save_gguf(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache")
    assert capfd.readouterr().err.replace("Writing model shards", "") == ""
