"""Is a gold answer fit: one function says it to ``data check``, ``preflight`` and ``run``; and files that are not as expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from algorist.config.schema import DatasetSection
from algorist.data import load_problems
from algorist.data.golds import check_golds
from algorist.data.problems import unreadable_golds
from algorist.errors import DataError
from algorist.preflight.run import gold_coverage
from algorist.types import Problem
from algorist_grader import grade
from tests.conftest import Verb


def jsonl(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


GOLDS = {
    "proof": "placeholder", "notfound": "placeholder", "N/A": "placeholder", "null": "placeholder", "nan": "placeholder",
    "\x0crac{1}{2}": "backslash", "\rho": "backslash", "\times 3": "backslash",
    "5": "", "\\textbf{(B)}\\ 27": "", "2024-05-05": "", "\\frac{1}{2}": "", "none": "",
}  # fmt: skip


def test_check_preflight_and_run_say_the_same_of_a_gold(tmp_path: Path, verb: Verb) -> None:
    file = jsonl(
        tmp_path / "rows.jsonl", *({"question": f"q{n}", "answer": gold} for n, gold in enumerate(GOLDS))
    )
    problems = load_problems(DatasetSection(name="local", path=str(file)))
    unfit = {problem.answer: why for problem, why in check_golds(problems).unreadable}
    assert {gold for gold, why in GOLDS.items() if why} == set(unfit)
    assert all(GOLDS[gold] in why for gold, why in unfit.items())
    assert gold_coverage(problems)["readable_share"] == pytest.approx(5 / 13)
    (line,) = unreadable_golds(problems, [])
    assert line.startswith("warning: 8 of 13 training problems have a gold answer")
    code, out, _ = verb("data", "check", "local", "--path", str(file), "--json")
    checked = json.loads(out)
    assert code == 1 and {row["gold"] for row in checked["unreadable"]} == set(unfit)
    assert [row["gold"] for row in checked["text_only"]] == ["2024-05-05"]


def test_a_sentence_that_the_grader_reads_is_no_text(tmp_path: Path) -> None:
    golds = ("The answer is 63 km.", "63 km", "a red apple")
    checked = check_golds([Problem(gold, f"q {gold}", gold) for gold in golds])
    assert [problem.answer for problem in checked.text_only] == ["a red apple"]
    assert grade("63000 m", golds[0]).correct and not grade("63 m", golds[0]).correct


def test_a_question_with_two_golds_is_told(tmp_path: Path, verb: Verb) -> None:
    rows = [{"question": "a", "answer": answer} for answer in ("2", "3", "2.0")]
    file = jsonl(tmp_path / "rows.jsonl", *rows, {"question": "b", "answer": "3"})
    problems = load_problems(DatasetSection(name="local", path=str(file)))
    assert "repeat a question with another gold answer" in unreadable_golds([], problems)[0]
    _, out, _ = verb("data", "check", "local", "--path", str(file), "--json")
    (row,) = json.loads(out)["conflicting"]
    assert (row["gold"], row["first_gold"]) == ("3", "2")


def test_verls_layout_is_read_without_an_adapters_name(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "What is 2+2?"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 7},
    }
    (problem,) = load_problems(DatasetSection(name="local", path=str(jsonl(tmp_path / "train.jsonl", row))))
    assert (problem.question, problem.answer, problem.id) == ("What is 2+2?", "4", "7")


USER = {"role": "user", "content": "What is 2+2?"}


@pytest.mark.parametrize(
    ("changes", "solution"),
    [
        ({"solution": "Two and two: $\\boxed{4}$."}, "Two and two: $\\boxed{4}$."),
        ({"solution": "2+2=4\n#### 4"}, "2+2=4\n#### 4"),
        ({"solution": "4"}, ""),  # DAPO's own column, which is the answer
        ({"reward_model": {"ground_truth": {"target": "4"}}, "solution": "2+2=4"}, "2+2=4"),
        ({"reward_model": {"ground_truth": ["4"]}}, ""),
        ({"prompt": [{"role": "system", "content": "Be brief."}, USER]}, ""),
    ],
)
@pytest.mark.parametrize("name", ["local", "dapo"])
def test_verls_ground_truth_is_the_gold_and_its_solution_the_solution(
    name: str, changes: dict[str, Any], solution: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"prompt": [USER], "reward_model": {"ground_truth": "4"}} | changes
    (problem,) = load_problems(DatasetSection(name=name, path=str(jsonl(tmp_path / "train.jsonl", row))))
    assert (problem.question, problem.answer, problem.solution) == (USER["content"], "4", solution)
    assert ("begin with a system message, which is not read" in caplog.text) == ("Be brief" in str(row))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": [USER, {"role": "assistant", "content": "4"}, USER]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "What is 2+2?"}]}]},
        {"reward_model": {"ground_truth": {"value": "4"}}},
    ],
)
def test_what_is_no_question_or_gold_in_verls_layout_is_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    good = {"prompt": [USER], "reward_model": {"ground_truth": "4"}}
    path = str(jsonl(tmp_path / "train.jsonl", good, good | changes))
    with pytest.raises(
        DataError, match=r"row 2 has chat messages \(of more than one question .* or an object"
    ):
        load_problems(DatasetSection(name="local", path=path))
    (problem,) = load_problems(DatasetSection(name="local", path=path, params={"skip_bad_rows": True}))
    assert problem.answer == "4"


def test_several_values_in_one_cell_are_refused(tmp_path: Path) -> None:
    file = jsonl(
        tmp_path / "rows.jsonl", {"question": "a", "answer": ["70"]}, {"question": "b", "answer": [2, 3]}
    )
    with pytest.raises(DataError, match=r"row 2 has several values in one cell"):
        load_problems(DatasetSection(name="local", path=str(file)))


@pytest.mark.parametrize(
    ("encoding", "question", "name"),
    [
        ("cp1252", "Größe von x?", "CP1252"),
        ("gb18030", "一个人有多少苹果", "GB18030"),
        ("utf-16", "How many?", "UTF-16"),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_another_encoding_is_told_with_the_way_out(
    tmp_path: Path, encoding: str, question: str, name: str, suffix: str
) -> None:
    row = {"question": question, "answer": "3"}
    text = json.dumps(row, ensure_ascii=False) if suffix == "jsonl" else f"question,answer\n{question},3\n"
    file = tmp_path / f"rows.{suffix}"
    file.write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=f"is not UTF-8 .*iconv -f {name} -t UTF-8"):
        load_problems(DatasetSection(name="local", path=str(file)))


@pytest.mark.parametrize(("name", "sign"), [("rows.csv", ";"), ("rows.csv", "\t"), ("rows.tsv", "\t")])
def test_semicolons_and_tabs_separate_cells(tmp_path: Path, name: str, sign: str) -> None:
    file = tmp_path / name
    file.write_text(f"question{sign}answer\nWhat is 1,5 + 1?{sign}2.5\n", encoding="utf-8")
    (problem,) = load_problems(DatasetSection(name="local", path=str(file)))
    assert (problem.question, problem.answer) == ("What is 1,5 + 1?", "2.5")


def test_equal_golds_of_a_repeated_question_are_no_conflict() -> None:
    problems = [Problem("1", "a", "\\frac12"), Problem("2", "a", "0.5")]
    assert check_golds(problems).conflicting == [] and check_golds(problems).repeated == 1
