"""What scheduler and workers tell each other in every step. Plain data, no vLLM.

    scheduler > workers   StepWork   bound to a step: what to do around its forward pass
    workers > scheduler   Report     what came of it, and what was learned since the last report

All ranks get the same work. Every rank holds the KV of its own heads, so a report says what one
rank saw; `Report.merge` joins the reports of several.

Order within a step: reset, drops, loads, (forward pass), measures, captures, lessons.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcmas.workflow.prompt import TokenIds

BlockIds = tuple[int, ...]
"""The request's blocks by index: position p lies in `block_ids[p // block_size]`."""


@dataclass(frozen=True, slots=True)
class Source:
    """Donor KV for positions `[start, stop)` of a request, as a reader sees it.

    segment, offset: the donor, and its token that stands at `start`.
    reader: the agent that reads. origin: position at which the text shared with the donor begins.
    corrected: whether the correction of the pair (donor's agent, reader) is added.
    """

    tenant: str
    segment: str
    offset: int
    start: int
    stop: int
    reader: str
    origin: int
    corrected: bool

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> Source:
        """Positions `[start, stop)` of it."""
        return Source(
            self.tenant,
            self.segment,
            self.offset + start - self.start,
            start,
            stop,
            self.reader,
            self.origin,
            self.corrected,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Write a source's KV, keys moved, into the request's blocks before the forward pass."""

    request_id: str
    source: Source
    block_ids: BlockIds


@dataclass(frozen=True, slots=True)
class Measure:
    """Compare what the request's blocks hold after the forward pass with a source's KV.

    span: start of the reused span whose head ends at `source.stop`; names the measurement.
    """

    request_id: str
    span: int
    source: Source
    block_ids: BlockIds


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """Copy positions `[start, stop)` of a request out of its blocks as a new donor.

    token_ids: of these positions. agent: who computed them. exact: as a full prefill gives them.
    continues, kept: the first `kept` tokens are those of this older donor, which is dropped.
    """

    request_id: str
    segment: str
    tenant: str
    agent: str
    start: int
    stop: int
    token_ids: TokenIds
    exact: bool
    block_ids: BlockIds
    continues: str | None = None
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Lesson:
    """The reader's exact KV stands at `source.start` to `source.stop`: learn from it.

    whole: these are all the tokens that could have been reused, not the first ones alone.
    """

    request_id: str
    source: Source
    whole: bool
    block_ids: BlockIds


@dataclass(slots=True)
class StepWork:
    """What the workers do in one step.

    drops: donors that are forgotten. reset: all of them, and what was learned, as after a change of
    the model's weights. released: requests that ended and whose blocks were held
    for this step's captures and lessons; they are free when it is done.
    """

    drops: list[str] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    lessons: list[Lesson] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    reset: bool = False

    def __bool__(self) -> bool:
        return any(
            (
                self.reset,
                self.drops,
                self.loads,
                self.measures,
                self.captures,
                self.lessons,
                self.released,
            )
        )


@dataclass(frozen=True, slots=True)
class PairName:
    """A pair of agents of one tenant."""

    tenant: str
    donor: str
    reader: str


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """A deviation before it is divided: `[2 * layers]` float64, keys of all layers, then values.

    error: sums of squared differences. energy: sums of squares of the exact KV.
    """

    error: NDArray[np.float64]
    energy: NDArray[np.float64]

    def plus(self, other: Sums) -> Sums:
        """Over the heads of both."""
        return Sums(self.error + other.error, self.energy + other.energy)

    def deviation(self) -> float:
        """Relative deviation, as `kvcmas.core.deviation.relative_deviation` defines it."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(self.error == 0, 0.0, self.error / self.energy)
        return float(np.sqrt(ratios.mean()))


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank knows of a pair.

    seen: tokens learned from. version: counts the fits of its correction; 0 as long as there is
    none that is better than nothing. audited, blind: running means of the deviation of whole runs
    with the correction and without, `None` before the first. distance: between the two agents.
    """

    seen: int
    version: int
    audits: int = 0
    audited: float | None = None
    blind: float | None = None
    distance: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Expected log deviation energy of each token of a donor for a reader: where landmarks go.

    At a distance of d tokens from the origin, with f = log(d + 8), the score of token t is
    `base[t] + far * f + far_squared * f * f`. base: `[tokens]` float32.
    """

    base: NDArray[np.float32]
    far: float
    far_squared: float


@dataclass(slots=True)
class Report:
    """What happened in the workers since the last report.

    captured: donors that were taken, by the number of ranks that hold them; one that some rank
        could not take is missing there. deviations: by request, span and end of the head.
    facts, scores: by rank, pair (and donor); the newest counts. nbytes: by kind, summed.
    seconds: by stage (load, measure, capture, learn), of the slowest rank.
    failed: requests with a load that could not be done.
    """

    captured: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    deviations: dict[tuple[str, int, int], Sums] = field(default_factory=dict)
    facts: dict[tuple[int, PairName], Facts] = field(default_factory=dict)
    scores: dict[tuple[int, PairName, str], Scores] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return any(
            (
                self.captured,
                self.refused,
                self.deviations,
                self.facts,
                self.scores,
                self.nbytes,
                self.seconds,
                self.failed,
            )
        )

    def merge(self, other: Report) -> Report:
        """The reports of two ranks as one."""
        captured = dict(self.captured)
        for segment, ranks in other.captured.items():
            captured[segment] = captured.get(segment, 0) + ranks
        deviations = dict(self.deviations)
        for name, sums in other.deviations.items():
            mine = deviations.get(name)
            deviations[name] = sums if mine is None else mine.plus(sums)
        nbytes = {
            kind: self.nbytes.get(kind, 0) + other.nbytes.get(kind, 0)
            for kind in self.nbytes | other.nbytes
        }
        seconds = {
            stage: max(self.seconds.get(stage, 0.0), other.seconds.get(stage, 0.0))
            for stage in self.seconds | other.seconds
        }
        return Report(
            captured,
            self.refused | other.refused,
            deviations,
            self.facts | other.facts,
            self.scores | other.scores,
            nbytes,
            seconds,
            self.failed | other.failed,
        )
