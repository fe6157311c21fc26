"""What callers hand in, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from kvcmas.errors import PromptError
from kvcmas.workflow.prompt import Prompt, TokenIds

TokenInput = Prompt | Sequence[int] | TokenIds | Tensor


def as_prompt(tokens: TokenInput) -> Prompt:
    """A prompt from token ids: a list, an array or a tensor, `[tokens]` or `[1, tokens]`.

    Raises:
        PromptError: not one row of integers.
    """
    if isinstance(tokens, Prompt):
        return tokens
    return Prompt(token_row(tokens), agent="default", request_id=uuid4().hex)


def token_row(tokens: Sequence[int] | TokenIds | Tensor) -> TokenIds:
    """`[tokens]` int64 from whatever holds one row of ids.

    Raises:
        PromptError: not one row of integers.
    """
    row = np.asarray(tokens.cpu() if isinstance(tokens, Tensor) else tokens)
    if row.ndim == 2 and row.shape[0] == 1:
        row = row[0]
    if row.ndim != 1:
        raise PromptError(
            f"expected the ids of one prompt, got shape {row.shape}; split a padded batch with "
            "unpad(input_ids, attention_mask) and run its rows one by one"
        )
    if row.size and row.dtype.kind not in "iu":
        raise PromptError(f"token ids must be integers, got {row.dtype}")
    return row.astype(np.int64)


def unpad(input_ids: Any, attention_mask: Any) -> list[TokenIds]:
    """Rows of a padded batch without their padding.

    A token's position is its rank among the row's unmasked tokens, so the side that the
    padding is on makes no difference.

    Args:
        input_ids: `[rows, tokens]` integers, an array or a tensor.
        attention_mask: `[rows, tokens]`, zero at padding.

    Raises:
        PromptError: the shapes differ.
    """
    ids, mask = torch.as_tensor(input_ids), torch.as_tensor(attention_mask)
    if ids.ndim != 2 or ids.shape != mask.shape:
        raise PromptError(
            "input_ids and attention_mask must both be [rows, tokens], got "
            f"{tuple(ids.shape)} and {tuple(mask.shape)}"
        )
    return [token_row(row[keep.bool()]) for row, keep in zip(ids, mask, strict=True)]


def check_prompt(token_ids: TokenIds, new: int | TokenIds, vocab: int, window: int | None) -> None:
    """Refuse what cannot run.

    Args:
        token_ids: `[tokens]` int64.
        new: how many tokens follow, or the tokens themselves.
        vocab: number of ids that the model knows.
        window: most tokens that the model takes, `None` without a limit.

    Raises:
        PromptError: no token, an id outside the vocabulary, or more tokens than the window.
    """
    tokens = int(token_ids.shape[0])
    if tokens == 0:
        raise PromptError("the prompt is empty; a request needs at least one token")
    _check_ids(token_ids, vocab)
    if isinstance(new, int):
        new_tokens = new
    else:
        new_tokens = int(new.shape[0])
        _check_ids(new, vocab)
    if window is not None and tokens + new_tokens > window:
        raise PromptError(
            f"{tokens} prompt tokens and {new_tokens} new tokens make {tokens + new_tokens}, the "
            f"model's window is {window}; shorten the prompt or ask for fewer tokens"
        )


def _check_ids(token_ids: TokenIds, vocab: int) -> None:
    if token_ids.size and not (int(token_ids.min()) >= 0 and int(token_ids.max()) < vocab):
        raise PromptError(
            f"token ids must lie in [0, {vocab}), got {int(token_ids.min())} to "
            f"{int(token_ids.max())}; use the model's own tokenizer"
        )
