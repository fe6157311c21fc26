"""What the scheduler knows of what the workers have learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcmas.core.features import Features
from kvcmas.core.landmarks import LandmarkModel, pick
from kvcmas.engines.vllm.messages import Facts, PairName, Report, Scores
from kvcmas.engines.vllm.mirror import Mirror
from kvcmas.methods.donors import Donor, Run
from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.pair import Pair
from kvcmas.store.info import SegmentInfo

NAME, PAIR = PairName("t", "a", "b"), Pair("a", "b")


def told(*facts: Facts, ranks: int | None = None) -> Mirror:
    """A mirror to which each rank has told its facts."""
    mirror = Mirror(len(facts) if ranks is None else ranks)
    for rank, one in enumerate(facts):
        mirror.take(Report(facts={(rank, NAME): one}))
    return mirror


def chosen(offset: int, start: int, length: int, origin: int | None = None) -> Chosen:
    donor = Donor("segment", offset, SegmentInfo("a", "t", 0, "", True))
    run = Run(start, start + length, (donor,))
    return Chosen(run, donor, PAIR, start if origin is None else origin)


def flat(tokens: int, *high: int) -> Scores:
    base = np.zeros(tokens, dtype=np.float32)
    base[list(high)] = 1.0
    return Scores(base, 0.0, 0.0)


class TestFacts:
    def test_of_all_ranks_together(self) -> None:
        known = told(Facts(500, 2, 1, 0.3, None, 0.2), Facts(400, 3, 1, 0.4, None, 0.4)).of("t")
        assert known.seen(PAIR) == 400
        assert known.corrected(PAIR) and known.version(PAIR) == 5
        assert known.audited(PAIR) == pytest.approx(np.sqrt((0.09 + 0.16) / 2))
        assert known.distance("a", "b") == pytest.approx(0.3)

    def test_one_rank_alone_is_not_enough(self) -> None:
        known = told(Facts(500, 2, 1, 0.3), ranks=2).of("t")
        assert known.seen(PAIR) == 0 and known.version(PAIR) == 0
        assert not known.corrected(PAIR) and known.audited(PAIR) is None

    def test_a_rank_without_correction_or_audit(self) -> None:
        known = told(Facts(500, 2, 1, 0.3, None, 0.2), Facts(400, 0)).of("t")
        assert not known.corrected(PAIR)
        assert known.audited(PAIR) is None and known.distance("a", "b") is None

    def test_the_newest_count(self) -> None:
        mirror = told(Facts(10, 0))
        mirror.take(Report(facts={(0, NAME): Facts(20, 1)}))
        assert mirror.of("t").seen(PAIR) == 20 and mirror.of("t").corrected(PAIR)

    def test_tenants_know_nothing_of_each_other(self) -> None:
        assert told(Facts(10, 1)).of("u").seen(PAIR) == 0

    def test_totals_and_clear(self) -> None:
        mirror = told(Facts(10, 1))
        mirror.take(Report(facts={(0, PairName("t", "b", "a")): Facts(5, 0)}))
        assert mirror.totals() == {"pairs": 2, "corrected": 1}
        mirror.clear()
        assert mirror.totals() == {"pairs": 0, "corrected": 0}

    def test_there_is_no_second_reader(self) -> None:
        run = chosen(0, 10, 20)
        assert told(Facts(1, 1)).of("t").second(run.donor, 20) is None


class TestLandmarks:
    def test_are_the_highest_scores_behind_the_head(self) -> None:
        mirror = Mirror(1)
        mirror.take(Report(scores={(0, NAME, "segment"): flat(60, 6, 20, 30, 59)}))
        # Donor tokens 5 to 45 stand at 100 to 140, of which 4 are the head.
        assert mirror.of("t").landmarks(chosen(5, 100, 40), 4, 2) == (115, 125)

    def test_of_all_ranks_together(self) -> None:
        mirror = Mirror(2)
        mirror.take(Report(scores={(0, NAME, "segment"): flat(40, 10, 12)}))
        assert mirror.of("t").landmarks(chosen(0, 0, 40), 4, 1) == ()
        mirror.take(Report(scores={(1, NAME, "segment"): flat(40, 12, 30)}))
        assert mirror.of("t").landmarks(chosen(0, 0, 40), 4, 1) == (12,)

    def test_scores_of_too_few_tokens_say_nothing(self) -> None:
        mirror = Mirror(1)
        mirror.take(Report(scores={(0, NAME, "segment"): flat(30, 10)}))
        assert mirror.of("t").landmarks(chosen(0, 0, 40), 4, 1) == ()

    def test_no_more_than_there_are(self) -> None:
        mirror = Mirror(1)
        mirror.take(Report(scores={(0, NAME, "segment"): flat(10)}))
        assert mirror.of("t").landmarks(chosen(0, 50, 10), 7, 99) == (57, 58, 59)
        assert mirror.of("t").landmarks(chosen(0, 50, 10), 10, 1) == ()

    def test_donors_that_left_are_forgotten(self) -> None:
        mirror = Mirror(1)
        mirror.take(Report(scores={(0, NAME, "segment"): flat(40, 10)}))
        mirror.take(Report(scores={(0, NAME, "other"): flat(40, 10)}))
        mirror.forget({"segment"})
        assert mirror.scores(NAME, "segment") == [] and len(mirror.scores(NAME, "other")) == 1

    def test_are_expected_where_other_donors_have_some(self) -> None:
        mirror = Mirror(1)
        known = mirror.of("t")
        assert not known.scores_expected(PAIR, "segment")
        mirror.take(Report(scores={(0, NAME, "other"): flat(40, 10)}))
        assert known.scores_expected(PAIR, "segment")
        assert not known.scores_expected(PAIR, "other")
        assert not known.scores_expected(Pair("a", "c"), "segment")

    @pytest.mark.parametrize("origin", [80, 100, 130])
    def test_equal_the_picks_of_the_model_itself(self, origin: int) -> None:
        model, features = taught_model()
        base, far, far_squared = model.terms(features)
        mirror = Mirror(1)
        scores = Scores(base.numpy(), far, far_squared)
        mirror.take(Report(scores={(0, NAME, "segment"): scores}))
        run, head, count = chosen(20, 100, 150, origin), 8, 12
        distance = torch.arange(100 + head, 250) - origin
        part = Features(features.own[:, 20 + head : 170], features.window[20 + head : 170], None)
        picks = pick(model.predict(part, distance), count)
        expected = tuple(100 + head + spot for spot in picks)
        assert mirror.of("t").landmarks(run, head, count) == expected


def taught_model() -> tuple[LandmarkModel, Features]:
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(4, 600, 24, generator=generator)
    window = torch.randn(600, 16, generator=generator)
    features = Features(own, window, None)
    strength = (1 + window[:, :1].abs() + torch.arange(600)[:, None] / 200)[None]
    deviation = torch.randn(4, 600, 8, generator=generator) * strength
    model = LandmarkModel(4)
    model.observe(features, torch.arange(600), deviation)
    assert model.ready
    return model, features
