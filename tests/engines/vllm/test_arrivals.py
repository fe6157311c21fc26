"""What is known of a request when it arrives."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from kvcmas.engines.vllm.arrivals import tenant_of, tracked_of
from kvcmas.engines.vllm.options import VllmOptions
from kvcmas.engines.vllm.roles import RoleNames
from kvcmas.engines.vllm.tracked import Tracked

from .fake_requests import Params, ids, request


def arrived(on_cpu: bool = False, refused: str | None = None, **more: Any) -> Tracked:
    given = request("r", ids(1, 40), "a", **more)
    tracked = tracked_of(given, VllmOptions(), RoleNames(), refused, on_cpu=on_cpu)
    assert tracked is not None
    return tracked


class TestSeeds:
    DRAWN = Params(seed=5, temperature=0.7)

    def test_are_served_exactly_on_cpus_and_kept_as_donors(self) -> None:
        tracked = arrived(on_cpu=True, sampling_params=self.DRAWN)
        assert tracked.refused is not None and "seeded request" in tracked.refused
        assert not tracked.keeps_nothing

    def test_reuse_on_other_devices(self) -> None:
        assert arrived(on_cpu=False, sampling_params=self.DRAWN).refused is None

    @pytest.mark.parametrize(
        "params", [Params(temperature=0.7), Params(seed=5), Params(seed=5, temperature=0.0)]
    )
    def test_without_a_generator_reuse(self, params: Params) -> None:
        assert arrived(on_cpu=True, sampling_params=params).refused is None

    def test_seed_zero_is_a_seed(self) -> None:
        params = Params(seed=0, temperature=1.0)
        assert arrived(on_cpu=True, sampling_params=params).refused is not None

    def test_what_holds_for_the_engine_comes_first(self) -> None:
        tracked = arrived(on_cpu=True, refused="a window only", sampling_params=self.DRAWN)
        assert tracked.refused == "a window only"
        assert tracked.keeps_nothing


SALTS = ["", "x", "X", "x ", " x", "../../x", "x\0", "\x01", '\x01["x"]', '["x"]', "é", "e\u0301"]
SALTS += ["\x01" + '\x01["x"]', "👩\u200d👧", "x" * 10_000]


def test_every_salt_is_a_tenant_of_its_own() -> None:
    """Case 17; among them salts that look like the names of other tenants."""
    names = {salt: tenant_of(request("r", [1], cache_salt=salt)) for salt in SALTS}
    for one, other in combinations(SALTS, 2):
        assert names[one] != names[other], (one, other)
    assert tenant_of(request("r", [1], cache_salt=None)) == names[""]
