"""Whether a run is reused, or why not."""

from __future__ import annotations

from dataclasses import dataclass

from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.config import Dial, KvcmasConfig
from kvcmas.methods.kvcmas.knowledge import Knowledge
from kvcmas.methods.kvcmas.shorts import ShortRuns, is_short, short_pair

_WORTH_LEARNING = 256  # shorter runs teach a pair too little to be worth a cold start


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a run is computed. teaches: it is learned from, so its KV must come out exact."""

    reason: str
    teaches: bool


def learnable(chosen: Chosen, config: KvcmasConfig) -> bool:
    """Whether a reader's exact KV of this run teaches anything about its donor."""
    pair, donor = chosen.pair, chosen.donor
    kind = donor.info.exact or config.base == "previous"
    return config.learn and kind and not donor.own and pair.donor != pair.reader


def refusal(
    dial: Dial, chosen: Chosen, knowledge: Knowledge, shorts: ShortRuns, config: KvcmasConfig
) -> Refusal | None:
    """Why a run is not reused, or `None`. Counts a short run that is refused."""
    pair, donor = chosen.pair, chosen.donor
    if pair.donor == pair.reader:
        return None
    worth = len(chosen.run) >= _WORTH_LEARNING and learnable(chosen, config)
    seen = knowledge.seen(pair.plain)
    if worth and seen < dial.cold_tokens:
        return Refusal(
            f"cold start, {pair.plain.name} has seen {seen} of {dial.cold_tokens} tokens",
            teaches=True,
        )
    audited = knowledge.audited(pair)
    if audited is not None and audited > dial.audit_limit:
        return Refusal(
            f"{pair.name} was measured at a deviation of {audited:.3f}, above the limit "
            f"{dial.audit_limit:g}",
            teaches=False,
        )
    if is_short(chosen) and (reason := _failing(chosen, shorts)):
        return Refusal(reason, teaches=False)
    wanted = config.exact_readers > 1 and worth and donor.info.exact
    if wanted and knowledge.second(donor, len(chosen.run)) is None:
        return Refusal("second exact reader of this segment", teaches=True)
    return None


def _failing(chosen: Chosen, shorts: ShortRuns) -> str:
    """What speaks against reusing a short run, or nothing."""
    whose = short_pair(chosen)
    answers = not whose.donor
    counts = shorts.refuse(whose, 1 if answers else 2)
    if counts is None:
        return ""
    what = "answers read first" if answers else "short runs"
    name = whose.reader if answers else whose.name
    return f"heads of {what} disagreed in {counts.failed} of {counts.tried} for {name}"
