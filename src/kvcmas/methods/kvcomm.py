"""KVCOMM: a text encoded by itself, plus the deviations that stored texts had, in full.

Deviations are taken from the text's KV by itself, so no agent's KV is the base of another's, and
every shared text is encoded once more; the record of the request that does so counts it. The text
behind a shared one (an agent's fixed instruction) is treated alike, with weights per channel,
because its tokens have no counterpart in the shared text.

Source: "KVCOMM: Online Cross-context KV-cache Communication for Efficient LLM-based Multi-agent
Systems", https://arxiv.org/abs/2510.12872.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from kvcmas.core.channels import to_channels
from kvcmas.core.model_info import ModelInfo
from kvcmas.core.segment import SegmentKV
from kvcmas.methods.anchors.config import AnchorConfig
from kvcmas.methods.anchors.estimate import of_following
from kvcmas.methods.anchors.known import FixedKey, Known, Placed, Placeholder, Staged
from kvcmas.methods.anchors.method import AnchorMethod
from kvcmas.methods.anchors.pool import Anchor, Following
from kvcmas.methods.anchors.prediction import Prediction
from kvcmas.methods.anchors.states import Full, State
from kvcmas.methods.base import Outcome
from kvcmas.methods.description import MethodDescription
from kvcmas.methods.donors import Donor, Found
from kvcmas.methods.options import check_flag
from kvcmas.workflow.plan import Reuse
from kvcmas.workflow.prompt import Prompt, TokenIds


@dataclass(frozen=True)
class KvcommConfig(AnchorConfig):
    """Options of `kvcomm`; the others are those of `AnchorConfig`.

    following: also predict the fixed text behind a shared one, instead of computing it.
    """

    anchors: int = 20
    gamma: float = 0.3
    following: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("following", self.following)


class Kvcomm(AnchorMethod):
    """See the module docstring. Needs an engine that encodes runs (`methods.encoding`)."""

    name: ClassVar[str] = "kvcomm"
    copies: ClassVar[bool] = False

    def __init__(self, info: ModelInfo, config: KvcommConfig | None = None) -> None:
        chosen = config or KvcommConfig()
        super().__init__(info, chosen)
        self._predicts_following = chosen.following

    def wants(self, prompt: Prompt) -> tuple[TokenIds, ...]:
        """Shared texts without a base; then the fixed texts behind what will be learned."""
        staged, known = self.staged(prompt), self.known(prompt.tenant)
        found = self.library.find(prompt)
        self.look(prompt, found, staged, known)
        texts = [one.content.token_ids for one in staged.placeholders if one.source is None]
        if not texts and any(self._teaches(one) for one in staged.placeholders):
            # Text that differs from prompt to prompt is not worth an encoding.
            texts = [
                text
                for _, text in self._behind(prompt, staged.placeholders, found)
                if (key := _key(prompt, text)) in known.fixed and known.fixed[key] is None
            ]
        missing = {ids.tobytes(): ids for ids in texts if ids.tobytes() not in staged.encoded}
        return tuple(missing.values())

    def encoded(self, prompt: Prompt, token_ids: TokenIds, kv: SegmentKV) -> None:
        """Stage the KV of a text by itself."""
        self.staged(prompt).encoded[token_ids.tobytes()] = kv.clone()

    def edge(self, donor: Donor, prompt: Prompt) -> str:
        """The reader: whatever donor the text was found by, its base is the same."""
        return prompt.agent

    def set_base(self, prompt: Prompt, staged: Staged, placeholder: Placeholder, run: Donor) -> str:
        """The text's KV by itself, where it was encoded."""
        content = placeholder.content
        if content.base is None:
            content.base = staged.encoded.get(content.token_ids.tobytes())
        if content.base is None:
            return "it is not encoded by itself"
        placeholder.source, placeholder.segment = content.base, f"alone-{content.name}"
        placeholder.offset = placeholder.at
        return ""

    def base_state(self, channels: Tensor) -> State:
        """In full."""
        return Full(channels)

    def delta_state(self, channels: Tensor) -> State:
        """In full."""
        return Full(channels.clone())

    def reuse(self, prompt: Prompt, found: Found) -> tuple[list[Reuse], list[str]]:
        """As `AnchorMethod`; remembers what stands behind the placeholders."""
        spans, notes = super().reuse(prompt, found)
        staged = self.staged(prompt)
        staged.behind = {
            one.start: text for one, text in self._behind(prompt, staged.placeholders, found)
        }
        if staged.reused:
            known = self.known(prompt.tenant)
            spans = sorted(
                [*spans, *self._following(prompt, known, staged)], key=lambda span: span.start
            )
        return spans, notes

    def predict(self, placed: Placed) -> Prediction:
        """As `AnchorMethod`; behind a placeholder with weights per channel."""
        if not placed.following:
            return super().predict(placed)
        return of_following(
            self.library.info.rope,
            placed.reads,
            placed.anchors,
            self.key_channels,
            self.config.sharp,
        )

    def more_lessons(
        self, prompt: Prompt, staged: Staged, outcome: Outcome, learned: Placeholder, anchor: Anchor
    ) -> None:
        """The deviation of the text behind it, once that has recurred."""
        text = staged.behind.get(learned.start)
        base = None if text is None else self._fixed_base(prompt, staged, text)
        if text is None or base is None:
            return
        rope = self.library.info.rope
        exact = outcome.kv.slice(learned.stop, learned.stop + len(text))
        delta = to_channels(rope, exact) - to_channels(rope, base)
        anchor.following[learned.edge] = Following(text, self.delta_state(delta[1:]))

    def more_known(self, prompt: Prompt, staged: Staged, known: Known) -> None:
        """Texts behind placeholders, and their KV where it was encoded."""
        for text in staged.behind.values():
            key = _key(prompt, text)
            known.fixed.setdefault(key)
            known.fixed[key] = staged.encoded.get(text.tobytes()) or known.fixed[key]
            known.fixed.move_to_end(key)
        while len(known.fixed) > self.config.contents:
            known.fixed.popitem(last=False)

    def _fixed_base(self, prompt: Prompt, staged: Staged, text: TokenIds) -> SegmentKV | None:
        known = self.known(prompt.tenant)
        return staged.encoded.get(text.tobytes()) or known.fixed.get(_key(prompt, text))

    def _following(self, prompt: Prompt, known: Known, staged: Staged) -> list[Reuse]:
        """Spans for the fixed texts behind placeholders that anchors know."""
        spans: list[Reuse] = []
        for one in staged.reused:
            text = staged.behind.get(one.start)
            base = None if text is None else known.fixed.get(_key(prompt, text))
            if text is None or base is None:
                continue
            anchors = [anchor for anchor in one.anchors if _knows(anchor, one.edge, text)]
            if not anchors:
                continue
            staged.placed[one.stop] = Placed(base, 0, one, following=True, anchors=anchors)
            spans.append(
                Reuse(one.stop, one.stop + len(text), one.segment, 0, correction="following")
            )
        return spans

    def _behind(
        self, prompt: Prompt, placeholders: list[Placeholder], found: Found
    ) -> Iterator[tuple[Placeholder, TokenIds]]:
        """The text from each placeholder to the next run, without the prompt's last token."""
        starts = [one.start for one in placeholders]
        starts += [run.start for run in found.runs if run.sources[0].own]
        for one in placeholders if self._predicts_following else ():
            stop = min([start for start in starts if start >= one.stop], default=len(prompt) - 1)
            if stop > one.stop:
                yield one, prompt.token_ids[one.stop : stop].copy()


def _key(prompt: Prompt, text: TokenIds) -> FixedKey:
    return prompt.agent, text.tobytes()


def _knows(anchor: Anchor, edge: str, text: TokenIds) -> bool:
    following = anchor.following.get(edge)
    return following is not None and np.array_equal(following.token_ids, text)


DESCRIPTION = MethodDescription(
    name=Kvcomm.name,
    summary="Shared texts are encoded by themselves and corrected by full deviations of anchors.",
    config=KvcommConfig,
    build=Kvcomm,
    paper="KVCOMM: Online Cross-context KV-cache Communication for Efficient LLM-based "
    "Multi-agent Systems",
    link="https://arxiv.org/abs/2510.12872",
)
