"""``chat`` shows the reasoning as it is written and the answer apart; ``solve --n --vote`` gives what most samples say."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest

from algorist.cli.solve_command import _Live, converse, load_solver
from algorist.evaluation.estimators import elect
from algorist.models.load import Policy
from algorist.prompts import get_format
from algorist.prompts.base import Tags
from algorist.runs.solve import Solver
from algorist_grader import grade
from tests.tiny import TOKENIZER, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    copy.deepcopy(TOKENIZER).save_pretrained(folder)
    return folder


def test_streamed_text_is_the_completion_and_greedy_chat_answers_as_solve() -> None:
    solver = Solver(Policy(make_model().eval(), copy.deepcopy(TOKENIZER)), get_format("question_only"), 12)
    pieces: list[str] = []
    (streamed,) = solver.solve(["1+1"], on_text=pieces.append)
    assert len(pieces) > 1 and "".join(pieces) == streamed["completion"].rstrip("\ufffd")
    assert [streamed] == solver.solve(["1+1"])


def test_the_reasoning_is_shown_without_tags_and_the_answer_apart(capsys: pytest.CaptureFixture[str]) -> None:
    live = _Live(Tags("<reasoning>", "</reasoning>", "<answer>", "</answer>"))
    for character in "<reasoning>\n3 < 4, so 12 -\n 5 = 7.\n</reasoning>\n<answer>\n7\n</answer>":
        live(character)
    assert capsys.readouterr().out == "3 < 4, so 12 -\n 5 = 7."


def test_a_conversation_answers_line_by_line_and_saves(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    solver = load_solver(str(model), "question_only", None)
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1\n7*8\n\nnot asked\n"))
    answers = converse(solver, 6, 0.0, tmp_path / "a.jsonl")
    out, err = capsys.readouterr()
    assert "Ctrl-C stops an answer" in err
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert (
        rows == answers and [row["question"] for row in rows] == ["1+1", "7*8"] and out.count("answer: ") == 2
    )
    assert out.count("answer: no answer in the format question_only") == sum(
        row["answer"] is None for row in rows
    )


def test_a_vote_counts_equal_answers_together() -> None:
    def same(a: str, b: str) -> bool:
        return grade(a, b).correct

    assert elect(["1/2", "3", "0.5", "3", r"\frac{1}{2}", None], same) == ("1/2", 3)
    assert elect(["3", "4"], same) == ("3", 1)
    assert elect([None, None], same) == (None, 0)


def test_solve_votes_and_says_why_it_cannot(verb: Any, model: Path) -> None:
    words = ("solve", "1+1", "--model", str(model), "--format", "question_only", "--max-new-tokens", "4")
    code, out, _ = verb(*words, "--n", "3", "--vote", "--json")
    (row,) = json.loads(out)["answers"]
    assert code == 0 and row["samples"] == 3 and row["votes"] == 0 and row["answer"] is None
    code, out, _ = verb(*words, "--n", "3", "--json")
    assert code == 0 and len({row["completion"] for row in json.loads(out)["answers"]}) > 1
    for more, why in (
        (("--vote",), "--vote needs several samples"),
        (("--n", "3", "--temperature", "0"), "the same completion"),
    ):
        code, _, err = verb(*words, *more)
        assert code == 2 and why in err
