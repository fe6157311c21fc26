"""The prompts that the doctor examines a model with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcmas.errors import ConfigError

SHORTEST = 16
"""Tokens of the shortest prompt: two for each of the eight parts that reuse divides it into."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Lengths that fit a model's window, ascending, and for each the shifts to try.

    The shortest prompt tries every shift, the others the largest one: a wrong rotation shows in
    any of them, and every try costs a full prefill.
    """

    lengths: tuple[int, ...]
    shifts: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...]


def fit_lengths(
    lengths: Sequence[int], shifts: Sequence[int], window: int | None, answer: int
) -> Fitted:
    """Shorten what does not fit the window together with its shifts and the answer.

    Raises:
        ConfigError: too small a length, shift or window.
    """
    if not lengths or min(lengths) < SHORTEST:
        raise ConfigError(f"lengths must be at least {SHORTEST} tokens, got {_listed(lengths)}")
    if not shifts or min(shifts) < 1:
        raise ConfigError(f"shifts must be at least 1, got {_listed(shifts)}")
    room = max(shifts) if window is None else min(max(shifts), window // 4)
    longest = max(lengths) if window is None else window - answer - room
    if longest < SHORTEST or room < 1:
        raise ConfigError(
            f"the model's window is {window} tokens, too short to examine: at least "
            f"{2 * (SHORTEST + answer)} are needed"
        )
    fitted = sorted({min(length, longest) for length in lengths})
    moves = sorted({min(shift, room) for shift in shifts})
    notes = []
    if fitted[-1] < max(lengths):
        notes.append(
            f"the window is {window} tokens: prompts of more than {longest} are shortened to that, "
            f"which leaves {room} positions for moved keys"
        )
    elif moves[-1] < max(shifts):
        notes.append(f"the window is {window} tokens: keys are moved by at most {room} positions")
    return Fitted(
        tuple(fitted),
        tuple(tuple(moves) if i == 0 else (moves[-1],) for i in range(len(fitted))),
        tuple(notes),
    )


def random_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, count: int, seed: int
) -> Tensor:
    """`[count]` int64 on the CPU: ordinary vocabulary, behind the beginning-of-text token if any.

    Random tokens suit every model, and they are harder than text: nothing in them repeats.
    """
    vocab = cast(Tensor, model.get_input_embeddings().weight).shape[0]
    allowed = torch.ones(vocab, dtype=torch.bool)
    begin = None
    if tokenizer is not None:
        allowed[len(tokenizer) :] = False
        special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        allowed[[i for i in special if i < vocab]] = False
        begin = tokenizer.bos_token_id
    choice = allowed.nonzero()[:, 0] if allowed.any() else torch.arange(vocab)
    generator = torch.Generator().manual_seed(seed)
    ids = choice[torch.randint(len(choice), (count,), generator=generator)]
    if isinstance(begin, int) and begin < vocab:
        ids[0] = begin
    return ids


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
