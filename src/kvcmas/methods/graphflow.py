"""Corrections for relations that recur: a stored sparse residual for each agent and text.

A relation is a text, the agent whose KV of it is the base, and the agent that reads it. Once the
reader has computed the text exactly, the largest numbers of its deviation are kept and added
whenever this very relation comes again. A relation without a residual is blind reuse, so nothing
is gained on texts that are seen for the first time.

After "GraphFlow: A Graph-Based Workflow Management for Efficient LLM-Agent Serving",
https://arxiv.org/abs/2605.22566, whose base KV plus sparse residual this is; its search for
workflows is not part of it. The density and the second sighting are choices of this project.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import ClassVar

from kvcmas.core.channels import deviation
from kvcmas.core.model_info import ModelInfo
from kvcmas.core.segment import SegmentKV
from kvcmas.methods.anchors.config import check_number
from kvcmas.methods.anchors.contents import Content, Contents, Located
from kvcmas.methods.anchors.prediction import Part, Prediction
from kvcmas.methods.anchors.states import Sparse, Stretch
from kvcmas.methods.base import Outcome
from kvcmas.methods.description import MethodDescription
from kvcmas.methods.donors import Donor, Found, Run
from kvcmas.methods.fullshared import EXACT_DIAL, FullSharedConfig
from kvcmas.methods.kv_library import KVLibrary
from kvcmas.methods.library_method import LibraryMethod
from kvcmas.methods.options import check_int
from kvcmas.methods.pinning import pin, reuse_prefix
from kvcmas.workflow.plan import Reuse
from kvcmas.workflow.prompt import Prompt

_Key = tuple[str, str, str]  # content, donor's agent, reader


@dataclass(frozen=True, slots=True)
class GraphFlowConfig:
    """Options of `graphflow`.

    density: share of a deviation's numbers that a residual keeps, in every layer; above 0.
    relations: residuals that are kept, the most recently used.
    compute_at: which sighting of a relation is computed exactly for its residual; 0 leaves that
        to requests that are exact anyway.
    budget_bytes, min_length, min_prefix: as for `fullshared`.
    """

    density: float = 0.1
    relations: int = 64
    compute_at: int = 2
    budget_bytes: int = 2 << 30
    min_length: int = 32
    min_prefix: int = 16

    def __post_init__(self) -> None:
        check_number("density", self.density, 1e-6, 1.0)
        check_int("relations", self.relations, 1)
        check_int("compute_at", self.compute_at, 0)
        FullSharedConfig(self.budget_bytes, self.min_length, self.min_prefix)


@dataclass(eq=False)
class _Relation:
    seen: int = 0
    residual: Stretch | None = None


@dataclass(eq=False)
class _Known:
    """Of one tenant; relations are the most recently used ones."""

    contents: Contents
    relations: OrderedDict[_Key, _Relation] = field(default_factory=OrderedDict)


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """Positions `[start, stop)` read a content from its token `at` on."""

    start: int
    stop: int
    at: int
    content: Content
    donor: Donor
    base: SegmentKV
    key: _Key
    relation: _Relation


class GraphFlow(LibraryMethod):
    """See the module docstring. Safe to use from many threads."""

    name: ClassVar[str] = "graphflow"

    def __init__(self, info: ModelInfo, config: GraphFlowConfig | None = None) -> None:
        self.config = config or GraphFlowConfig()
        super().__init__(
            KVLibrary(
                info,
                self.config.budget_bytes,
                self.config.min_length,
                min_prefix=self.config.min_prefix,
            )
        )
        self._tenants: dict[str, _Known] = {}
        self._reads: dict[str, list[_Read]] = {}
        self._lock = threading.Lock()

    def state_bytes(self, tenant: str = "") -> int:
        """Bytes of a tenant's residuals."""
        with self._lock:
            known = self._tenants.get(tenant)
            held = [] if known is None else [one.residual for one in known.relations.values()]
            return sum(one.state.nbytes for one in held if one is not None)

    def reuse(self, prompt: Prompt, found: Found) -> tuple[list[Reuse], list[str]]:
        """Blind reuse, with residuals where there are any."""
        notes: list[str] = []
        spans = reuse_prefix(self.library, prompt, found, notes)
        own: list[Reuse] = []
        reads: list[_Read] = []
        for run in found.runs:
            donor = self._donor(prompt, run, notes)
            if donor is None:
                continue
            if donor.own:
                own.append(
                    Reuse(run.start, run.stop, donor.segment, donor.offset, exact=donor.exact)
                )
            else:
                reads.append(self._read(prompt, run, donor))
        self._reads[prompt.request_id] = reads
        recurring = [one for one in reads if self._computes(one)]
        notes.extend(
            f"[{one.start}, {one.stop}) is computed: it recurs and has no residual yet"
            for one in recurring
        )
        if prompt.dial == EXACT_DIAL or recurring:
            if prompt.dial == EXACT_DIAL and found.runs:
                notes.append("the dial is exact: stored runs are computed")
            spans.extend(span for span in own if span.exact)
        else:
            spans.extend(own)
            spans.extend(
                Reuse(
                    one.start,
                    one.stop,
                    one.donor.segment,
                    one.donor.offset,
                    correction=None if one.relation.residual is None else "residual",
                )
                for one in reads
            )
        return sorted(spans, key=lambda span: span.start), notes

    def fill(self, prompt: Prompt, span: Reuse, start: int, stop: int, out: SegmentKV) -> None:
        """Write the base, keys moved, and add the residual."""
        super().fill(prompt, span, start, stop, out)
        if span.correction is None:
            return
        one = next(one for one in self._reads[prompt.request_id] if one.start == span.start)
        residual = one.relation.residual
        if residual is not None:
            prediction = Prediction([Part.alone(residual)], one.at)
            prediction.add(self.library.info.rope, out, start - span.start)

    def finish(self, prompt: Prompt, outcome: Outcome | None) -> None:
        """Release and capture; count sightings, and keep residuals of what was exact."""
        reads = self._reads.pop(prompt.request_id, [])
        super().finish(prompt, outcome)
        if outcome is None or not reads:
            return
        residuals = [self._residual(one, outcome) for one in reads]
        with self._lock:
            known = self._tenants.setdefault(prompt.tenant, _Known(Contents(self.config.relations)))
            for one, residual in zip(reads, residuals, strict=True):
                known.contents.use(one.content)
                relation = known.relations.setdefault(one.key, one.relation)
                relation.seen += 1
                relation.residual = relation.residual or residual
                known.relations.move_to_end(one.key)
            while len(known.relations) > self.config.relations:
                known.relations.popitem(last=False)

    def _donor(self, prompt: Prompt, run: Run, notes: list[str]) -> Donor | None:
        """The reader's own KV, else the oldest exact one, which is there whenever others are."""
        ranked = sorted(
            run.sources, key=lambda one: (not one.own, not one.info.exact, one.info.created)
        )
        return next((one for one in ranked if pin(self.library, prompt, one.segment, notes)), None)

    def _read(self, prompt: Prompt, run: Run, donor: Donor) -> _Read:
        ids = prompt.token_ids[run.start : run.stop]
        with self._lock:
            known = self._tenants.get(prompt.tenant)
            located = None if known is None else known.contents.locate(ids)
            content = Content(ids.copy()) if located is None else located.content
            key = (content.name, donor.info.agent, prompt.agent)
            relation = None if known is None else known.relations.get(key)
        cut, end, at = (0, len(run), 0) if located is None else _cut(located)
        return _Read(
            run.start + cut,
            run.start + end,
            at,
            content,
            Donor(donor.segment, donor.offset + cut, donor.info),
            self.library.kv(donor.segment),
            key,
            relation or _Relation(),
        )

    def _computes(self, one: _Read) -> bool:
        at = self.config.compute_at
        return bool(at) and one.relation.residual is None and one.relation.seen + 1 >= at

    def _residual(self, one: _Read, outcome: Outcome) -> Stretch | None:
        """What an exact request leaves of a relation that has no residual yet."""
        if not outcome.exact or not one.donor.info.exact or one.relation.residual is not None:
            return None
        base = one.base.slice(one.donor.offset, one.donor.offset + one.stop - one.start)
        reader = outcome.kv.slice(one.start, one.stop)
        delta = deviation(self.library.info.rope, reader, base)[1:]
        return Stretch(one.at, Sparse.of(delta, self.config.density))


def _cut(located: Located) -> tuple[int, int, int]:
    return located.start, located.stop, located.at


DESCRIPTION = MethodDescription(
    name=GraphFlow.name,
    summary="Blind reuse plus a stored sparse residual for every agent and text that recurs.",
    config=GraphFlowConfig,
    build=GraphFlow,
    paper="GraphFlow: A Graph-Based Workflow Management for Efficient LLM-Agent Serving",
    link="https://arxiv.org/abs/2605.22566",
)
