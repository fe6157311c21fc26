"""Whether a run is reused, or why not."""

from __future__ import annotations

from dataclasses import dataclass

from kvcmas.methods.kvcmas.book import CorrectionBook, Pair, PairState
from kvcmas.methods.kvcmas.config import Dial, KvcmasConfig
from kvcmas.methods.kvcmas.requests import Chosen
from kvcmas.methods.kvcmas.selection import SHORT

_WORTH_LEARNING = 256  # shorter runs teach a pair too little to be worth a cold start
_RETRY = 8  # refused short runs are tried again at every eighth


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
    dial: Dial, chosen: Chosen, has_second: bool, book: CorrectionBook, config: KvcmasConfig
) -> Refusal | None:
    """Why a run is not reused, or `None`.

    has_second: whether a second exact reader's deviation is kept for the whole run.
    """
    pair = chosen.pair
    if pair.donor == pair.reader:
        return None
    worth = len(chosen.run) >= _WORTH_LEARNING and learnable(chosen, config)
    plain = book.pairs.get(Pair(pair.donor, pair.reader))
    seen = plain.seen if plain is not None else 0
    if worth and seen < dial.cold_tokens:
        return Refusal(
            f"cold start, {pair.donor}>{pair.reader} has seen {seen} of {dial.cold_tokens} tokens",
            teaches=True,
        )
    current = book.pairs.get(pair)
    audited = current.audited if current is not None else None
    if audited is not None and audited > dial.audit_limit:
        return Refusal(
            f"{pair.name} was measured at a deviation of {audited:.3f}, above the limit "
            f"{dial.audit_limit:g}",
            teaches=False,
        )
    short = book.pairs.get(short_pair(chosen)) if is_short(chosen) else None
    answers = not short_pair(chosen).donor
    if short is not None and _fails(short, 1 if answers else 2):
        what = "answers read first" if answers else "short runs"
        return Refusal(
            f"heads of {what} disagreed in {short.failed} of {short.tried} for "
            f"{pair.reader if answers else pair.name}",
            teaches=False,
        )
    if config.exact_readers > 1 and worth and chosen.donor.info.exact and not has_second:
        return Refusal("second exact reader of this segment", teaches=True)
    return None


def is_short(chosen: Chosen) -> bool:
    """Whether a run is so short that it is reused at the first try or not at all."""
    return len(chosen.run) < SHORT


def short_pair(chosen: Chosen) -> Pair:
    """Whose short runs are counted together.

    An answer's KV as its author generated it is one kind, whoever the author: it stood in the
    author's own turn, for its readers it is quoted. It then comes under the pair without a donor.
    """
    donor = chosen.donor
    generated = donor.info.generated
    middle = donor.offset + len(chosen.run) // 2
    if generated is not None and middle >= generated:
        return Pair("", chosen.pair.reader)
    return chosen.pair


def _fails(state: PairState, needed: int) -> bool:
    """Whether short runs mostly had to be computed, `needed` times at least; counts a refusal."""
    if state.failed < needed or 2 * state.failed <= state.tried:
        return False
    state.refused += 1
    return state.refused % _RETRY != 0
