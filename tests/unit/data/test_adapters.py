"""Dataset adapters: whole real files with their published row counts, known rows, and rows in the true schemas."""

from __future__ import annotations

import json
import logging
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas
import pytest

from algorist.config.schema import DatasetSection
from algorist.data import DATASETS, load_problems
from algorist.data.files import read_rows
from algorist.data.golds import plain_number, without_dollars
from algorist.diagnosis.leakage import overlap
from algorist.errors import ConfigError, DataError
from algorist.prompts import get_format
from algorist.types import Problem
from algorist_grader import numeric_value


def load(name: str, path: Path | str | None = None, split: str = "test", **values: Any) -> list[Problem]:
    return load_problems(DatasetSection(name=name, path=str(path) if path else None, split=split, **values))


def jsonl(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# adapter, folder, rows of the published file, problems, beginning of the first question, first five gold answers
REAL = [
    ("aime", "aime24", 30, "Every morning Aya goes", ["204", "113", "371", "385", "110"]),
    ("aime", "aime25", 30, "Find the sum of all integer bases $b>9$", ["70", "588", "16", "117", "279"]),
    ("amc", "amc23", 40, "Cities $A$ and $B$ are $45$ miles apart.", ["27", "36", "45", "3159", "36"]),
    ("svamp", "svamp", 1000, "There are 87 oranges and 290 bananas", ["145", "19", "3", "198", "63"]),
    (
        "olympiadbench",
        "olympiadbench",
        675,
        "Xenia and Sergey play the following game.",
        ["2", r"\frac{1}{2 n+2}", "2^{1009}", "2", "2n-2"],
    ),
    ("minerva", "minerva_math", 272, "Each of the two Magellan telescopes", ["1.6"]),
    (
        "math500",
        "math500",
        500,
        "Convert the point $(0,3)$",
        [r"\left( 3, \frac{\pi}{2} \right)", "p - q", r"\frac{14}{3}", "9", r"\text{Evelyn}"],
    ),
    (
        "gaokao",
        "gaokao2023en",
        385 - 2,  # two published rows have an empty answer
        "Given sets $M=",
        [r"\{x|-2\leq x < 1\}", r"-1-\sqrt{3}", "-1", "80", "4"],
    ),
    (
        "college_math",
        "college_math",
        2818,
        "Simplify: $-10-4(n-5)$",
        ["10-4 n", "(45,2),(-10,-9)", r"\frac{48 i-56}{85}", "35,36,37", "x^{2}-4 x-2=0"],
    ),
]


@pytest.mark.parametrize(("name", "folder", "count", "begins", "golds"), REAL, ids=[row[1] for row in REAL])
def test_real_files_load_whole(
    name: str, folder: str, count: int, begins: str, golds: list[str], shared_data: Path
) -> None:
    problems = load(name, shared_data / folder)
    assert len(problems) == count
    assert problems[0].question.startswith(begins)
    assert [p.answer for p in problems[: len(golds)]] == golds
    assert len({p.id for p in problems}) == count


def test_integer_golds_of_the_contests(shared_data: Path) -> None:
    for folder in ("aime24", "aime25"):
        golds = [p.answer for p in load("aime", shared_data / folder)]
        assert all(gold.isdigit() and 0 <= int(gold) <= 999 and gold == str(int(gold)) for gold in golds)
    assert load("aime", shared_data / "aime24")[7].answer == "25"  # published as 025
    assert "336" in [p.answer for p in load("aime", shared_data / "aime25")]  # published as 336^\\circ
    for name, folder in (("amc", "amc23"), ("svamp", "svamp")):
        assert all(p.answer.lstrip("-").isdigit() for p in load(name, shared_data / folder))


def test_columns_that_the_benchmarks_bring(shared_data: Path) -> None:
    olympiad = load("olympiadbench", shared_data / "olympiadbench")
    assert {p.subject for p in olympiad} == {"Algebra", "Combinatorics", "Geometry", "Number Theory"}
    assert sum(p.extra["is_multiple_answer"] for p in olympiad) == 94
    assert sum("unit" in p.extra for p in olympiad) == 8 and sum("error" in p.extra for p in olympiad) == 1
    assert all(p.solution for p in olympiad)
    assert olympiad[0].id == "1606" and olympiad[0].extra["answer_type"] == "Numerical"
    assert (olympiad[13].id, olympiad[13].answer) == ("1664", "$69$,$84$")
    minerva = load("minerva", shared_data / "minerva_math")
    assert len({p.subject for p in minerva}) == 9 and minerva[0].solution.startswith("Start with:")
    math500 = load("math500", shared_data / "math500")
    assert math500[0].id == "test/precalculus/807.json"
    assert {p.level for p in math500} == {"1", "2", "3", "4", "5"} and len({p.subject for p in math500}) == 7
    college = load("college_math", shared_data / "college_math")
    assert len({p.subject for p in college}) == 7 and "algebra" in {p.subject for p in college}


def test_svamp_joins_body_and_question() -> None:
    file = Path(str(files("algorist.extensions.published_sets") / "svamp_300.jsonl"))
    svamp = load("svamp", file)
    assert svamp[0].question.endswith("organized into 93 groups. How big is each group of bananas?")
    assert svamp[0].extra["equation"] == "( 290.0 / 2.0 )" and svamp[0].id == "chal-777"
    for row, problem in zip(read_rows(file), svamp, strict=True):
        assert problem.question.startswith(row["Body"].strip())
        assert problem.question.endswith(row["Question"].strip())
    assert len(svamp) == 300 and all(p.answer.lstrip("-").isdigit() for p in svamp)


@pytest.mark.slow
def test_dapo_loads_plain_problems(shared_data: Path) -> None:
    problems = load("dapo", shared_data / "dapo_math_14k", "train")
    assert len(problems) == 14_116
    assert problems[0].answer == "34" and problems[0].question.endswith("find $a + b + c$.")
    text = "\n".join(p.question for p in problems)
    assert "Please reason step by step" not in text and "<think>" not in text and "Cannot Solve" not in text
    assert all(numeric_value(p.answer) is not None for p in problems)
    assert min(len(p.question) for p in problems) > 10


def test_openmath_reasoning_on_real_rows(shared_data: Path) -> None:
    path = shared_data / "openmathinstruct2_sample/sample.jsonl"
    problems = load("openmath_reasoning", path, "train")
    assert len(problems) == 100
    assert problems[0].question.startswith("Solve for $y$:") and problems[0].answer == "2"
    assert all(p.solution for p in problems)
    numeric = load("openmath_reasoning", path, "train", numeric_answers_only=True)
    assert 50 < len(numeric) < 100  # the others are formulas
    assert all(numeric_value(p.answer) is not None for p in numeric)


def test_openmath_reasoning_takes_the_think_tags_off_and_counts_what_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {
        "expected_answer": "4",
        "problem_type": "has_answer_extracted",
        "problem_source": "aops_c4_high_school_math",
        "generation_model": "DeepSeek-R1",
        "pass_rate_72b_tir": "0.9",
        "problem": "What is 2 + 2?",
        "generated_solution": "<think>\nTwo and two is four.\n</think>\n\nThe sum is \\boxed{4}.",
        "inference_mode": "cot",
    }
    rows = [row, {**row, "problem": "Prove it.", "expected_answer": ""}]
    with caplog.at_level(logging.WARNING, "algorist.data"):
        (problem,) = load("openmath_reasoning", jsonl(tmp_path, rows), "cot")
    assert problem.solution == "Two and two is four.\n\n\nThe sum is \\boxed{4}."
    assert (problem.answer, problem.subject) == ("4", "aops_c4_high_school_math")
    assert "1 of 2 rows are left out" in caplog.text


@pytest.mark.parametrize("missing", ["expected_answer", "problem", "generated_solution"])
def test_openmath_reasoning_names_a_missing_column(tmp_path: Path, missing: str) -> None:
    row = {"expected_answer": "4", "problem": "2 + 2?", "generated_solution": "4"}
    del row[missing]
    with pytest.raises(DataError, match=f"no '{missing}' field"):
        load("openmath_reasoning", jsonl(tmp_path, [row]), "cot")


def test_numina_tir_takes_the_last_box_with_nested_braces(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {
            "problem": "Half of one?",
            "solution": "First \\boxed{9}, no: $\\boxed{\\frac{1}{2}}$.",
            "messages": [],
        },
        {"problem": "Prove it.", "solution": "Done.", "messages": []},
        {"problem": "", "solution": "\\boxed{1}", "messages": []},
        {"problem": "2 + 3?", "solution": "```python\nprint(2 + 3)\n```\n$\\boxed{5}$", "messages": []},
    ]
    with caplog.at_level(logging.WARNING, "algorist.data"):
        problems = load("numina_tir", jsonl(tmp_path, rows), "train")
    assert [(p.question, p.answer) for p in problems] == [("Half of one?", r"\frac{1}{2}"), ("2 + 3?", "5")]
    assert problems[1].solution.startswith("```python")
    assert "2 of 4 rows are left out" in caplog.text
    with pytest.raises(DataError, match="1 of 1 rows cannot be used:\n  row 1 has no boxed answer"):
        load("numina_tir", jsonl(tmp_path, rows[1:2], "unboxed.jsonl"), "train")


STRATOS = {
    "system": "Your role as an assistant involves thoroughly exploring questions.",
    "conversations": [
        {"from": "user", "value": "Return your final response within \\boxed{}. What is $6 \\cdot 7$?\n"},
        {
            "from": "assistant",
            "value": "<|begin_of_thought|>\n\nSix sevens. Maybe \\boxed{41}? No.\n\n<|end_of_thought|>\n\n"
            "<|begin_of_solution|>\n\nThe product is $\\boxed{42}$.\n\n<|end_of_solution|>",
        },
    ],
}


def test_bespoke_stratos_separates_thought_and_solution(tmp_path: Path) -> None:
    code = {
        "system": "s",
        "conversations": [
            {"from": "user", "value": "Write a program."},
            {
                "from": "assistant",
                "value": "<|begin_of_thought|>\nHm.\n<|end_of_thought|>\n<|begin_of_solution|>\nprint(1)\n<|end_of_solution|>",
            },
        ],
    }
    (problem,) = load("bespoke_stratos", jsonl(tmp_path, [STRATOS, code]), "train")
    assert problem.question == r"What is $6 \cdot 7$?"
    assert (problem.answer, problem.solution) == ("42", "Six sevens. Maybe \\boxed{41}? No.")
    shown = get_format("think_answer").demonstrate(problem.solution, problem.answer)
    assert "<|" not in shown and get_format("think_answer").parse(shown).answer == "42"


def test_sft_jsonl_reads_the_r1_zero_form_back(tmp_path: Path) -> None:
    r1_zero = get_format("r1_zero")
    question = "What is 6 times 7?\nThe User: label stands inside."
    rows = [
        {
            "prompt": r1_zero.render(question),
            "response": "Six sevens. </think> <answer> 41 </answer>",
            "ground_truth": "42",
            "unique_id": "test/a/1.json",
        },
        {"prompt": "User: 1 + 1?\nAssistant: <think>", "response": "One more. </think> <answer>2</answer>"},
        {"prompt": "What is 5?", "response": "It is five.", "answer": "5"},
    ]
    first, second, third = load("sft_jsonl", jsonl(tmp_path, rows), "train")
    assert first.question == question
    assert (first.answer, first.solution, first.id) == ("42", "Six sevens.", "test/a/1.json")
    assert (
        first.extra["demonstrated_answer"] == "41"
    )  # SFT imitates the row as it is, the gold stays the gold
    assert (second.question, second.answer, second.solution) == ("1 + 1?", "2", "One more.")
    assert (third.question, third.answer, third.solution) == ("What is 5?", "5", "It is five.")
    shown = r1_zero.demonstrate(second.solution, second.answer)
    assert shown == "One more. </think> <answer> 2 </answer>"
    with pytest.raises(DataError, match="row 1 has no gold answer"):
        load("sft_jsonl", jsonl(tmp_path, [{"prompt": "q", "response": "a"}], "bare.jsonl"), "train")


WRAPPED = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\nFind $x$.\n\nIt is small.\n\nRemember to put your "
    'answer on its own line after "Answer:".'
)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Find $x$.\n\nIt is small.", "solution": "34", "extra_info": {"index": "a"}},
        {"prompt": "Find $x$.\n\nIt is small.", "solution": "worked", "answer": 34},
        {
            "prompt": [{"role": "user", "content": WRAPPED}],
            "reward_model": {"ground_truth": "34", "style": "rule"},
        },
        {"prompt": WRAPPED, "answer": "034"},
    ],
)
def test_dapo_reads_each_published_layout(tmp_path: Path, row: dict[str, Any]) -> None:
    (problem,) = load("dapo", jsonl(tmp_path, [row]), "train")
    assert (problem.question, problem.answer) == ("Find $x$.\n\nIt is small.", "34")


def test_dapo_without_an_answer_names_the_field(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="training dataset has no 'answer' field"):
        load("dapo", jsonl(tmp_path, [{"prompt": "q", "note": "n"}]), "train")


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (27.0, "27"),
        ("145.0", "145"),
        ("025", "25"),
        ("-3.0", "-3"),
        ("000", "0"),
        ("2.5", "2.5"),
        ("+7", "7"),
        (None, ""),
        ("x.0", "x.0"),
        ("1e3", "1e3"),
        ("10", "10"),
    ],
)
def test_plain_number(text: object, plain: str) -> None:
    assert plain_number(text) == plain


@pytest.mark.parametrize(
    ("text", "inside"),
    [("$x$", "x"), ("$69$,$84$", "$69$,$84$"), (r"$\$ 4$", r"$\$ 4$"), ("5", "5"), ("$", "$"), (None, "")],
)
def test_without_dollars(text: object, inside: str) -> None:
    assert without_dollars(text) == inside


def test_a_set_of_matharena_and_gsm8k_platinum(tmp_path: Path) -> None:
    """Columns as the sets have them (eth-sri/matharena ``runner.py``; lm-evaluation-harness ``gsm8k-platinum.yaml``)."""
    arena, platinum = tmp_path / "arena.jsonl", tmp_path / "platinum.jsonl"
    rows = [
        {
            "problem_idx": 1,
            "problem": "Find $x$.",
            "answer": "$\\frac{1}{2}$",
            "problem_type": ["Algebra", "Geometry"],
        },
        {"problem_idx": 2, "problem": "Find all.", "answer": "1, 2", "problem_type": None},
    ]
    arena.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    first, second = load("matharena_hmmt_feb_2026", arena)
    assert (first.id, first.answer, first.subject) == ("1", "\\frac{1}{2}", "Algebra, Geometry")
    assert (second.answer, second.subject) == ("1, 2", "")
    row = {"question": "2 + 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4", "cleaning_status": "verified"}
    platinum.write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert [p.answer for p in load("gsm8k_platinum", platinum)] == ["4"]


def test_wrong_params_are_named() -> None:
    with pytest.raises(DataError, match="Expected year: 24, 25 or 26"):
        load("aime", params={"year": 1999})
    with pytest.raises(DataError, match="Did you mean 'year'"):
        load("aime", params={"yaer": 24})
    with pytest.raises(DataError, match=r"gsm8k: data.….params has the key 'skip_bad_rows'.*Expected: none"):
        load("gsm8k", params={"skip_bad_rows": True})


def test_math_is_all_of_its_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls = []

    def load_dataset(name: str, subset: str | None, split: str) -> datasets.Dataset:
        calls.append((name, subset))
        row = {
            "problem": f"{subset}: 1 + 1?",
            "solution": "It is \\boxed{2}.",
            "type": subset,
            "level": "Level 1",
        }
        return datasets.Dataset.from_list([row])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    problems = load("math", split="train")
    assert len(problems) == 7 and {p.subject for p in problems} >= {"algebra", "precalculus"}
    assert {subset for _, subset in calls} == {p.subject for p in problems}
    calls.clear()
    load("math", split="train", hub="me/math")
    load("math", split="train", subset="geometry")
    assert calls == [("me/math", None), ("EleutherAI/hendrycks_math", "geometry")]


def test_own_hub_datasets_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, the message names the hub dataset and the split that the adapter would have loaded."""
    import datasets

    calls: list[Any] = []

    def load_dataset(*given: Any, **named: Any) -> None:
        calls.append((*given, named["split"]))
        raise OSError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    asked = {
        "aime": ("math-ai/aime25", "test", {"params": {"year": 2025}}),
        "gsm8k_platinum": ("madrylab/gsm8k-platinum", "test", {}),
        "matharena_hmmt_feb_2026": ("MathArena/hmmt_feb_2026", "train", {}),
        "openmath_reasoning": ("unsloth/OpenMathReasoning-mini", "cot", {}),
        "gaokao": ("MARIO-Math-Reasoning/Gaokao2023-Math-En", "train", {}),
        "numina_tir": ("AI-MO/NuminaMath-TIR", "test", {}),
        "dapo": ("open-r1/DAPO-Math-17k-Processed", "test", {}),
        "bespoke_stratos": ("bespokelabs/Bespoke-Stratos-17k", "test", {}),
    }
    for name, (hub, split, values) in asked.items():
        with pytest.raises(DataError, match=f"'{hub}' \\(split {split}\\)"):
            load(name, **values)
    assert ("open-r1/DAPO-Math-17k-Processed", "en", "test") in calls
    for section in ({"hub": "me/mine"}, {"hub": "me/mine", "subset": "small"}):
        with pytest.raises(DataError, match="'me/mine'"):
            load("dapo", split="train", **section)
    assert calls[-2:] == [("me/mine", "en", "train"), ("me/mine", "small", "train")]
    with pytest.raises(DataError, match=r"needs data\.….path"):
        load("sft_jsonl")


def parts(shared_data: Path, *weights: float | None) -> list[dict[str, Any]]:
    found = [
        {"name": "gsm8k", "path": str(shared_data / "gsm8k/train.jsonl"), "limit": 60},
        {"name": "math500", "path": str(shared_data / "math500/test.jsonl"), "limit": 30},
        {"name": "amc", "path": str(shared_data / "amc23"), "split": "test"},
    ]
    return [
        {**part, **({"weight": w} if w is not None else {})} for part, w in zip(found, weights, strict=True)
    ]


def counts(problems: list[Problem]) -> dict[str, int]:
    names = [p.extra["dataset"] for p in problems]
    return {name: names.count(name) for name in sorted(set(names))}


@pytest.mark.slow
def test_mixture_joins_parts_whole(shared_data: Path) -> None:
    values = {"params": {"parts": parts(shared_data, None, None, None)}}
    problems = load("mixture", **values)
    assert counts(problems) == {"gsm8k": 60, "math500": 30, "amc": 40}
    assert len({p.id for p in problems}) == 130 and {p.extra["dataset"] for p in problems[:30]} == {
        "gsm8k",
        "math500",
        "amc",
    }
    assert problems == load("mixture", **values)
    in_order = load("mixture", params={**values["params"], "seed": None})
    assert [p.extra["dataset"] for p in in_order] == ["gsm8k"] * 60 + ["math500"] * 30 + ["amc"] * 40
    assert [p.id for p in load("mixture", params={**values["params"], "seed": 1})] != [p.id for p in problems]
    assert len(load("mixture", **values, limit=7)) == 7


def test_an_empty_cell_of_a_table_is_no_gold_answer_and_zero_is_one(tmp_path: Path) -> None:
    """A table of numbers has NaN where a cell is empty."""
    for name, rows, golds in (
        ("dapo", [{"prompt": "a?", "answer": 3.0}, {"prompt": "b?", "answer": None, "solution": "4"}], ["3", "4"]),
        ("math", [{"problem": "a?", "answer": None, "solution": "\\boxed{4}"}, {"problem": "b?", "answer": 0.0}], ["4", "0"]),
        ("aime", [{"problem": "a?", "answer": 27}, {"problem": "b?", "answer": 0}], ["27", "0"]),
        ("amc", [{"problem": "a?", "answer": 27.0}, {"problem": "b?", "answer": None}], None),
        ("svamp", [{"Body": "b.", "Question": "q?", "Answer": 1.5}, {"Body": "b.", "Question": "r?", "Answer": None}], None),
    ):  # fmt: skip
        path = tmp_path / f"{name}.parquet"
        pandas.DataFrame(rows).to_parquet(path)
        if golds is None:
            with pytest.raises(DataError, match=r"row 2 has no (gold answer|answer)"):
                load(name, path)
        else:
            assert [p.answer for p in load(name, path)] == golds, name


def test_a_mixtures_parts_of_one_dataset_have_their_own_names(tmp_path: Path) -> None:
    for name in ("algebra.jsonl", "geometry.jsonl"):
        (tmp_path / name).write_text('{"question": "1+1?", "answer": "2"}\n')
    sums = {"name": "arithmetic", "params": {"count": 1}}
    files = [{"name": "local", "path": str(tmp_path / name)} for name in ("algebra.jsonl", "geometry.jsonl")]
    problems = load("mixture", params={"parts": [*files, sums, sums], "seed": None})
    assert [p.extra["dataset"] for p in problems] == [
        "local/algebra.jsonl",
        "local/geometry.jsonl",
        "arithmetic/2",
        "arithmetic/3",
    ]


def test_mixture_keeps_proportions_without_repeating(shared_data: Path) -> None:
    problems = load("mixture", params={"parts": parts(shared_data, 2, 2, 1)})
    assert counts(problems) == {"gsm8k": 30, "math500": 30, "amc": 15}
    assert len({p.question for p in problems}) == 75


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "expected a list of data sections"),
        ({"parts": [], "sed": 1}, "Did you mean 'seed'"),
        ({"parts": [{"path": "x.jsonl"}]}, "part 0 has no name"),
        ({"parts": [{"name": "gsm8k", "limt": 3}]}, "part 0, key limt.*Did you mean 'limit'"),
        (
            {"parts": [{"name": "arithmetic", "weight": 1}, {"name": "arithmetic"}]},
            "part 1 has the weight None",
        ),
        ({"parts": [{"name": "arithmetic", "weight": -1}]}, "part 0 has the weight -1"),
        ({"parts": [{"name": "arithmetic", "max_prompt_tokens": 9}]}, "set it at the mixture itself"),
        ({"parts": [{"name": "arithmetic", "checker": "own.py:f"}]}, "parts take registered ones"),
    ],
)
def test_mixture_names_the_mistake(params: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load("mixture", params=params)


def test_mixture_refuses_unknown_datasets_and_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'gsm8k'"):
        load("mixture", params={"parts": [{"name": "gsm8"}]})
    with pytest.raises(DataError, match=r"put it into params\.parts"):
        load("mixture", jsonl(tmp_path, [{}]), params={"parts": [{"name": "arithmetic"}]})


@pytest.mark.slow
def test_holdout_cuts_without_overlap(shared_data: Path) -> None:
    path = shared_data / "dapo_math_14k"
    train = load("holdout", path, "train", params={"of": "dapo"})
    rest = load("holdout", path, "train", params={"of": "dapo", "part": "held_out"})
    assert len(train) == int(14_116 * 0.9)
    assert 1200 < len(rest) <= 14_116 - len(train)  # without the repeated questions, about one in a hundred
    assert overlap(train, rest) == []
    halves = [
        load("holdout", shared_data / "math500", params={"of": "math500", "seed": seed, "share": 0.5})
        for seed in (0, 1)
    ]
    assert [len(half) for half in halves] == [250, 250] and halves[0] != halves[1]
    year = load("holdout", shared_data / "aime24", params={"of": "aime", "year": 24, "part": "held_out"})
    assert len(year) == 3


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "params.of is missing"),
        ({"of": "arithmetic", "part": "test"}, "expected train or held_out"),
        ({"of": "arithmetic", "share": 90}, "expected a share between 0 and 1"),
    ],
)
def test_holdout_names_the_mistake(params: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load("holdout", params=params)


def test_every_adapter_is_listed_with_one_line() -> None:
    named = {"numina_tir", "openmath_reasoning", "dapo", "bespoke_stratos", "svamp", "olympiadbench", "aime"}
    named |= {"amc", "minerva", "math500", "gaokao", "college_math", "mixture", "holdout", "sft_jsonl"}
    assert named <= set(DATASETS)
    for name in named:
        assert len((DATASETS.get(name).__doc__ or "").strip().splitlines()[0]) > 20, name
