"""`kvcmas demo` on a tiny model, its texts, its view, its table and its plot."""

from __future__ import annotations

import io
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from kvcmas.bench.demo import texts
from kvcmas.bench.demo.bars import Run, bar, cells, runs_of_plan, runs_of_record
from kvcmas.bench.demo.live import LiveView
from kvcmas.bench.demo.plain import PlainView, turn_line
from kvcmas.bench.demo.plot import draw, save_plot, stacks
from kvcmas.bench.demo.replay import Recorder, replay
from kvcmas.bench.demo.results import AgentSums, DemoResult, DemoTurn, Learning, Sums
from kvcmas.bench.demo.settings import EARLIER_TEXTS, DemoSettings
from kvcmas.bench.demo.summary import summary_line, verdict
from kvcmas.bench.demo.table import agents_table, exact_note
from kvcmas.cli.demo import demo
from kvcmas.cli.output import ErrorReportingGroup
from kvcmas.engines.runner import TokenGenerated, TurnStarted
from kvcmas.engines.transformers import (
    RequestRecord,
    SamplingParams,
    SpanRecord,
    TransformersEngine,
)
from kvcmas.errors import ConfigError, MissingDependencyError, PlanError
from kvcmas.workflow.plan import Compute, Head, Plan, Reuse
from kvcmas.workflow.prompt import Prompt

from ..engines.fake_methods import DenseMethod, StoredMethod, garbage, holes
from ..engines.small_files import chat_tokenizer, small_model
from ..engines.tiny import byte_tokenizer, random_ids, tiny_model

AGENTS = ("planner", "analyst", "critic", "judge")
TEXT = "The bridge of Ulm was closed on 3 May 1911, and hell broke loose over 40 marks."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = small_model()
    model.config.max_position_embeddings = 8192
    model.save_pretrained(path)
    chat_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def document(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(f"{TEXT}\n")
    return file


def run(*arguments: object) -> tuple[int, str, str]:
    app = typer.Typer(cls=ErrorReportingGroup)
    app.callback()(lambda: None)
    app.command()(demo)
    result = CliRunner().invoke(app, ["demo", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def record(prompt: int, computed: int, ttft_s: float, *spans: SpanRecord) -> RequestRecord:
    return RequestRecord(
        request_id="1",
        agent="a",
        method="m",
        prompt=prompt,
        computed=computed,
        reused=prompt - computed,
        generated=4,
        passes=1,
        exact=all(span.exact or span.kind == "compute" for span in spans),
        spans=spans,
        notes=(),
        ttft_s=ttft_s,
        match_s=0.0,
        correct_s=0.0,
        forward_s=ttft_s,
        other_s=0.0,
        decode_s=0.0,
        finish_s=0.0,
        total_s=ttft_s,
    )


def compute(start: int, stop: int) -> SpanRecord:
    return SpanRecord(start=start, stop=stop, kind="compute", computed=stop - start, reused=0)


def reuse(start: int, stop: int, head: int = 0, exact: bool = False) -> SpanRecord:
    return SpanRecord(
        start=start,
        stop=stop,
        kind="reuse",
        computed=head,
        reused=stop - start - head,
        head=head,
        exact=exact,
    )


def turn(agent: str, number: int, sharing: RequestRecord, alone: RequestRecord) -> DemoTurn:
    return DemoTurn(
        round=number,
        agent=agent,
        text=f"{agent} says [bold]",
        exact_text="so",
        sharing=sharing,
        nonshared=alone,
        compared=4,
        same=3,
        kl=0.5,
    )


TURNS = (
    turn("planner", 1, record(100, 100, 1.0, compute(0, 100)), record(100, 100, 1.0)),
    turn(
        "judge",
        1,
        record(120, 40, 0.25, reuse(0, 10, exact=True), reuse(10, 100, head=20), compute(100, 120)),
        record(120, 110, 1.0),
    ),
)
READERS = Sums.of(TURNS[1:])


class TestTexts:
    def test_ship_with_the_package(self) -> None:
        data = resources.files("kvcmas.bench.demo") / "data"
        assert data.joinpath("team.yaml").is_file()
        assert len(texts.report(9)) == 3
        assert len(texts.report(2)) == 2
        assert len(texts.earlier_texts(99)) == EARLIER_TEXTS
        assert texts.earlier_texts(0) == ()

    def test_look_like_documents(self) -> None:
        # About 3.8 characters of this prose make a token of the demo's model.
        assert 3000 < len(texts.report(1)[0]) < 4500
        for text in (*texts.report(3), *texts.earlier_texts(EARLIER_TEXTS)):
            assert len(text.split("\n\n")) >= 3
            assert text == text.strip()
            assert text.isascii()
            assert any(character.isdigit() for character in text)
        assert all(1100 < len(text) < 1700 for text in texts.earlier_texts(EARLIER_TEXTS))

    def test_team(self) -> None:
        team = texts.team(2)
        assert team.rounds == 2
        assert team.order == AGENTS
        assert len({agent.task for agent in team.agents}) == 4
        # Otherwise --max-tokens would have no effect.
        assert all(agent.max_tokens is None for agent in team.agents)


class TestSettings:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"rounds": 0}, "rounds must be at least 1, got 0"),
            ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
            ({"warmup": 9}, "warmup must be 0 to 8 texts, got 9"),
            ({"warmup": -1}, "got -1"),
        ],
    )
    def test_out_of_range(self, change: dict[str, int], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            DemoSettings(**change)  # type: ignore[arg-type]


class TestReplay:
    def test_equals_the_request_that_left_the_kv(self, device: torch.device) -> None:
        model, ids, answer = tiny_model("llama", device), random_ids(40), random_ids(6, 2)
        dense = TransformersEngine(model, None, DenseMethod()).score(ids, answer)
        spoiled = StoredMethod(dense.kv, holes((8, 30)), garbage)
        recorder = Recorder(spoiled)
        engine = TransformersEngine(model, byte_tokenizer(), recorder)
        given = engine.score(ids, answer)
        assert (given.logits - dense.logits).abs().max() > 0.1
        engine.generate(ids, SamplingParams(max_tokens=3, ignore_eos=True))
        calls = list(spoiled.calls)
        prompt = Prompt(torch.tensor(ids).numpy(), "", "r")
        again = replay(model, prompt, recorder.take(), answer)
        torch.testing.assert_close(again, given.logits, atol=1e-4, rtol=0)
        assert spoiled.calls == calls

    def test_only_what_a_request_has_left(self, device: torch.device) -> None:
        recorder = Recorder(DenseMethod())
        with pytest.raises(PlanError, match="no request"):
            recorder.take()
        engine = TransformersEngine(tiny_model("llama", device), None, recorder)
        engine.generate(random_ids(5), SamplingParams(max_tokens=1, ignore_eos=True))
        assert len(recorder.take()) == 5
        with pytest.raises(PlanError, match="no request"):
            recorder.take()

    def test_a_prompt_of_one_token(self, device: torch.device) -> None:
        model = tiny_model("llama", device)
        dense = TransformersEngine(model, None, DenseMethod()).score([5], [6, 7])
        prompt = Prompt(torch.tensor([5]).numpy(), "", "r")
        again = replay(model, prompt, dense.kv, [6, 7])
        torch.testing.assert_close(again, dense.logits, atol=1e-5, rtol=0)


class TestBars:
    def test_a_record_and_its_plan_give_the_same_runs(self) -> None:
        spans = (Compute(0, 4), Reuse(4, 20, "s", 0, head=Head(length=6)), Compute(20, 22))
        expected = [
            Run(0, 4, "computed"),
            Run(4, 10, "computed"),
            Run(10, 20, "reused"),
            Run(20, 22, "computed"),
        ]
        assert runs_of_plan(Plan(22, spans)) == expected
        records = (compute(0, 4), reuse(4, 20, head=6), compute(20, 22))
        assert runs_of_record(records) == expected
        assert runs_of_record([reuse(0, 9, exact=True)]) == [Run(0, 9, "prefix")]

    def test_the_fate_of_most_tokens(self) -> None:
        runs = [Run(0, 4, "prefix"), Run(4, 7, "computed"), Run(7, 12, "reused")]
        assert cells(runs, 3) == ["prefix", "computed", "reused"]
        assert cells(runs, 1) == ["reused"]
        assert bar(runs, 3).plain == "·█▒"

    def test_odd_widths(self) -> None:
        assert cells([Run(0, 2, "reused")], 5) == ["reused"] * 5
        assert cells([], 5) == []
        assert cells([Run(0, 2, "reused")], 0) == []


class TestResults:
    def test_sums(self) -> None:
        assert Sums.of(TURNS) == Sums(
            turns=2,
            prompt=220,
            computed=140,
            reused=70,
            prefix=10,
            head=20,
            exact_turns=1,
            ttft_s=0.625,
            nonshared_computed=210,
            nonshared_ttft_s=1.0,
            compared=8,
            same=6,
            kl=0.5,
        )
        assert AgentSums.of_agent("judge", TURNS).computed == 40
        assert Sums.of(()).kl == 0

    def test_summary(self) -> None:
        assert summary_line("kvcmas", READERS) == (
            "kvcmas: readers computed 33% of their prompts' tokens (92% without sharing), TTFT "
            "0.25x (median 0.25 s instead of 1.00 s, 1 turns), 75% of tokens equal the exact run "
            "(KL 0.5000)"
        )

    def test_nearly_all_is_not_all(self) -> None:
        nearly = Sums(prompt=10, compared=1000, same=999, nonshared_ttft_s=1)
        assert "99.9% of tokens equal" in summary_line("m", nearly)
        equal = nearly.model_copy(update={"same": 1000})
        assert "100% of tokens equal" in summary_line("m", equal)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({}, ""),
            ({"reused": 0}, "Nothing was reused between the agents."),
            ({"computed": 110}, "Sharing saved nothing"),
            ({"ttft_s": 1.5}, "Sharing was not faster: .* 1.50 times as long"),
            ({"same": 3}, "only 75% of the tokens"),
        ],
    )
    def test_verdict(self, change: dict[str, Any], message: str) -> None:
        good = READERS.model_copy(update={"same": 4})
        said = verdict(good.model_copy(update=change))
        assert (said == "") == (message == "")
        assert re.search(message, said)


class TestTableAndPlot:
    def test_table(self) -> None:
        agents = [AgentSums.of_agent(name, TURNS) for name in ("planner", "judge")]
        console = Console(file=io.StringIO(), width=80)
        console.print(agents_table(agents, READERS))
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        judge = next(line for line in lines if line.startswith(" judge"))
        assert judge.split() == [
            *("judge", "120", "40", "20+0", "70", "10", "0.25", "1.00", "0.25", "75.0%", "0.5000")
        ]
        assert any(line.split()[:2] == ["readers", "120"] for line in lines)

    def test_exact_turns_are_named(self) -> None:
        assert exact_note(TURNS) == ("Exact (nothing approximate was used): planner in round 1.")
        assert exact_note(TURNS[1:]) == "No turn was exact."

    def test_plot(self, tmp_path: Path) -> None:
        assert stacks(TURNS) == {"computed": [100, 40], "reused": [0, 70], "prefix": [0, 10]}
        upper, lower = draw(TURNS, "title").axes
        heights = [[bar.get_height() for bar in group] for group in upper.containers]
        assert heights == [[1.0, 1.0], [1.0, 0.25]]
        tops = [bar.get_y() + bar.get_height() for bar in lower.containers[-1]]
        assert tops == [100, 120]
        save_plot(TURNS, "title", tmp_path / "p.png")
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
        with pytest.raises(ConfigError, match="--out"):
            save_plot(TURNS, "title", tmp_path / "none" / "p.png")


class TestViews:
    def test_live(self) -> None:
        console = Console(file=io.StringIO(), force_terminal=True, width=80, height=30)
        view = LiveView(console, "the title")
        view.learning(2, 8, "judge", 341)
        view.event(TurnStarted("critic", 1, 50))
        view.planned(Plan(50, (Reuse(0, 40, "s", 0), Compute(40, 50))))
        view.event(TokenGenerated("critic", "so it [is]"))
        screen = _screen(view)
        assert "the title" in screen and "critic writes" in screen and "so it [is]" in screen
        assert "▒" in screen and "critic, round 1" in screen
        view.comparing()
        assert "without sharing, answers critic's prompt" in _screen(view)
        view.turn(TURNS[0])
        view.turn(TURNS[1])
        screen = _screen(view)
        assert "so it [is]" not in screen
        assert "100/100" in screen and "40/120" in screen and "3/4" in screen

    def test_live_draws_and_stops(self) -> None:
        console = Console(file=io.StringIO(), force_terminal=True, width=60, height=8)
        with LiveView(console, "the title") as view:
            for done in TURNS:
                view.turn(done)
        assert isinstance(console.file, io.StringIO)
        assert "judge" in console.file.getvalue()

    def test_plain(self) -> None:
        assert turn_line(TURNS[1]) == (
            "round 1  judge: 120 tokens, 40 computed (head 20+0), 70 reused, 10 own prefix; TTFT "
            "0.25 s, without sharing 1.00 s; 3 of 4 tokens equal the exact run"
        )
        console = Console(file=io.StringIO(), width=40)
        with PlainView(console) as view:
            view.turn(TURNS[0])
            view.learned(Learning(texts=0, requests=0, tokens=0, seconds=0.0, finish_s=0.0))
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert lines[0].endswith("run, exact")
        assert lines[1:] == ["    planner says [bold]"]


def _screen(view: LiveView) -> str:
    console = Console(file=io.StringIO(), width=80, height=30)
    console.print(view.picture())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class TestCommand:
    def test_two_rounds(self, folder: Path, document: Path, tmp_path: Path) -> None:
        out, results = tmp_path / "p.png", tmp_path / "r.json"
        code, stdout, _ = run(
            *("--model", folder, "--method", "fullshared", "--document", document),
            *("--rounds", 2, "--max-tokens", 3, "--warmup", 0, "--out", out, "--json", results),
        )
        assert code == 0
        result = DemoResult.model_validate_json(results.read_text())
        assert [(t.round, t.agent) for t in result.turns] == [
            (number, agent) for number in (1, 2) for agent in AGENTS
        ]
        first = result.turns[0]
        assert first.sharing.exact and first.same == first.compared and first.kl < 1e-6
        assert first.text == first.exact_text
        for done in result.turns:
            assert done.sharing.method == "fullshared" and done.nonshared.method == "nonshared"
            assert done.sharing.prompt == done.nonshared.prompt
            assert done.nonshared.exact
            assert 0 <= done.same <= done.compared <= 3 and done.compared >= 1
        # Byte-level ids: the document is shared, and more than that.
        assert result.turns[1].sharing.reused > len(TEXT)
        assert result.readers == Sums.of([t for t in result.turns if t.agent != "planner"])
        assert result.readers.computed < result.readers.nonshared_computed
        assert [agent.agent for agent in result.agents] == list(AGENTS)
        assert result.learning == Learning(
            texts=0, requests=0, tokens=0, seconds=result.learning.seconds, finish_s=0.0
        )
        assert stdout.rstrip().endswith(result.summary)
        assert "planner in round 1" in stdout and f"Plot: {out}" in stdout
        assert out.read_bytes().startswith(b"\x89PNG")

    def test_learns_and_prints_only_json(self, folder: Path, document: Path) -> None:
        code, stdout, stderr = run(
            *("--model", folder, "--method", "fullshared", "--document", document, "--no-plot"),
            *("--rounds", 1, "--max-tokens", 1, "--warmup", 1, "--json", "-"),
        )
        assert code == 0
        result = DemoResult.model_validate(json.loads(stdout))
        assert (result.learning.texts, result.learning.requests) == (1, 4)
        assert "learning from earlier text 1 of 1: judge reads" in stderr
        assert result.summary in stderr

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--warmup", 9], "warmup must be 0 to 8"),
            (["--method", "kvcmass"], "kvcmas"),
            (["--document", "nowhere.txt"], "nowhere.txt"),
            (["--out", "no/such/folder/p.png"], "make it"),
            (["--json", "no/such/folder/r.json"], "make it"),
            (["--model", "./nowhere"], "no model at"),
        ],
    )
    def test_bad_options(
        self, arguments: list[object], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        code, _, stderr = run(*arguments)
        assert code == 1 and message in stderr

    def test_more_documents_than_rounds(self, document: Path) -> None:
        code, _, stderr = run(
            "--document", document, "--document", document, "--rounds", 1, "--no-plot"
        )
        assert code == 1 and "rounds" in stderr

    def test_without_matplotlib(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(MissingDependencyError, match="no-plot"):
            draw(TURNS, "title")
        code, _, stderr = run("--warmup", 0)
        assert code == 1 and "kvcmas[demo]" in stderr


@pytest.mark.integration
def test_on_the_real_model(tmp_path: Path) -> None:
    code, stdout, _ = run(
        *("--rounds", 2, "--max-tokens", 16, "--warmup", 2, "--out", tmp_path / "p.png"),
        # Two texts are too few for the default, which would compute the report exactly.
        *("-o", "cold_tokens=500", "-o", "fit_tokens=500", "-o", "audit=0.0"),
        *("--json", tmp_path / "r.json"),
    )
    assert code == 0
    result = DemoResult.model_validate_json((tmp_path / "r.json").read_text())
    assert result.turns[0].sharing.exact and result.turns[0].same == 16
    assert 900 < result.turns[0].sharing.prompt < 1200
    readers = result.readers
    assert readers.computed < readers.nonshared_computed
    assert readers.same > 0.8 * readers.compared
    assert result.summary in stdout
