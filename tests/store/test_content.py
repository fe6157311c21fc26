"""What a store holds: KV, or tokens whose KV lies elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcmas.core.segment import SegmentKV
from kvcmas.errors import InputError
from kvcmas.store.content import Content, TokenRun
from kvcmas.store.info import Put, SegmentInfo
from kvcmas.store.segments import SegmentStore


def test_kv_and_tokens_are_alike() -> None:
    ids = torch.arange(5, 9)
    state = torch.zeros(1, 1, 4, 2)
    kv = SegmentKV(state, state, ids, ids[None])
    contents: list[Content] = [kv, TokenRun(np.arange(5, 9), kv.nbytes)]
    for content in contents:
        assert len(content) == 4
        assert content.nbytes == 2 * 4 * 2 * 4 + 2 * 4 * 8
        assert content.tokens().dtype == np.int64
        assert content.tokens().tolist() == content.clone().tokens().tolist() == [5, 6, 7, 8]


def test_tokens_are_not_copied() -> None:
    run = TokenRun(np.arange(3), 10)
    assert run.clone() is run
    store: SegmentStore[TokenRun] = SegmentStore(10)
    assert store.put(run, SegmentInfo("a", "", 0, "", True, "x")) == Put("x")
    assert store.get("x") is run
    assert store.nbytes == 10
    store.check_integrity()


@pytest.mark.parametrize(("shape", "nbytes"), [((2, 2), 8), ((), 8), ((4,), 0), ((4,), -1)])
def test_what_is_no_run(shape: tuple[int, ...], nbytes: int) -> None:
    with pytest.raises(InputError, match=r"needs ids \[tokens\] and at least 1 byte"):
        TokenRun(np.zeros(shape, dtype=np.int64), nbytes)
