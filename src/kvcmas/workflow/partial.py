"""Reused spans whose tokens are computed in some of the model's layers. Plain data, no torch.

    layer      Layers(2, 4)              Selected(2, 3)
      5        reused                    reused, but 3 tokens computed
      4        reused                    reused, but 3 tokens computed
      3        computed                  reused, but 3 tokens computed
      2        computed                  reused, but 3 tokens computed
      1        reused                    computed: the KV is compared with what was reused
      0        reused                    computed

Work is counted in token-layers: a token that goes through 4 of 32 layers counts as 4, and as an
eighth of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcmas.errors import PlanError


@dataclass(frozen=True, slots=True)
class Layers:
    """All tokens of the span go through layers `[start, stop)`; the other layers' KV is reused.

    With `start > 0` the hidden states that enter layer `start` are the donor's
    (`Method.fill_hidden`); with `start == 0` they are the tokens' embeddings.

    Raises:
        PlanError: an empty or negative range.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise PlanError(
                f"computed layers must be a range that is not empty, got [{self.start}, "
                f"{self.stop}); leave `partial` out to reuse all layers"
            )

    @property
    def depth(self) -> int:
        """The fewest layers that a model must have."""
        return self.stop

    def token_layers(self, tokens: int, layers: int) -> int:
        """Work for a span of `tokens` on a model of `layers`."""
        return tokens * (self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Selected:
    """All tokens go through the first layers, and those that deviate most through all.

    layers: computed for all tokens of the span. Layer 0 never deviates, so 2 is the fewest that
        can tell tokens apart.
    count: tokens that go on, those whose KV of layer `layers - 1` differs most from the reused KV
        (squared differences of keys and values, summed over heads and channels).

    Raises:
        PlanError: no layer, or a negative count.
    """

    layers: int
    count: int

    def __post_init__(self) -> None:
        if self.layers < 1 or self.count < 0:
            raise PlanError(
                "tokens are selected behind at least 1 layer, and 0 or more of them, got "
                f"{self.layers} layers and {self.count} tokens"
            )

    @property
    def depth(self) -> int:
        """The fewest layers that a model must have."""
        return self.layers

    def token_layers(self, tokens: int, layers: int) -> int:
        """Work for a span of `tokens` on a model of `layers`."""
        return tokens * self.layers + self.count * (layers - self.layers)


Partial = Layers | Selected
