"""A shown prefill leaves a method as a prefill of the engine's does."""

from __future__ import annotations

import numpy as np
import torch

from kvcmas.bench.exact import show
from kvcmas.engines.transformers import TransformersEngine, model_info
from kvcmas.methods import create
from kvcmas.methods.kvcmas import Kvcmas
from kvcmas.workflow.prompt import Prompt

from ..engines.tiny import random_ids, tiny_model

LEARN = {"own_dim": 8, "window_dim": 8, "rank": 4, "basis_tokens": 150, "fit_tokens": 150}


def test_show_equals_a_request(device: torch.device) -> None:
    model = tiny_model("llama", device)
    methods = [create("kvcmas", model_info(model), **LEARN) for _ in range(2)]
    asked, shown = (method for method in methods if isinstance(method, Kvcmas))
    engine = TransformersEngine(model, None, asked)
    dense = TransformersEngine(model, None, create("nonshared", model_info(model)))
    roles = {"planner": random_ids(20, 1), "judge": random_ids(30, 2)}
    for number in range(8):
        document = random_ids(100, 10 + number)
        for agent, role in roles.items():
            ids = np.array([*role, *document, 3, 4, 5])
            name = f"{agent}-{number}"
            engine.prefill(Prompt(ids, agent, name, dial="exact"))
            show(shown, Prompt(ids, agent, name), dense.prefill(Prompt(ids, agent, name)).kv)
    assert len(asked.library.store.infos()) == len(shown.library.store.infos())
    assert shown.library.pinned() == 0
    shown.library.check_integrity()
    pairs = [method.book().pairs for method in (asked, shown)]
    assert {pair: state.seen for pair, state in pairs[0].items()} == {
        pair: state.seen for pair, state in pairs[1].items()
    }
    one, two = (next(iter(found.values())).learner for found in pairs)
    assert one.tokens == two.tokens > 0
    reader = Prompt(np.array([*roles["judge"], *document, 7, 8]), "judge", "last", dial="balanced")
    plans = [method.plan(reader) for method in (asked, shown)]
    assert [(s.start, s.stop) for s in plans[0].spans] == [
        (s.start, s.stop) for s in plans[1].spans
    ]


def test_adopting_serves_alike_and_learns_nothing(device: torch.device) -> None:
    model = tiny_model("llama", device)
    info = model_info(model)
    teacher, student = create("kvcmas", info, **LEARN), create("kvcmas", info, **LEARN)
    assert isinstance(teacher, Kvcmas) and isinstance(student, Kvcmas)
    dense = TransformersEngine(model, None, create("nonshared", info))
    roles = {"planner": random_ids(20, 1), "judge": random_ids(30, 2)}

    def read(method: Kvcmas, first: int, last: int) -> None:
        for number in range(first, last):
            document = random_ids(100, 10 + number)
            for agent, role in roles.items():
                prompt = Prompt(np.array([*role, *document, 3, 4]), agent, f"{agent}-{number}")
                show(method, prompt, dense.prefill(prompt).kv)

    read(teacher, 0, 6)
    student.adopt(teacher)
    before = {pair: state.seen for pair, state in teacher.book().pairs.items()}
    assert before and student.book().basis is teacher.book().basis
    read(student, 6, 8)
    assert {pair: state.seen for pair, state in student.book().pairs.items()} == before
    assert {pair: state.seen for pair, state in teacher.book().pairs.items()} == before
    read(teacher, 6, 7)
    assert {pair: state.seen for pair, state in teacher.book().pairs.items()} != before
