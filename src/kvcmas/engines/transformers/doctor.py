"""The doctor: does a model do what kvcmas believes of it?

Everything that sharing rests on is compared with the model itself, layer by layer, at a short and
at a long prompt: the engine's own prefill, a prompt with holes (which also shows whether the
masks of sliding-window layers are right), keys moved to another position, and values, which must
not depend on the position at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcmas.core.rope import Rope
from kvcmas.engines.transformers.doctor_checks import ANSWER, Examination
from kvcmas.engines.transformers.doctor_prompts import fit_lengths, random_ids
from kvcmas.engines.transformers.doctor_report import Check, DoctorReport
from kvcmas.engines.transformers.loading import load
from kvcmas.engines.transformers.support import SLIDING, Support, inspect_support
from kvcmas.errors import UnsupportedError

LENGTHS = (200, 3000)
SHIFTS = (1, 37, 1000)

Progress = Callable[[str], None]

# Settings of models that scale their queries by position, beyond the rotation.
_TEMPERATURE = ("attn_temperature_tuning", "llama_4_scaling_beta")


def diagnose(
    name: str,
    *,
    lengths: Sequence[int] = LENGTHS,
    shifts: Sequence[int] = SHIFTS,
    rope_as: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    text_only: bool = False,
    **options: Any,
) -> DoctorReport:
    """Load a model by name and examine it.

    Args:
        lengths, shifts, rope_as, seed, progress: see `examine`.
        text_only, options: see `load`.

    Raises:
        ConfigError: there is no such model, or as `examine`.
    """
    try:
        loaded = load(name, progress=progress, text_only=text_only, **options)
    except UnsupportedError as error:
        return DoctorReport(model=name, verdict="unsupported", reasons=(str(error),))
    report = examine(
        loaded.model,
        loaded.tokenizer,
        name=name,
        lengths=lengths,
        shifts=shifts,
        rope_as=rope_as,
        seed=seed,
        progress=progress,
        text_only=text_only,
    )
    return report.model_copy(update={"notes": (*loaded.notes, *report.notes)})


def examine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    name: str = "",
    lengths: Sequence[int] = LENGTHS,
    shifts: Sequence[int] = SHIFTS,
    rope: Rope | None = None,
    rope_as: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    text_only: bool = False,
) -> DoctorReport:
    """Examine a loaded model.

    Args:
        tokenizer: tells which ids are control tokens, which the prompts then do without.
        lengths: tokens of each prompt, at least 16; shortened where the window is.
        shifts: positions by which keys are moved, at least 1; shortened like the lengths.
        rope: the rotation to check; by default what `Rope.from_config` reads.
        rope_as: see `model_type` in `Rope.from_config`.
        seed: of the prompts.
        progress: called with a line of text whenever a step begins.

    Raises:
        ConfigError: a length or a shift is too small, or the model's window or configuration
            does not allow an examination.
    """
    support = inspect_support(model, text_only=text_only)
    reasons = list(support.reasons)
    try:
        rope = rope or Rope.from_config(model.config, model_type=rope_as)
    except UnsupportedError as error:
        reasons.append(str(error))
    report = _describe(name, model, support)
    if rope is None or reasons:
        return report.model_copy(update={"verdict": "unsupported", "reasons": tuple(reasons)})
    try:
        examination = Examination(model, rope, progress or (lambda message: None))
    except UnsupportedError as error:
        return report.model_copy(update={"verdict": "unsupported", "reasons": (str(error),)})
    fitted = fit_lengths(lengths, shifts, examination.engine.runner.max_tokens, ANSWER)
    checks: list[Check] = []
    for length, moves in zip(fitted.lengths, fitted.shifts, strict=True):
        checks += examination.run(random_ids(model, tokenizer, length + ANSWER, seed), moves)
    return report.model_copy(
        update={
            "verdict": "supported" if all(check.passed for check in checks) else "wrong",
            "rope": tuple(_rope_lines(rope, support.head_dim)),
            "checks": tuple(checks),
            "notes": (*fitted.notes, *_notes(model, support, rope, fitted.lengths[-1])),
        }
    )


def _describe(name: str, model: PreTrainedModel, support: Support) -> DoctorReport:
    return DoctorReport(
        model=name or support.architecture,
        verdict="supported",
        architecture=support.architecture,
        model_type=support.model_type,
        tested=support.tested,
        dtype=support.dtype,
        device=str(model.device),
        attention=support.attention,
        layers=support.layers,
        kv_heads=support.kv_heads,
        head_dim=support.head_dim,
        window=support.window or None,
        sliding_window=support.sliding_window,
        sliding_layers=support.layer_types.count(SLIDING),
    )


def _rope_lines(rope: Rope, head_dim: int) -> Iterator[str]:
    for index, table in enumerate(rope.tables):
        layers = rope.layers.count(index)
        yield (
            f"{layers} layers turn {table.rotary_dim} of {head_dim} channels "
            f"({table.layout.name.lower()} pairs, {min(table.frequencies):.3g} to "
            f"{max(table.frequencies):.3g} radians per position)"
        )
    if None in rope.layers:
        yield f"{rope.layers.count(None)} layers turn nothing"


def _notes(model: PreTrainedModel, support: Support, rope: Rope, longest: int) -> Iterator[str]:
    """What the checks leave open."""
    window = support.sliding_window
    if window is not None and window >= longest:
        yield (
            f"the sliding window of {window} tokens is longer than every prompt examined, so its "
            f"mask was not tried; add a length of more than {window + ANSWER}"
        )
    if model.dtype in (torch.float16, torch.bfloat16):
        yield (
            f"in {support.dtype} only coarse faults show; examine the model in float32 for a fine "
            "check"
        )
    if support.multimodal:
        yield "the model also takes images or sound; it was examined with text alone"
    if rope.axes > 1:
        yield f"positions have {rope.axes} axes; it was examined with text, where all are equal"
    text = model.config.get_text_config(decoder=True)
    for name in _scaled_queries(text):
        yield (
            f"queries are scaled by their position ({name}): KV moved across a step of that scale "
            "is an approximation, which the shifts examined may not show"
        )
    if not support.tested:
        yield (
            f"the project's own tests do not cover model type {support.model_type!r}; these checks "
            "are all that is known of it"
        )


def _scaled_queries(text: Any) -> Iterator[str]:
    parameters = getattr(text, "rope_parameters", None)
    nested = parameters if isinstance(parameters, Mapping) else {}
    for name in _TEMPERATURE:
        if getattr(text, name, None) or nested.get(name):
            yield name
