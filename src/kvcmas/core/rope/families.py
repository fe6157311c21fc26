"""Which model types rotate their keys, and how.

A configuration gives the frequencies, but not how the model's code applies them: which channels
form a pair, which layers rotate, how the axes of an image share the frequencies. That is a fact
about the code of each model type, so it stands here as a table. A type that is not in the table
is refused rather than guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Layout(StrEnum):
    """Which two channels of a head rotate together (`half` is half of the rotated channels)."""

    NEOX = "neox"
    """Channels `i` and `i + half`."""
    INTERLEAVED = "interleaved"
    """Channels `2i` and `2i + 1`."""


class LayerRule(StrEnum):
    """Which layers rotate their keys; the others (NoPE layers) keep them as they are."""

    ALL = "all"
    LISTED = "listed"
    """Those with a true value in `config.no_rope_layers` (the name says the opposite)."""
    SLIDING = "sliding"
    """Those with sliding-window attention."""
    SLIDING_IF_ANY = "sliding if any"
    """As SLIDING, but all of them when the model has no window."""


class AxisRule(StrEnum):
    """How the frequencies are shared out between the axes of a position (M-RoPE)."""

    TEXT = "text"
    """One axis."""
    SECTIONS = "sections"
    """Three axes, a run of frequencies each, of the lengths in `mrope_section`."""
    STRIDED = "strided"
    """Three axes in turn, frequency by frequency, as far as `mrope_section` reaches."""


@dataclass(frozen=True, slots=True)
class RopeFamily:
    """How the code of a model type rotates keys.

    Args:
        layout: which channels form a pair.
        partial: the code obeys `partial_rotary_factor`.
        layers: which layers rotate.
        axes: how M-RoPE shares the frequencies.
        mrope_section: frequencies per axis where the configuration gives none.
        clockwise: the code turns by minus the angle.
        rotary_dim: the number of rotated channels stands in `config.rotary_dim`, base 10000
            (types older than `rope_parameters`).
    """

    layout: Layout = Layout.NEOX
    partial: bool = False
    layers: LayerRule = LayerRule.ALL
    axes: AxisRule = AxisRule.TEXT
    mrope_section: tuple[int, int, int] = (0, 0, 0)
    clockwise: bool = False
    rotary_dim: bool = False


def _same(family: RopeFamily, names: str) -> dict[str, RopeFamily]:
    return dict.fromkeys(names.split(), family)


_PLAIN = (
    "llama mistral mixtral ministral ministral3 cwm arcee aria_text bitnet "
    "qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text gemma3n_text gemma4_text "
    "vaultgemma olmo olmo2 olmo3 olmoe flex_olmo granite granitemoe granitemoeshared "
    "starcoder2 apertus seed_oss hyperclovax jais2 dots1 gpt_oss hy_v3 jetmoe falcon"
)

FAMILIES: Mapping[str, RopeFamily] = MappingProxyType(
    {
        **_same(RopeFamily(), _PLAIN),
        **_same(
            RopeFamily(partial=True),
            "gpt_neox gpt_neox_japanese phi phi3 stablelm persimmon nemotron glm4_moe "
            "minimax_m2 solar_open",
        ),
        **_same(
            RopeFamily(Layout.INTERLEAVED),
            "cohere helium ernie4_5 ernie4_5_moe",
        ),
        **_same(RopeFamily(Layout.INTERLEAVED, partial=True), "glm glm4"),
        **_same(RopeFamily(Layout.INTERLEAVED, rotary_dim=True), "gptj codegen"),
        **_same(RopeFamily(Layout.INTERLEAVED, layers=LayerRule.SLIDING), "cohere2"),
        **_same(RopeFamily(Layout.INTERLEAVED, layers=LayerRule.LISTED), "llama4_text"),
        **_same(RopeFamily(layers=LayerRule.LISTED), "smollm3"),
        **_same(RopeFamily(layers=LayerRule.SLIDING), "afmoe"),
        **_same(RopeFamily(layers=LayerRule.SLIDING_IF_ANY), "exaone4 exaone_moe"),
        **_same(RopeFamily(clockwise=True), "nanochat"),
        **_same(
            RopeFamily(axes=AxisRule.SECTIONS, mrope_section=(16, 24, 24)),
            "qwen2_vl_text qwen2_5_vl_text paddleocr_vl_text",
        ),
        **_same(
            RopeFamily(axes=AxisRule.STRIDED, mrope_section=(24, 20, 20)),
            "qwen3_vl_text qwen3_vl_moe_text",
        ),
        **_same(
            RopeFamily(
                Layout.INTERLEAVED,
                partial=True,
                axes=AxisRule.SECTIONS,
                mrope_section=(8, 12, 12),
            ),
            "glm4v_text",
        ),
        **_same(
            RopeFamily(partial=True, axes=AxisRule.SECTIONS, mrope_section=(8, 12, 12)),
            "glm4v_moe_text",
        ),
    }
)


def _refuse(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **_refuse(
            "it adds learned position embeddings to its input, so its keys cannot be moved",
            "gpt2 gpt_bigcode gpt_neo opt biogpt openai-gpt xglm",
        ),
        **_refuse(
            "it biases attention by distance (ALiBi) and has no rotary embedding", "bloom mpt"
        ),
        **_refuse("it has relative position biases and no rotary embedding", "t5 mt5 umt5"),
        **_refuse(
            "it keeps latent KV (MLA), of which only a part is rotated",
            "deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 minicpm3 mistral4 longcat_flash "
            "kimi_linear glm4_moe_lite glm_moe_dsa youtu axk1 axk2 hy_v4",
        ),
        **_refuse(
            "it normalises keys, channel by channel, after rotating them, which a rotation of "
            "the stored key cannot account for",
            "hunyuan_v1_dense hunyuan_v1_moe",
        ),
    }
)
"""Model types that are known not to work, and why."""
