"""What is kept of one tenant, and of one request until it ends."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from torch import Tensor

from kvcmas.core.channels import to_channels
from kvcmas.core.rope import Rope
from kvcmas.core.segment import SegmentKV
from kvcmas.methods.anchors.contents import Content, Contents
from kvcmas.methods.anchors.pool import Anchor, Pool
from kvcmas.methods.anchors.prediction import Prediction
from kvcmas.methods.anchors.states import Stretch
from kvcmas.workflow.prompt import TokenIds

FixedKey = tuple[str, bytes]
"""An agent, and the tokens of a text behind a shared one."""


@dataclass(eq=False)
class Placeholder:
    """A shared text in a prompt.

    start, stop: where it stands. at: which token of its content it begins with.
    edge: who reads it, and where the base depends on that, from whom.
    source, offset: the KV that it is made from, and its first token there; `None` without any.
    own: the reader's own deviation from that, where this very text was learned.
    anchors: what it is predicted from otherwise. why: the reason to compute it, or nothing.
    """

    start: int
    stop: int
    at: int
    content: Content
    edge: str
    segment: str = ""
    source: SegmentKV | None = None
    offset: int = 0
    own: Stretch | None = None
    anchors: list[Anchor] = field(default_factory=list)
    why: str = ""
    _text: Tensor | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def text(self, rope: Rope) -> Tensor:
        """The base as channels `[layers, tokens, channels]` float32.

        Raises:
            ValueError: it has no base.
        """
        if self.source is None:
            raise ValueError(f"[{self.start}, {self.stop}) has no base")
        if self._text is None:
            part = self.source.slice(self.offset, self.offset + len(self))
            self._text = to_channels(rope, part)
        return self._text


@dataclass(eq=False)
class Placed:
    """A reused span that is filled from `source`, from its token `offset` on.

    reads: the shared text whose distances weight the prediction. following: it is the text behind
    that one, and `anchors` know it.
    """

    source: SegmentKV
    offset: int
    reads: Placeholder
    following: bool = False
    anchors: list[Anchor] = field(default_factory=list)
    prediction: Prediction | None = None


@dataclass(eq=False)
class Known:
    """Of one tenant.

    fixed: texts behind shared ones, by agent; the KV by itself once they have recurred.
    """

    contents: Contents
    pool: Pool
    fixed: OrderedDict[FixedKey, SegmentKV | None] = field(default_factory=OrderedDict)

    @property
    def nbytes(self) -> int:
        """Bytes of anchors and of texts encoded by themselves."""
        bases = [*(content.base for content in self.contents), *self.fixed.values()]
        return self.pool.nbytes + sum(base.nbytes for base in bases if base is not None)

    def teach(self, content: Content, lesson: Anchor) -> None:
        """Add to the text's own anchor, or make the lesson one."""
        anchor = content.anchor
        if anchor is not None and anchor in self.pool.anchors:
            anchor.deltas |= lesson.deltas
            anchor.following |= lesson.following
            return
        content.anchor = lesson
        self.pool.add(lesson)


@dataclass(eq=False)
class Staged:
    """Of one request; it becomes known when the request ends well.

    encoded: runs encoded by themselves, by their tokens. learn: what is learned from when the
    request is computed exactly. reused: what was predicted. placed: where it comes from, by the
    span's start. behind: the texts behind shared ones, by the start of these.
    """

    contents: Contents
    encoded: dict[bytes, SegmentKV] = field(default_factory=dict)
    placeholders: list[Placeholder] = field(default_factory=list)
    learn: list[Placeholder] = field(default_factory=list)
    reused: list[Placeholder] = field(default_factory=list)
    placed: dict[int, Placed] = field(default_factory=dict)
    behind: dict[int, TokenIds] = field(default_factory=dict)
