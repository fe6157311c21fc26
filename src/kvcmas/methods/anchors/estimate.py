"""From distances to predictions: of a shared text, and of the fixed text behind one."""

from __future__ import annotations

from collections.abc import Sequence

from kvcmas.core.rope import Rope
from kvcmas.methods.anchors.distances import channel_distances, token_distances
from kvcmas.methods.anchors.known import Placeholder
from kvcmas.methods.anchors.pool import Anchor
from kvcmas.methods.anchors.prediction import Part, Prediction
from kvcmas.methods.anchors.states import Stretch
from kvcmas.methods.anchors.weights import softmax_weights


def of_text(rope: Rope, text: Placeholder, keys: int, sharp: bool) -> Prediction:
    """The reader's own deviation, or the anchors' with weights per token.

    keys: channels of keys. sharp: as for `softmax_weights`.
    """
    if text.own is not None:
        return Prediction([Part.alone(text.own)], text.at)
    deltas = [anchor.deltas[text.edge] for anchor in text.anchors]
    bases = [anchor.base for anchor in text.anchors]
    distances = token_distances(text.text(rope), text.at, bases, deltas, keys)
    of_keys, of_values = (softmax_weights(each, sharp) for each in distances)
    parts = [
        Part(delta, of_keys[number, None, :, None], of_values[number, None, :, None])
        for number, delta in enumerate(deltas)
    ]
    return Prediction(parts, text.at)


def of_following(
    rope: Rope, text: Placeholder, anchors: Sequence[Anchor], keys: int, sharp: bool
) -> Prediction:
    """The deviation of the fixed text behind `text`, with weights per channel.

    anchors: those that know it; the rest as for `of_text`.
    """
    deltas = [Stretch(0, anchor.following[text.edge].delta) for anchor in anchors]
    if text.own is not None:
        return Prediction([Part.alone(deltas[0])], 0)
    bases = [anchor.base for anchor in anchors]
    weights = softmax_weights(channel_distances(text.text(rope), text.at, bases), sharp)
    weights = weights[:, 1:, None]  # [anchors, layers - 1, 1, channels]
    parts = [
        Part(delta, weights[number, ..., :keys], weights[number, ..., keys:])
        for number, delta in enumerate(deltas)
    ]
    return Prediction(parts, 0)
