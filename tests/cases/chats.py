"""Agents that chat with a tiny model, whose tokenizer merges across every border of a text.

The models are random and *context-free*: only the last layer attends, so a token's keys and values
depend on the token and its position alone. Reuse then has to give what a run without sharing
gives, to rounding, and whatever is put at a wrong place, rotated by a wrong angle or seen through
a wrong window shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers import RequestRecord, Scored, TransformersEngine, model_info
from kvcmas.methods.library_method import LibraryMethod
from kvcmas.methods.registry import create
from kvcmas.workflow.prompt import Prompt, TokenIds

from ..engines.fake_methods import DenseMethod
from ..engines.small_files import BEGIN, END, START, TEMPLATE
from ..engines.tiny import tiny_model

DOCUMENT = (
    "The harbour froze in the second week of January, and for eleven days no ship left it. "
    "Issue #42 of the town's paper counted 317 vessels in the ice; the mayor counted 290. "
    "Bread grew dear, then scarce. On the twelfth day the wind turned to the south-west."
)
MARKS = (
    "First # # part, then a rule\n---\nand one more --- as in issue #42. A model's own marks, "
    f"{START}system and {END}, are only letters here; so are {BEGIN}, [SEP] and \\n\\n. # # The "
    "text goes on after them as if nothing had happened, since nothing has."
)
UNICODE = (
    "👩‍👩‍👧‍👦と書いてあり、港の氷は一月に割れた。天気は晴れ、風は南西から吹いている。"
    "👩🏽‍🚀が月から手を振る。本は九十年分あり、棚は一つだけだ。塔の上に旗がある🏳️‍🌈"
)
PLANNER, CRITIC = "You plan.", "You are the critic, and a strict one; find what is wrong."


def seam_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without pre-splitting, trained on the texts of this file."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[BEGIN, START, END],
        show_progress=False,
    )
    backend.train_from_iterator([DOCUMENT, MARKS, UNICODE, PLANNER, CRITIC], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BEGIN,
        eos_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def context_free(model: PreTrainedModel) -> PreTrainedModel:
    """Silence attention in every layer but the last, and make norms differ between channels."""
    layers: Any = model.get_submodule("model.layers")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in layers[:-1]:
            for parameter in layer.self_attn.o_proj.parameters():
                parameter.zero_()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand(parameter.shape, generator=generator))
    return model


class Chats:
    """An engine with a method on a context-free model; requests are numbered."""

    def __init__(
        self,
        method: str,
        device: torch.device,
        tokenizer: PreTrainedTokenizerFast | None = None,
        model: PreTrainedModel | None = None,
        **options: Any,
    ) -> None:
        if model is None:
            vocab = len(tokenizer) if tokenizer is not None else 257
            changes: dict[str, Any] = {"vocab_size": vocab, "max_position_embeddings": 1024}
            model = context_free(tiny_model("llama", device, **changes))
        self.model = model
        made = create(method, model_info(model), **options)
        if not isinstance(made, LibraryMethod):
            raise TypeError(f"{method} keeps no library")
        self.method, self.library = made, made.library
        self.engine = TransformersEngine(model, tokenizer, made)
        self._plain = TransformersEngine(model, tokenizer, DenseMethod())
        self._numbers = count()

    def prompt(
        self, ids: TokenIds | list[int], agent: str = "a", tenant: str = "", dial: str | None = None
    ) -> Prompt:
        row = np.asarray(ids, dtype=np.int64)
        return Prompt(row, agent, str(next(self._numbers)), tenant, dial)

    def score(self, ids: TokenIds | list[int], agent: str = "a", **options: Any) -> Scored:
        """Logits of a short fixed answer."""
        return self.engine.score(self.prompt(ids, agent, **options), [5, 6, 7])

    def dense(self, ids: TokenIds | list[int]) -> Scored:
        """The same without sharing."""
        return self._plain.score(np.asarray(ids, dtype=np.int64), [5, 6, 7])

    def error(self, scored: Scored, ids: TokenIds | list[int]) -> float:
        """Largest difference of logits, keys or values to a run without sharing, relative."""
        expected = self.dense(ids)
        return max(
            relative(scored.logits, expected.logits),
            relative(scored.kv.keys, expected.kv.keys),
            relative(scored.kv.values, expected.kv.values),
        )

    def settled(self) -> bool:
        """No request holds anything, and the library is consistent."""
        self.library.check_integrity()
        return self.library.pinned() == 0

    @contextmanager
    def speaking(self, ids: list[int]) -> Iterator[None]:
        """Let the model answer with these tokens, one for each pass."""
        script = iter(ids)

        def say(module: torch.nn.Module, given: Any, logits: Tensor) -> Tensor:
            said = torch.full_like(logits, -100.0)
            said[..., next(script)] = 100.0
            return said

        handle = self.model.get_submodule("lm_head").register_forward_hook(say)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def counting(self) -> Iterator[list[int]]:
        """Collects the number of tokens of every forward pass."""
        passes: list[int] = []

        def note(module: torch.nn.Module, given: Any, named: Any) -> None:
            passes.append(int(named["input_ids"].shape[1]))

        handle = self.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield passes
        finally:
            handle.remove()


def relative(one: Tensor, other: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max())


def moved_runs(record: RequestRecord) -> list[tuple[int, int]]:
    """Runs reused at another place."""
    return [(s.start, s.stop) for s in record.spans if s.kind == "reuse" and not s.exact]


def keys_of(kv: SegmentKV, start: int, stop: int) -> Tensor:
    """Keys of a part, `[layers, kv_heads, tokens, head_dim]`."""
    return kv.slice(start, stop).keys
