"""The demo in one line, and what has to be said plainly."""

from __future__ import annotations

from typing import Final

from kvcmas.bench.demo.results import Sums

_FEW_EQUAL: Final = 0.9


def summary_line(method: str, readers: Sums) -> str:
    """What the readers computed, waited for and agreed on."""
    return (
        f"{method}: readers computed {_percent(readers.computed, readers.prompt)} of their "
        f"prompts' tokens ({_percent(readers.nonshared_computed, readers.prompt)} without "
        f"sharing), TTFT {readers.ttft_ratio:.2f}x (median {readers.ttft_s:.2f} s instead of "
        f"{readers.nonshared_ttft_s:.2f} s, {readers.turns} turns), "
        f"{_percent(readers.same, readers.compared)} of tokens equal the exact run "
        f"(KL {readers.kl:.4f})"
    )


def verdict(readers: Sums) -> str:
    """Where sharing did worse than no sharing, in words; empty when it did not."""
    faults: list[str] = []
    if readers.reused == 0:
        faults.append("Nothing was reused between the agents.")
    elif readers.computed >= readers.nonshared_computed:
        faults.append("Sharing saved nothing: the readers computed no fewer tokens than without.")
    if readers.ttft_s >= readers.nonshared_ttft_s:
        faults.append(
            f"Sharing was not faster: a reader's first token took {readers.ttft_ratio:.2f} times "
            "as long as without it."
        )
    if readers.compared and readers.same < _FEW_EQUAL * readers.compared:
        faults.append(
            f"Sharing changed the answers: only {_percent(readers.same, readers.compared)} of the "
            "tokens equal the exact run."
        )
    return " ".join(faults)


def _percent(part: int, whole: int) -> str:
    # Rounding must not make "all" of "nearly all".
    if not whole:
        return "n/a"
    share = 100 * part / whole
    return f"{share:.1f}%" if part < whole and share >= 99 else f"{share:.0f}%"
