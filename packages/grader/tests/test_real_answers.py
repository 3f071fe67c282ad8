"""The grader on real golds and real completions; every exception is listed here and argued in docs/grading.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from algorist_grader import extract, grade, grade_many, why_unreadable
from algorist_grader.markers import find_boxes, is_denied, outermost
from benchmarks.golds import datasets, golds, rows
from tests.marks import but

# Neighbours that are equal though written differently: (gold, next gold).
EQUAL_NEIGHBOURS = {
    "math test": {("\\frac{3}{4}", "\\frac34"), ("120^\\circ", "120"), ("7\\%", "7")},
    "math train": {
        ("8", "K=8"), ("25\\%", "25"), ("120", "120^\\circ"), ("21\\text{ dogs}", "21"), ("18 \\text{ degrees}", "18"),
    },
    "math500": {("5", "x=5")},
    "gaokao": {("$-2$", "$\\{-2\\}$")},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", but(datasets(), "college math", "math train"))
def test_gold_against_itself_and_the_next(shared_data: Path, name: str) -> None:
    found = golds(name)
    assert len(found) >= 30
    neighbours = list(dict.fromkeys(pairwise(found)))
    found = list(dict.fromkeys(found))
    assert [g for g in found if why_unreadable(g)] == []
    assert [g.gold for g in grade_many([(g, g) for g in found]) if not g.correct] == []
    verdicts = grade_many([(after, before) for before, after in neighbours])
    equal = {
        pair
        for pair, verdict in zip(neighbours, verdicts, strict=True)
        if verdict.correct and pair[0] != pair[1]
    }
    assert equal == EQUAL_NEIGHBOURS.get(name, set())


@pytest.mark.slow
@pytest.mark.parametrize("name", datasets())
def test_a_gold_with_the_label_of_a_choice(shared_data: Path, name: str) -> None:
    """As AMC's problems have them: letter, value and both are right; another letter or the next value is not."""
    every = list(dict.fromkeys(golds(name)))
    some = every[:: max(1, len(every) // 150)]
    letters = re.compile(r"(?:\\text\{)?\(?[A-J]\b|[-+=]|.*\bor\b")
    values = [gold for gold in some if len(gold) < 250 and not letters.match(gold)]
    right = [
        (answer, f"\\textbf{{(B)}}\\ {v}") for v in values for answer in ("B", v, f"\\textbf{{(B)}}\\ {v}")
    ]
    wrong = [(answer, f"\\textbf{{(B)}}\\ {v}") for v in values for answer in ("C", f"\\textbf{{(C)}}\\ {v}")]
    wrong += [(b, f"\\textbf{{(B)}}\\ {a}") for a, b in pairwise(values) if not grade(b, a).correct]
    assert [(v.gold, v.extracted) for v in grade_many(right) if not v.correct] == []
    assert [(v.gold, v.extracted) for v in grade_many(wrong) if v.correct] == []


@pytest.mark.slow
def test_what_stands_around_the_boxes_of_worked_solutions_hurts_no_answer(shared_data: Path) -> None:
    """The boxes that are no answers are parts of an expression (``-\\frac{3}{2}-\\boxed{2}``, a blank to be filled)."""
    texts = [row["reward_model"]["ground_truth"]["solution"] for row in rows("math/train.parquet")]
    texts += [
        row["solution"]
        for name in ("math/test.parquet", "minerva_math/test.jsonl", "aime24/test.jsonl")
        for row in rows(name)
    ]
    texts += [row["generated_solution"] for row in rows("openmathinstruct2_sample/sample.jsonl")]
    boxes = [(text, box) for text in texts for box in outermost(find_boxes(text)[0])]
    denied = [
        text[box.command - 20 : box.end + 20] for text, box in boxes if is_denied(text, box.command, box.end)
    ]
    assert len(boxes) == 13_186 and len(denied) <= 14, denied


def _solutions(path: Path) -> Iterator[tuple[str, str, bool]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        gold = extract(row["ground_truth"]).answer
        assert gold is not None
        for name in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            yield row[name]["solution"], gold, row[name]["is_correct"]


def check_solutions(path: Path, count: int) -> None:
    rows = list(_solutions(path))
    assert len(rows) == count and {label for _, _, label in rows} == {True, False}
    assert [r for r in rows if grade(extract(r[0]).answer, r[1]).correct != r[2]] == []


def test_labelled_solutions(real_data: Path) -> None:
    check_solutions(real_data / "gsm8k/example_model_solutions.jsonl", 160)


def test_all_labelled_solutions(shared_data: Path) -> None:
    check_solutions(shared_data / "gsm8k/example_model_solutions.jsonl", 5276)
