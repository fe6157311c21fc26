"""What one request holds while it runs: ids, positions and KV, all indexed by position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcmas.core.segment import LAYER, SegmentKV
from kvcmas.engines.transformers.cache import PlanCache
from kvcmas.engines.transformers.forward import ModelRunner
from kvcmas.engines.transformers.layerwise import LayerHooks
from kvcmas.workflow.prompt import Prompt


class RequestState:
    """Buffers of one request, allocated once for the prompt and all that may be generated.

    runner: of the model that computes it.
    token_ids: `[capacity]` int64; ids behind `filled` are not set yet.
    positions: `[1, capacity]` int64, the number of each token.
    filled: tokens that hold KV.
    """

    def __init__(self, runner: ModelRunner, prompt: Prompt, new_tokens: int) -> None:
        capacity = len(prompt) + new_tokens
        device = runner.device
        self.runner = runner
        self.prompt = prompt
        self.cache = PlanCache(runner.shape, capacity)
        self.token_ids = torch.empty(capacity, dtype=torch.int64, device=device)
        self.token_ids[: len(prompt)] = torch.tensor(prompt.token_ids)
        self.positions = torch.arange(capacity, device=device)[None]
        self.filled = 0

    def segment(self, start: int, stop: int) -> SegmentKV:
        """Tokens `[start, stop)` as views on the buffers."""
        return SegmentKV(
            self.cache.key_buffer[:, :, start:stop],
            self.cache.value_buffer[:, :, start:stop],
            self.token_ids[start:stop],
            self.positions[:, start:stop],
        )

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.cache.key_buffer.shape[LAYER]

    def compute(self, index: Tensor, hooks: Sequence[LayerHooks] = ()) -> Tensor:
        """One pass over some of the prompt's tokens, the last one among them.

        Args:
            index: `[tokens]` int64 on the CPU, ascending positions.
            hooks: watch or change what each layer does; with one that leaves tokens out, the
                pass is run as one with holes.

        Returns:
            `[vocab]` float32, logits behind the prompt.
        """
        length, tokens = len(self.prompt), index.shape[0]
        start = int(index[0])
        contiguous = length - start == tokens and not any(hook.narrows for hook in hooks)
        if contiguous:
            ids, positions = self.token_ids[start:length], self.positions[0, start:length]
        else:
            positions = index.to(self.runner.device)
            ids = self.token_ids[positions]
        logits = self.runner.forward(
            self.cache,
            ids,
            positions,
            filled=length,
            start=start,
            contiguous=contiguous,
            hooks=hooks,
        )
        self.filled = length
        return logits[0]

    def append(self, token_ids: Tensor, logits: int = 1) -> Tensor:
        """One pass over tokens behind all that is filled.

        Args:
            token_ids: `[tokens]` int64, on any device.
            logits: how many of the last tokens to return logits for.

        Returns:
            `[logits, vocab]` float32.
        """
        start = self.filled
        stop = start + token_ids.shape[0]
        self.token_ids[start:stop] = token_ids
        rows = self.runner.forward(
            self.cache,
            self.token_ids[start:stop],
            self.positions[0, start:stop],
            filled=stop,
            start=start,
            contiguous=True,
            logits=logits,
        )
        self.filled = stop
        return rows
