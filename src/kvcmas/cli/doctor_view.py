"""How the reports of both doctors end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvcmas.engines.transformers.doctor_report import DoctorReport
    from kvcmas.engines.vllm.doctor_report import VllmReport


class Say(Protocol):
    """Prints a line."""

    def __call__(self, line: str, style: str = "") -> None:
        """The line, in a style of rich."""


def show_verdict(report: DoctorReport | VllmReport, say: Say) -> None:
    """Notes, what failed and why, and the verdict."""
    for note in report.notes:
        say(f"Note: {note}")
    for check in report.failed:
        say(f"Failed: {check.sentence()}", "bold red")
    for reason in report.reasons:
        say(f"Reason: {reason}")
    say(f"{report.model}: {report.verdict}", "bold green" if report.verdict == "supported" else "")
