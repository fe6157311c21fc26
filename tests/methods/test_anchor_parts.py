"""Gate, weights, pool, states and contents on hand-made numbers."""

from __future__ import annotations

from math import inf, log2

import numpy as np
import pytest
import torch

from kvcmas.methods.anchors.contents import Content, Contents
from kvcmas.methods.anchors.distances import channel_distances, token_distances, value_distances
from kvcmas.methods.anchors.pool import Anchor, Pool
from kvcmas.methods.anchors.states import Factored, Full, Sparse, Stretch
from kvcmas.methods.anchors.weights import entropy_bits, is_new, softmax_weights


class TestGate:
    def test_entropy(self) -> None:
        assert entropy_bits(torch.zeros(8)) == pytest.approx(3.0)
        assert entropy_bits(torch.tensor([0.0, 1000.0])) == pytest.approx(0.0)
        # Shares of 1/4 and 3/4.
        assert entropy_bits(torch.tensor([log2(3) * np.log(2), 0.0])) == pytest.approx(0.8113, 1e-3)

    @pytest.mark.parametrize(
        ("distances", "gamma", "new"),
        [
            ([], 0.9, True),
            ([1.0], 0.9, True),
            ([1.0, 1.0], 0.99, True),
            ([1.0, 1.0], 1.0, False),
            ([0.0, 50.0, 50.0], 0.01, False),
            ([1.0986, 0.0], 0.82, False),
            ([1.0986, 0.0], 0.80, True),
            ([3.0, 3.0, 3.0, 3.0], 0.9, True),
        ],
    )
    def test_new_above_gamma(self, distances: list[float], gamma: float, new: bool) -> None:
        assert is_new(torch.tensor(distances), gamma) is new


class TestWeights:
    def test_published_ones_are_nearly_uniform(self) -> None:
        """Distances of the size that keys and values have: one text is three times nearer."""
        distances = torch.tensor([[0.05], [0.15], [0.15], [0.15]])
        published = softmax_weights(distances)
        assert published.sum().item() == pytest.approx(1)
        assert published[0].item() == pytest.approx(0.25, abs=0.03)
        # Sharp: exp(-10) against exp(-30).
        assert softmax_weights(distances, sharp=True)[0].item() > 0.999

    def test_infinite_ones_do_not_count(self) -> None:
        distances = torch.tensor([[1.0, inf, inf], [1.0, 2.0, inf]])
        for sharp in (False, True):
            weights = softmax_weights(distances, sharp)
            assert weights.tolist() == [[0.5, 0.0, 0.0], [0.5, 1.0, 0.0]]

    def test_the_same_text_takes_all_when_sharp(self) -> None:
        weights = softmax_weights(torch.tensor([0.0, 1e-6, 2.0]), sharp=True)
        assert weights.tolist() == [1.0, 0.0, 0.0]


def anchor(tokens: int = 4, used: int = 0) -> Anchor:
    return Anchor(Stretch(0, Full(torch.zeros(2, tokens, 6))), used=used)


class TestPool:
    def test_the_least_used_of_the_five_oldest_leaves(self) -> None:
        pool = Pool(10)
        anchors = [anchor(used=used) for used in (5, 2, 9, 2, 7, 0, 0, 0, 0, 0, 0)]
        assert [pool.add(one) for one in anchors] == [None] * 11  # one more than its size
        assert pool.add(anchor()) is anchors[1]
        assert len(pool) == 11
        # The five oldest have moved on to one that was never used, and then to the next.
        assert pool.add(anchor()) is anchors[5]
        assert pool.add(anchor()) is anchors[6]

    def test_which_anchors_reach(self) -> None:
        pool = Pool(3)
        short, long = anchor(4), anchor(9)
        pool.add(short)
        pool.add(long)
        assert pool.reaching(5) == [long]
        assert pool.reaching(4) == [short, long]
        long.deltas["a>b"] = long.base
        assert pool.of_edge("a>b") == [long]
        assert pool.nbytes == 4 * 2 * 6 * (4 + 9 + 9)


class TestStates:
    channels = torch.randn(2, 20, 10, generator=torch.Generator().manual_seed(3))

    def test_full(self) -> None:
        state = Full(self.channels)
        assert state.nbytes == 4 * 2 * 20 * 10
        assert torch.equal(state.rows(1, 3, 9), self.channels[1, 3:9])

    def test_factored(self) -> None:
        state = Factored.of(self.channels, 4, 3)
        assert (state.tokens, state.nbytes) == (20, 4 * 2 * 3 * (2 * 20 + 10))
        whole = Factored.of(self.channels, 4, 99)
        torch.testing.assert_close(whole.rows(1, 3, 9), self.channels[1, 3:9], rtol=1e-5, atol=1e-5)

    def test_sparse(self) -> None:
        state = Sparse.of(self.channels, 0.1)
        assert (state.tokens, state.nbytes) == (20, 8 * 2 * 20)
        kept = torch.stack([state.rows(layer, 0, 20) for layer in (0, 1)])
        bound = self.channels.abs().flatten(1).sort(dim=1, descending=True).values[:, 19]
        expected = torch.where(self.channels.abs() >= bound[:, None, None], self.channels, 0.0)
        assert torch.equal(kept, expected)
        assert torch.equal(Sparse.of(self.channels, 1.0).rows(0, 2, 5), self.channels[0, 2:5])


class TestDistances:
    text = torch.zeros(2, 4, 6)

    def test_values_alone_count_for_the_gate(self) -> None:
        base = torch.ones(2, 9, 6)
        base[..., :4] = 50  # keys
        found = value_distances(self.text, 1, [Stretch(0, Full(base))], keys=4)
        assert found.tolist() == [pytest.approx((2 * 4 * 2) ** 0.5)]

    def test_tokens(self) -> None:
        base = torch.ones(2, 3, 6)
        base[..., 4:] = 3
        stretch = Stretch(0, Full(base))  # of the text, which begins with token 1, it has two
        keys, values = token_distances(self.text, 1, [stretch], [stretch], keys=4)
        assert keys.tolist() == [[1.0, 1.0, inf, inf]]
        assert values.tolist() == [[3.0, 3.0, inf, inf]]

    def test_channels(self) -> None:
        base = torch.arange(6.0).expand(2, 4, 6).contiguous()
        found = channel_distances(self.text, 0, [Stretch(0, Full(base))])
        assert found.tolist() == [[[0, 1, 2, 3, 4, 5]] * 2]


class TestContents:
    ids = np.arange(100, 160)

    def test_edges_may_differ(self) -> None:
        contents = Contents(4)
        content = contents.use(Content(self.ids))
        longer = np.concatenate([[1, 2], self.ids[3:], [7]])
        located = contents.locate(longer)
        assert located is not None
        assert (located.content, located.start, located.stop, located.at) == (content, 2, 59, 3)
        assert contents.locate(np.arange(500, 560)) is None
        assert contents.locate(self.ids[20:50]) is None  # a part in the middle is another text

    def test_the_oldest_leaves(self) -> None:
        contents = Contents(2)
        first = contents.use(Content(self.ids))
        contents.use(Content(self.ids + 1000))
        assert contents.use(Content(self.ids.copy())) is first
        contents.use(Content(self.ids + 2000))
        assert contents.locate(self.ids + 1000) is None
        assert contents.locate(self.ids) is not None
