"""DroidSpeak: some layers in a row are computed for the reused runs; the others' KV is reused.

    layer   L-1  reused          the hidden states stop here: nobody needs them
            ...  computed
          first  computed        entered by the donor's hidden states (the paper's E cache)
            ...  reused

With `first = 0` the tokens' embeddings enter and nothing has to be stored. With `first > 0` the
hidden states that entered layer `first` when the donor was computed are kept beside its KV, in the
same budget. A run whose donor has none (an answer that was generated token by token, or KV from
elsewhere) is computed from layer 0 on, which is noted in the plan.

Which layers to take is profiled: see `kvcmas.methods.layer_profile`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvcmas.core.model_info import ModelInfo
from kvcmas.core.segment import SegmentKV
from kvcmas.errors import ConfigError
from kvcmas.methods.base import Outcome
from kvcmas.methods.description import MethodDescription
from kvcmas.methods.donors import Donor, Run
from kvcmas.methods.fullshared import FullShared, FullSharedConfig
from kvcmas.methods.options import check_int
from kvcmas.workflow.partial import Layers
from kvcmas.workflow.plan import Plan, Reuse
from kvcmas.workflow.prompt import Prompt


@dataclass(frozen=True, slots=True)
class DroidSpeakConfig(FullSharedConfig):
    """Options of `droidspeak`, next to those of `fullshared`.

    first: the first layer that is computed for reused runs.
    layers: how many are computed; `None` takes a quarter of the model's, rounded up. The paper
        (arXiv 2411.02820) gives no numbers for all models: it profiles each pair of them.
    """

    first: int = 0
    layers: int | None = None

    def __post_init__(self) -> None:
        FullSharedConfig.__post_init__(self)
        check_int("first", self.first, 0)
        if self.layers is not None:
            check_int("layers", self.layers, 1)


@dataclass(frozen=True, eq=False)
class EncodedKV(SegmentKV):
    """KV with the hidden states that entered one layer.

    hidden: `[tokens, width]`. known: `[tokens]` bool, where `hidden` holds something.
    """

    hidden: Tensor
    known: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        own = (self.hidden, self.known)
        return super().nbytes + sum(tensor.numel() * tensor.element_size() for tensor in own)

    def slice(self, start: int, stop: int) -> EncodedKV:
        """As `SegmentKV.slice`."""
        return _encoded(super().slice(start, stop), self.hidden[start:stop], self.known[start:stop])

    def clone(self) -> EncodedKV:
        """As `SegmentKV.clone`."""
        return _encoded(super().clone(), self.hidden.clone(), self.known.clone())


class DroidSpeak(FullShared):
    """Reuses the exact prefix, and every stored run in all but some layers.

    Source: Liu et al., DroidSpeak, https://arxiv.org/abs/2411.02820. There the donor is another
    model of the same shape; here it is the same model behind another prompt.

    Raises:
        ConfigError: the layers go beyond the model's.
    """

    name: ClassVar[str] = "droidspeak"

    def __init__(self, info: ModelInfo, config: DroidSpeakConfig | None = None) -> None:
        config = config or DroidSpeakConfig()
        count = -(-info.layers // 4) if config.layers is None else config.layers
        self.first, self.last = config.first, config.first + count
        if self.last > info.layers:
            raise ConfigError(
                f"layers [{self.first}, {self.last}) go beyond the model's {info.layers}; set "
                "first and layers to less"
            )
        super().__init__(info, config)

    @property
    def boundaries(self) -> frozenset[int]:
        """The layer whose input is kept."""
        return frozenset((self.first,)) if self.first else frozenset()

    def span(self, run: Run, donor: Donor, notes: list[str]) -> Reuse:
        """The run with its computed layers, unless its KV is the reader's own."""
        span = super().span(run, donor, notes)
        if donor.own:
            return span
        first = self.first
        if first and self._hidden(span) is None:
            first = 0
            notes.append(
                f"[{run.start}, {run.stop}): the donor has no hidden states at layer "
                f"{self.first}; computed from layer 0 on"
            )
        return replace(span, partial=Layers(first, self.last))

    def fill_hidden(self, prompt: Prompt, span: Reuse, out: Tensor) -> None:
        """Write the donor's hidden states at layer `first`."""
        hidden = self._hidden(span)
        if hidden is None:
            super().fill_hidden(prompt, span, out)
        else:
            out.copy_(hidden)

    def finish(self, prompt: Prompt, outcome: Outcome | None) -> None:
        """Keep the hidden states beside the KV."""
        plan = self._plans.get(prompt.request_id)
        if plan is not None and outcome is not None and self.first in outcome.hidden:
            outcome = replace(outcome, kv=self._with_hidden(plan, outcome))
        super().finish(prompt, outcome)

    def _hidden(self, span: Reuse) -> Tensor | None:
        """`[len(span), width]`, or `None` when the donor lacks any of it."""
        donor = self.library.kv(span.segment)
        if not isinstance(donor, EncodedKV):
            return None
        part = donor.slice(span.offset, span.offset + len(span))
        return part.hidden if bool(part.known.all()) else None

    def _with_hidden(self, plan: Plan, outcome: Outcome) -> EncodedKV:
        kv, states = outcome.kv, outcome.hidden[self.first]
        hidden = states.new_zeros(len(kv), states.shape[1])
        hidden[: plan.length] = states
        known = torch.zeros(len(kv), dtype=torch.bool, device=states.device)
        for start, stop in outcome.computed:
            known[start : min(stop, plan.length)] = True
        # An exact prefix brings its own, so that a longer beginning does not lose them.
        for span in plan.reused():
            kept = self._hidden(span) if span.exact else None
            if kept is not None:
                hidden[span.start : span.stop] = kept
                known[span.start : span.stop] = True
        return _encoded(kv, hidden, known)


def _encoded(kv: SegmentKV, hidden: Tensor, known: Tensor) -> EncodedKV:
    return EncodedKV(kv.keys, kv.values, kv.token_ids, kv.positions, hidden, known)


DESCRIPTION = MethodDescription(
    name=DroidSpeak.name,
    summary="Some layers in a row are computed for every reused run; the others' KV is reused.",
    config=DroidSpeakConfig,
    build=DroidSpeak,
    paper="DroidSpeak: KV Cache Sharing for Cross-LLM Communication and Multi-LLM Serving",
    link="https://arxiv.org/abs/2411.02820",
)
