"""The donor library without KV: what is added, continued, gone, and within a tenant's quota."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from kvcmas.errors import ConfigError, InputError
from kvcmas.methods.library import DonorLibrary
from kvcmas.store.content import TokenRun
from kvcmas.store.info import Put
from kvcmas.workflow.prompt import Prompt

from ..engines.tiny import random_ids

Library = DonorLibrary[TokenRun]
NAMES = count()
ROLE, DOCUMENT, TASK = random_ids(40, 1), random_ids(100, 2), random_ids(30, 3)
BYTES = 7


def ask(ids: list[int], agent: str = "a", tenant: str = "") -> Prompt:
    return Prompt(np.array(ids, dtype=np.int64), agent, f"request-{next(NAMES)}", tenant)


def keep(
    library: Library, ids: list[int], start: int = 0, agent: str = "a", tenant: str = ""
) -> Put:
    """Add `ids[start:]`."""
    tokens = np.array(ids, dtype=np.int64)
    content = TokenRun(tokens[start:], BYTES * (len(ids) - start))
    put = library.add(ask(ids, agent, tenant), tokens, start, len(ids), True, content)
    library.check_integrity()
    return put


def test_finds_as_with_kv() -> None:
    library = Library(1 << 20)
    first = keep(library, ROLE)
    second = keep(library, [7] * 20 + DOCUMENT, 20, "b")
    found = library.find(ask(ROLE + TASK + DOCUMENT + TASK))
    assert found.prefix is not None
    assert (found.prefix.segment, found.prefix.length) == (first.id, 40)
    (run,) = found.runs
    assert (run.start, run.stop, run.sources[0].segment) == (70, 170, second.id)
    assert library.content(str(second.id)).tokens().tolist() == DOCUMENT
    assert library.store.nbytes == BYTES * 140


def test_own_donors_are_told_by_their_tokens() -> None:
    library = Library(1 << 20)
    keep(library, ROLE + DOCUMENT, 20)
    changed = [*ROLE[:30], 300, *ROLE[31:]]
    for ids, own in ((ROLE, True), (changed, False)):
        runs = library.find(ask(ids + DOCUMENT + TASK)).runs
        assert [donor.own for run in runs for donor in run.sources] == [own]


class TestContinued:
    def test_names_the_shorter_beginning(self) -> None:
        library = Library(1 << 20)
        short = keep(library, ROLE)
        assert short.continued is None
        long = keep(library, ROLE + DOCUMENT)
        assert long.continued == short.id
        assert [info.id for info in library.store.infos()] == [long.id]
        assert keep(library, ROLE + DOCUMENT + TASK, agent="b").continued is None
        assert keep(library, TASK + DOCUMENT[::-1], 10).continued is None

    def test_not_when_it_was_evicted_to_make_room(self) -> None:
        """Its KV is gone by then: there is nothing to go on with."""
        library = Library(BYTES * 150)
        short = keep(library, ROLE)
        long = keep(library, ROLE + DOCUMENT)
        assert long.continued is None
        assert long.evicted == (short.id,)

    def test_not_when_the_longer_one_is_refused(self) -> None:
        library = Library(BYTES * 139)
        short = keep(library, ROLE)
        long = keep(library, ROLE + DOCUMENT)
        assert (long.id, long.continued) == (None, None)
        assert [info.id for info in library.store.infos()] == [short.id]

    def test_while_it_is_pinned_it_goes_with_its_last_reader(self) -> None:
        library = Library(1 << 20)
        short = str(keep(library, ROLE).id)
        for reader in ("one", "two"):
            assert library.pin(reader, [short]) == {short}
        assert keep(library, ROLE + DOCUMENT).continued == short
        assert library.content(short).tokens().tolist() == ROLE
        assert library.release("one") == frozenset()
        assert library.release("two") == {short}
        assert library.release("two") == frozenset()


class TestQuota:
    def test_one_tenant_cannot_push_out_another(self) -> None:
        library = Library(BYTES * 250, tenant_bytes=BYTES * 120)
        kept = keep(library, DOCUMENT, tenant="y").id
        first = keep(library, random_ids(60, 10), tenant="x").id
        second = keep(library, random_ids(60, 11), tenant="x").id
        library.pin("reader", [str(first)])
        assert keep(library, random_ids(60, 12), tenant="x").evicted == (second,)
        for number in range(13, 30):
            put = keep(library, random_ids(60, number), tenant="x")
            assert put.id and len(put.evicted) == 1
        assert {info.id for info in library.tenant_infos("y")} == {kept}
        assert first in {info.id for info in library.tenant_infos("x")}
        notes = library.find(ask(random_ids(50, 99), tenant="x")).notes
        assert "to keep the budget of 1750 bytes, 840 for a tenant" in notes[1]

    def test_too_large_for_the_tenant(self) -> None:
        library = Library(1 << 20, tenant_bytes=BYTES * 99)
        put = keep(library, DOCUMENT)
        assert put.id is None
        assert "the whole quota of the tenant is 693" in put.reason
        assert "quota of the tenant" in library.find(ask(DOCUMENT)).notes[1]

    def test_wrong(self) -> None:
        with pytest.raises(ConfigError, match="tenant_bytes must be an integer >= 0"):
            Library(1, tenant_bytes=-1)


def test_content_of_another_length() -> None:
    library, ids = Library(1 << 20), np.array(DOCUMENT)
    with pytest.raises(InputError, match=r"positions \[10, 90\) got content of 100 tokens"):
        library.add(ask(DOCUMENT), ids, 10, 90, True, TokenRun(ids, 1))
    assert len(library.store) == 0
