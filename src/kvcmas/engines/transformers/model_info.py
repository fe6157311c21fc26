"""What the methods need to know of a loaded model."""

from __future__ import annotations

from transformers import PreTrainedModel

from kvcmas.core.model_info import ModelInfo
from kvcmas.core.rope import Rope
from kvcmas.engines.transformers.fingerprint import fingerprint
from kvcmas.engines.transformers.loading import LoadedModel
from kvcmas.engines.transformers.support import inspect_support


def model_info(model: LoadedModel | PreTrainedModel) -> ModelInfo:
    """Shapes, rotation and fingerprint of a model.

    A bare model of transformers has its weights read for the fingerprint, which then covers no
    tokenizer.

    Raises:
        UnsupportedRopeError: the model's keys cannot be moved.
    """
    if isinstance(model, LoadedModel):
        support, digest, bare = model.support, model.fingerprint.digest, model.model
    else:
        support, digest, bare = inspect_support(model), fingerprint(model).digest, model
    return ModelInfo(
        layers=support.layers,
        kv_heads=support.kv_heads,
        head_dim=support.head_dim,
        # Models whose values have another size than their keys are refused when loaded.
        value_dim=support.head_dim,
        rope=Rope.from_config(bare.config),
        window=support.window or None,
        fingerprint=digest,
    )
