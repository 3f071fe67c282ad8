"""Facts of gold answers, of kinds of problems, and of sums."""

from __future__ import annotations

from pathlib import Path

import pytest

from algorist.diagnosis import sums
from algorist.diagnosis.demonstrations import absent_answers
from algorist.diagnosis.golds import apart, in_one_way
from algorist.diagnosis.sums import stated_sums, wrong_sums
from algorist.diagnosis.wrong_answers import wrong_in_common
from algorist.store.run_folder import RunFolder
from algorist.store.write import RolloutWriter
from algorist.types import Problem


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("She has 3 + 4 = 7 apples.", [True]),
        ("3 + 4 = 8, then 8 * 2 = 16.", [False, True]),
        ("$1,200 / 5 = $240", [True]),
        ("2 + 3 * 4 = 14", [True]),
        ("20 / 3 = 6.67 and 20 / 3 = 7", [True, True]),
        ("10 - 12 = -2", [True]),
        ("4 x 5 = 20", [True]),
        ("5 / 0 = 0", []),
        ("(2 + 3) * 4 = 20", []),
        ("x + 3 = 5, 3x * 2 = 6, 2 ^ 3 + 1 = 9", []),
        ("3 + 4 = 7 * 2 = 14", []),
        ("200 * 20/100 = 40", [True]),
        (r"2 \cdot 3 + 4 = 10, 2 · 3 + 4 = 10, 5 − 3 = 2", [True, True, True]),
        ("7 / 4 = 1 3/4 and 19 / 5 = 3 remainder 4", []),
        ("3+4=7\n- 7*2=14", [True]),
        ("20% of 50 + 5 = 15, 1 1/2 * 4 = 6", []),
        (r"11 / 4 = 2\frac{3}{4}, \log_2 8 + 1 = 4", []),
        ("95 / 300 = 0.31666666666666665", [True]),
    ],
)
def test_sums_of_a_text(text: str, right: list[bool]) -> None:
    assert [is_right for *_, is_right in stated_sums(text)] == right


def problems(
    count: int, make: str = "What is {n} + 1?", answer: str = "{m}", solution: str = ""
) -> list[Problem]:
    return [
        Problem(str(n), make.format(n=n), answer.format(n=n, m=n + 1), solution=solution.format(n=n, m=n + 1))
        for n in range(count)
    ]


def test_wrong_sums_are_counted_among_solutions_with_a_sum() -> None:
    right = problems(30, solution="{n} + 1 = {m}")
    assert wrong_sums(right) is None
    wrong = problems(10, solution="{n} + 2 = {m}")
    said = wrong_sums(right + wrong + problems(50, solution="It is {m}."))
    assert said == "10 of 40 worked solutions state a wrong result, such as 0 + 2 = 1"
    assert wrong_sums(right + wrong[:7]) is None and wrong_sums(wrong) is None


def test_results_that_are_used_before_the_sum_that_has_them() -> None:
    steps = ("{n} + 200 = 4{n}", "4{n} * 3 = 7{n}", "7{n} - 90 = {m}")
    forth, back = "\n".join(steps), "\n".join(reversed(steps))
    numbers = problems(30, solution=forth)
    assert _out_of_order(numbers) is None
    said = _out_of_order(numbers + problems(10, solution=back))
    assert said is not None and said.startswith(
        "10 of 40 worked solutions use a result before the sum that has it, such as"
    )
    asked = problems(30, "A box of 4{n}, and one of 7{n}?", solution=back)
    assert _out_of_order(asked) is None, "the question has the numbers"
    checked = problems(30, solution="100 - 75 = 25\n{n} * 25 / 25 = {n}\n25 + 75 = 100")
    assert _out_of_order(checked) is None, "a check at the end"
    words = problems(30, "Eight bags of {n}", "64", "8 * 8 = 64\n64 / 8 = 8\n8 * 8 = 64\n64 / 8 = 8")
    assert _out_of_order(words) is None, "eight bags"
    assert _out_of_order(problems(30, "Sort " + "123," * 1600 + "9", solution=forth)) is None


def _out_of_order(demonstrations: list[Problem]) -> str | None:
    """Return what is said of the order: results of these sums are made up, and so are not looked at."""
    return sums._out_of_order([(p, [*stated_sums(p.solution)]) for p in demonstrations])


def test_answers_that_no_solution_holds() -> None:
    known, absent = absent_answers(
        [*problems(5, solution="so {m}, no: {n}"), *problems(4, answer="7{n}", solution="it is {m}")]
    )
    assert (known, len(absent)) == (9, 4)


@pytest.mark.parametrize(
    ("pairs", "way"),
    [
        ([("3", "5"), ("4", "6"), ("10", "12"), ("7", "1")], "3 gold answers are the model's answer +2"),
        ([("3", "5 km"), ("4 km", "$6"), ("1,000", "1002")], "3 gold answers are the model's answer +2"),
        ([("3", "300"), ("4", "400"), ("0.5", "50")], "3 gold answers are the model's answer × 100"),
        ([("3", "-3"), ("4", "-4"), ("1,000", "-1000")], "3 gold answers are the model's answer × -1"),
        ([("3", "7"), ("4", "1"), ("9", "2"), ("6", "6.5")], None),
        ([("x", "y"), ("4", "5"), ("5", "6")], None),
    ],
)
def test_gold_answers_that_differ_in_one_way(pairs: list[tuple[str, str]], way: str | None) -> None:
    assert in_one_way(pairs) == way


def test_the_measure_that_differs_most_between_two_kinds_of_problems() -> None:
    training = problems(40)
    assert apart(training, problems(44)) is None and apart(training, problems(4)) is None
    larger = [Problem(p.id, p.question, p.answer + "00") for p in training]
    said = apart(training, larger)
    assert said is not None and said.startswith("size of a gold answer: 20.5 (median) in training, 2050 in")
    told = apart(training, problems(40, "Now add {n} , 1."))
    assert told == "questions that ask: 100 % in training, 0 % in the evaluation"
    longer = problems(
        40, "This is a question about a sum of numbers that I always wanted to ask you. What is {n} + 1?"
    )
    said = apart(training, longer)
    assert said is not None and said.startswith("characters of a question: ")


@pytest.mark.parametrize("fault", [None, "digit", "word"])
def test_what_wrong_answers_have_in_common(fault: str | None, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_text("config.yaml", "name: x\n")
    wrong = {None: lambda n: False, "digit": lambda n: "7" in str(n), "word": lambda n: n % 3 == 0}[fault]
    rows = [
        {"stage": "grpo", "step": step, "problem_id": str(n), "completion": "c", "gold": "1", "reward": 0.0}
        | {"question": f"What is {n} and {'each' if n % 3 == 0 else 'all'}?"}
        | {"correct": (not wrong(n) and (n + sample) % 5 > 0) or step == 0, "reason": "different"}
        for step in (0, 3)
        for n in range(100, 200)
        for sample in range(4)
    ]
    with RolloutWriter(folder.rollouts) as store:
        store.write(rows)
    named = wrong_in_common(folder.path)
    expected = {
        "digit": "the digit 7 in the question (0 % right, the others ",
        "word": "the word 'each' (0 % right, the others ",
    }
    assert [text for text in named if "right, the others" not in text] == []
    assert named == [] if fault is None else named[0].startswith(expected[fault])
