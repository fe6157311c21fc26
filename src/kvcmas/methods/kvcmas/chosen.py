"""A run of a request, and the donor that it may be taken from."""

from __future__ import annotations

from dataclasses import dataclass

from kvcmas.methods.donors import Donor, Run
from kvcmas.methods.kvcmas.pair import Pair


@dataclass(frozen=True, slots=True)
class Chosen:
    """A run of a request in flight, and its donor, which is pinned.

    pair: the donor's agent and the reader; with a second exact reader where its deviation serves.
    origin: position at which the text shared with the donor begins.
    corrected: the pair's correction is added to what is reused of the donor.
    """

    run: Run
    donor: Donor
    pair: Pair
    origin: int
    corrected: bool = False
