"""Donors of a plan, held from the look-up until the request ends."""

from __future__ import annotations

from typing import Any

from kvcmas.methods.donors import Found
from kvcmas.methods.library import DonorLibrary
from kvcmas.workflow.plan import Reuse
from kvcmas.workflow.prompt import Prompt


def pin(library: DonorLibrary[Any], prompt: Prompt, segment: str, notes: list[str]) -> bool:
    """Pin a donor for the request; if it has left since it was found, note that."""
    if library.pin(prompt.request_id, [segment]):
        return True
    notes.append(f"segment {segment} left the store after it was found")
    return False


def reuse_prefix(
    library: DonorLibrary[Any], prompt: Prompt, found: Found, notes: list[str]
) -> list[Reuse]:
    """The exact prefix as a pinned span, if there is one."""
    hit = found.prefix
    if hit is None or not pin(library, prompt, hit.segment, notes):
        return []
    return [Reuse(0, hit.length, hit.segment, 0, exact=True)]
