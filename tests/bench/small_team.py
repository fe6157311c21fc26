"""A tiny model, texts and arms for benchmarks that take a second."""

from __future__ import annotations

import random
from pathlib import Path

from kvcmas.bench.contexts import Context
from kvcmas.bench.roles import Role

from ..engines.small_files import chat_tokenizer, small_model

WORDS = ("hello", "shell", "bell", "river", "of", "stone", "and", "light", "falls", "on", "hills")
ROLES = (
    Role("planner", "You plan what the others do.", "Write the plan."),
    Role("analyst", "You look at figures and names.", "Give an analysis."),
    Role("judge", "You settle it in the end, in short.", "Judge."),
)


def context(number: int, words: int = 60) -> Context:
    """A text of its own for each number."""
    random_words = random.Random(number).choices(WORDS, k=words)
    return Context(f"text {number}", " ".join(random_words))


def model_folder(path: Path) -> Path:
    """A model folder with a window of 2048 tokens."""
    model = small_model()
    model.config.max_position_embeddings = 2048
    model.save_pretrained(path)
    chat_tokenizer().save_pretrained(path)
    return path
