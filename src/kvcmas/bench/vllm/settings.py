"""What is measured, and how much of it: the same for all parts, JSON both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

PartName = Literal["holes", "plain", "quality", "serving", "soak"]
PARTS: tuple[PartName, ...] = get_args(PartName)


class Settings(BaseModel):
    """Sizes of all parts.

    model: a folder or a hub id. contexts, roles: files; without roles the default team.
    prompt_tokens: of prompts that are compared bit by bit. vLLM's own result of longer ones
        differs in its last bits from one batch to the next.
    learn_contexts, test_contexts, readers, answer_tokens: of the part `quality`.
    warm_contexts, served_contexts, chain_contexts: of the part `serving`: most contexts until
        everybody reuses, then those that are measured, read alone and with earlier answers.
    served_tokens: of these contexts. overhead_pairs: plain requests at each server.
    chat_texts: most texts that the chat client talks about until its agents reuse.
    soak_requests: of the part `soak`; soak_beside: most of them at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    contexts: Path
    roles: Path | None = None
    seed: int = 0
    prompt_tokens: int = Field(default=360, ge=300)
    learn_contexts: int = Field(default=12, ge=1)
    test_contexts: int = Field(default=8, ge=1)
    readers: int = Field(default=2, ge=1)
    answer_tokens: int = Field(default=24, ge=1)
    warm_contexts: int = Field(default=8, ge=1)
    served_contexts: int = Field(default=8, ge=1)
    chain_contexts: int = Field(default=3, ge=0)
    served_tokens: int = Field(default=850, ge=200)
    overhead_pairs: int = Field(default=40, ge=1)
    chat_texts: int = Field(default=6, ge=1)
    soak_requests: int = Field(default=200, ge=1)
    soak_beside: int = Field(default=8, ge=1)

    def quick(self) -> Settings:
        """As little of everything as still runs it all: to try it out."""
        return self.model_copy(
            update={
                "learn_contexts": 4,
                "test_contexts": 1,
                "answer_tokens": 8,
                "warm_contexts": 5,
                "served_contexts": 1,
                "chain_contexts": 1,
                "overhead_pairs": 4,
                "chat_texts": 5,
                "soak_requests": 30,
            }
        )
