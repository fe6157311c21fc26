"""The doctor finds sound models sound, and says what is wrong with others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Cache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvcmas.core.rope import Rope
from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers.doctor import diagnose, examine
from kvcmas.engines.transformers.doctor_checks import ANSWER, layer_errors, logits_error
from kvcmas.engines.transformers.doctor_method import OwnKV
from kvcmas.engines.transformers.doctor_prompts import fit_lengths, random_ids
from kvcmas.engines.transformers.doctor_report import Check, DoctorReport
from kvcmas.engines.transformers.masks import MaskBuilder
from kvcmas.errors import ConfigError
from kvcmas.workflow.plan import Compute, Reuse
from kvcmas.workflow.prompt import Prompt

from .small_files import BEGIN, IDS, SPECIAL, VOCAB, chat_tokenizer, save_folder, small_model
from .tiny import FAMILIES, LIMIT, WINDOW, tiny_model
from .tiny import random_ids as token_list

CPU = torch.device("cpu")
LENGTHS = (48, 160)


def names(checks: tuple[Check, ...]) -> list[str]:
    return [f"{check.name} {check.length} {check.shift or 0}" for check in checks]


@pytest.mark.parametrize("family", FAMILIES)
def test_sound_models_are_supported(family: str, device: torch.device) -> None:
    model = tiny_model(family, device)
    report = examine(model, lengths=LENGTHS, shifts=(1, 37))
    assert report.verdict == "supported", [check.sentence() for check in report.failed]
    assert names(report.checks) == [
        *("dense logits 48 0", "reused logits 48 0", "reused KV 48 0"),
        *("moved keys 48 1", "moved values 48 1", "moved keys 48 37", "moved values 48 37"),
        *("dense logits 160 0", "reused logits 160 0", "reused KV 160 0"),
        *("moved keys 160 37", "moved values 160 37"),
    ]
    layers = model.config.num_hidden_layers
    for check in report.checks:
        assert check.passed and check.error < 1e-5 and check.tolerance == 1e-4
        assert len(check.layers) == (0 if "logits" in check.name else layers)
    # Layer 0 sees no other token, so its values are the same wherever they stand.
    assert report.checks[4].layers[0] == 0
    assert (report.layers, report.kv_heads, report.head_dim) == (layers, 2, 16)
    assert (report.window, report.dtype) == (LIMIT, "float32")
    assert DoctorReport.model_validate_json(report.model_dump_json()) == report


def test_sliding_layers_are_described() -> None:
    report = examine(tiny_model("gemma3", CPU), lengths=(160,), shifts=(3,))
    assert (report.sliding_window, report.sliding_layers) == (WINDOW, 4)
    assert len(report.rope) == 2
    assert report.rope[0].startswith("4 layers turn 16 of 16 channels")
    assert report.notes == ()
    short = examine(tiny_model("gemma3", CPU), lengths=(20,), shifts=(3,))
    assert short.verdict == "supported"
    assert f"sliding window of {WINDOW} tokens is longer" in short.notes[0]


@pytest.mark.parametrize("layer", [0, 2])
def test_a_wrong_rotation_is_named(layer: int) -> None:
    """A Rope whose frequencies are another theta's, in one layer or in all from it on."""
    model = tiny_model("llama", CPU)
    right = Rope.from_config(model.config)
    table = right.tables[0]
    frequencies = tuple(20_000.0 ** (-i / len(table.frequencies)) for i in range(8))
    wrong = Rope(
        (table, replace(table, frequencies=frequencies)),
        tuple(int(i >= layer) for i in range(3)),
    )
    report = examine(model, lengths=LENGTHS, shifts=(1, 37), rope=wrong)
    assert report.verdict == "wrong"
    assert {check.name for check in report.failed} == {"moved keys"}
    assert all(check.failed_layers == tuple(range(layer, 3)) for check in report.failed)
    failed = report.failed[0]
    assert failed.error == failed.layers[failed.worst_layer or 0] > 1e-3
    assert f"the first is layer {layer} ({failed.layers[layer]:.1e})" in failed.sentence()
    assert "moved keys at length 48, shift 1" in failed.sentence()


def test_spoiled_kv_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(
        self: OwnKV, prompt: Prompt, span: Reuse, start: int, stop: int, out: SegmentKV
    ) -> None:
        out.keys.zero_()
        out.values.zero_()

    monkeypatch.setattr(OwnKV, "fill", spoiled)
    report = examine(tiny_model("llama", CPU), lengths=(48,), shifts=(1,))
    assert report.verdict == "wrong"
    assert {check.name for check in report.failed} == {"reused logits", "reused KV"}


def test_a_wrong_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = MaskBuilder.of

    def wider(config: PreTrainedConfig, dtype: torch.dtype) -> MaskBuilder:
        return replace(right(config, dtype), window=WINDOW + 1)

    monkeypatch.setattr(MaskBuilder, "of", wider)
    report = examine(tiny_model("gemma3", CPU), lengths=(160,), shifts=(1,))
    assert report.verdict == "wrong"
    assert {check.name for check in report.failed} == {"reused logits", "reused KV"}
    # What layer 0 attends to is wrong, which shows in the KV of all layers behind it.
    assert report.failed[-1].failed_layers == (1, 2, 3, 4, 5)


def test_values_that_depend_on_the_position_are_found() -> None:
    """A model that adds its positions to what it embeds, next to rotating."""

    class Absolute(LlamaForCausalLM):
        def forward(  # type: ignore[override]
            self,
            input_ids: torch.Tensor,
            position_ids: torch.Tensor | None = None,
            past_key_values: Cache | None = None,
            **options: Any,
        ) -> Any:
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1])[None]
            embedded = self.get_input_embeddings()(input_ids) + position_ids[..., None] / 50
            return super().forward(
                inputs_embeds=embedded,
                position_ids=position_ids,
                past_key_values=past_key_values,
                **options,
            )

    torch.manual_seed(0)
    model = Absolute(tiny_model("llama", CPU).config).eval()
    report = examine(model, lengths=(48,), shifts=(37,))
    assert report.verdict == "wrong"
    assert {check.name for check in report.failed} == {"moved keys", "moved values"}
    assert report.failed[1].failed_layers == (0, 1, 2)


def test_nan_fails() -> None:
    model = tiny_model("llama", CPU)
    with torch.no_grad():
        model.get_input_embeddings().weight[:] = math.nan
    report = examine(model, lengths=(48,), shifts=(1,))
    assert report.verdict == "wrong"
    assert not any(check.passed for check in report.checks)
    assert "null" in report.model_dump_json()


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64)).eval()


def dynamic() -> PreTrainedModel:
    config = tiny_model("llama", CPU).config
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "rope_parameters": parameters}))


@pytest.mark.parametrize(("build", "reason"), [(gpt2, "no rotary positions"), (dynamic, "length")])
def test_unsupported_models_and_why(build: object, reason: str) -> None:
    report = examine(build().eval())  # type: ignore[operator]
    assert report.verdict == "unsupported"
    assert any(reason in text for text in report.reasons)
    assert report.checks == ()


def test_half_precision_is_coarse() -> None:
    model = tiny_model("llama", CPU).to(torch.bfloat16)  # type: ignore[arg-type]
    report = examine(model, lengths=(48,), shifts=(37,))
    assert report.verdict == "supported"
    assert report.checks[-1].tolerance == 0.08
    assert "only coarse faults" in report.notes[0]


def test_a_model_of_another_type_is_examined_with_the_rotation_of_a_known_one() -> None:
    model = tiny_model("llama", CPU)
    model.config.model_type = "llamba"
    refused = examine(model, lengths=(48,), shifts=(1,))
    assert refused.verdict == "unsupported"
    assert "'llamba'" in refused.reasons[0]
    report = examine(model, lengths=(48,), shifts=(1,), rope_as="llama")
    assert report.verdict == "supported"
    assert "do not cover model type 'llamba'" in report.notes[-1]


def test_queries_scaled_by_position_are_mentioned() -> None:
    model = tiny_model("llama", CPU)
    model.config.rope_parameters["llama_4_scaling_beta"] = 0.1
    report = examine(model, lengths=(48,), shifts=(1,))
    assert "queries are scaled by their position (llama_4_scaling_beta)" in report.notes[0]


def test_diagnose_loads_by_name(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = save_folder(tmp_path / "model")
    report = diagnose(str(folder), lengths=(48, 3000), progress=lines.append)
    assert report.verdict == "supported"
    assert report.model == str(folder)
    # The window of 128 keeps 8 tokens for the answer and 32 for moved keys.
    assert [check.length for check in report.checks if check.name == "dense logits"] == [48, 88]
    assert {check.shift for check in report.checks} == {None, 1, 32}
    assert "prompts of more than 88 are shortened" in report.notes[0]
    assert lines[0] == f"loading {folder}"
    assert lines[-1] == "88 tokens: computed 32 positions further on"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(n_layer=1), "no rotary positions"),
        (MambaConfig(num_hidden_layers=1), "recurrent"),
    ],
)
def test_diagnose_refuses_from_the_configuration(
    tmp_path: Path, config: GPT2Config | MambaConfig, reason: str
) -> None:
    config.save_pretrained(tmp_path)
    for name in ("model.safetensors", "tokenizer.json"):  # which nobody reads
        (tmp_path / name).touch()
    report = diagnose(str(tmp_path))
    assert report.verdict == "unsupported"
    assert reason in report.reasons[0]


def test_lengths_that_fit() -> None:
    assert fit_lengths((3000, 200), (37, 1, 1000), None, 8).lengths == (200, 3000)
    assert fit_lengths((3000, 200), (37, 1, 1000), None, 8).shifts == ((1, 37, 1000), (1000,))
    wide = fit_lengths((200, 3000), (1, 1000), 8192, 8)
    assert (wide.lengths, wide.notes) == ((200, 3000), ())
    narrow = fit_lengths((200, 3000), (1, 37, 1000), 2048, 8)
    assert narrow.lengths == (200, 2048 - 8 - 512)
    assert narrow.shifts == ((1, 37, 512), (512,))
    assert "shortened" in narrow.notes[0]
    moved = fit_lengths((200,), (1, 1000), 2048, 8)
    assert moved.notes == ("the window is 2048 tokens: keys are moved by at most 512 positions",)
    assert fit_lengths((200, 3000), (1,), 64, 8).lengths == (55,)


@pytest.mark.parametrize(
    ("lengths", "shifts", "window"),
    [((), (1,), 64), ((15,), (1,), 64), ((16,), (0,), 64), ((16,), (), 64), ((16,), (1,), 20)],
)
def test_bad_lengths(lengths: tuple[int, ...], shifts: tuple[int, ...], window: int | None) -> None:
    with pytest.raises(ConfigError):
        fit_lengths(lengths, shifts, window, 8)


def test_random_prompts_hold_ordinary_tokens() -> None:
    model, tokenizer = small_model(), chat_tokenizer()
    ids = random_ids(model, tokenizer, 2000, seed=0)
    assert ids[0] == IDS[BEGIN]
    assert not set(ids[1:].tolist()) & {IDS[text] for text in SPECIAL}
    assert set(ids.tolist()) <= set(range(len(VOCAB)))
    assert torch.equal(ids, random_ids(model, tokenizer, 2000, seed=0))
    assert not torch.equal(ids, random_ids(model, tokenizer, 2000, seed=1))
    assert len(random_ids(model, None, 50, seed=0)) == 50


def test_own_kv_computes_three_eighths() -> None:
    method = OwnKV()
    ids = torch.tensor(token_list(80)).numpy()
    prompt = Prompt(ids, "a", "1")
    assert method.plan(prompt).spans == (Compute(0, 80),)
    kv = SegmentKV(
        torch.zeros(1, 1, 80, 2), torch.zeros(1, 1, 80, 2), torch.tensor(ids), torch.zeros(1, 80)
    )
    with method.holding(kv):
        assert method.plan(prompt).computed == 30
    assert method.plan(prompt).computed == 80
    with pytest.raises(LookupError):
        method.fill(prompt, Reuse(0, 4, "own", 0), 0, 4, kv.slice(0, 4))


def test_errors_are_relative() -> None:
    exact = torch.ones(2, 1, 4, 3)
    other = exact.clone()
    other[1] *= 1.5
    assert layer_errors(exact, other) == pytest.approx((0.0, 0.5))
    assert layer_errors(exact * 0, other * 0) == (0.0, 0.0)
    logits = torch.tensor([[0.0, 2.0]])
    assert logits_error(logits, logits + 5) == pytest.approx(0.0, abs=1e-6)
    assert logits_error(logits, logits * 1.25) == pytest.approx(0.25)


@pytest.mark.integration
def test_the_demos_model_passes() -> None:
    report = diagnose("demo", lengths=(200, 1000), shifts=(37, 1000))
    assert report.verdict == "supported", [check.sentence() for check in report.failed]
    assert report.layers == 30
    assert [check.length for check in report.checks][-1] == 1000
    assert max(check.error for check in report.checks) < 5e-5
    assert ANSWER == 8
