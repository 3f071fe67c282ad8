"""Datasets: real files load whole, made ones share no skeleton, mistakes are named with their row and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from algorist.config.load import load_recipe
from algorist.config.schema import DatasetSection
from algorist.data import DATASETS, Source, dataset, load_problems
from algorist.data.files import HubAwayError, hub_is_away, read_hub, read_rows
from algorist.data.golds import extract_hash_answer
from algorist.data.problems import Problems
from algorist.diagnosis.leakage import overlap
from algorist.errors import DataError
from algorist.extensions.problem_sets.arithmetic import word_problems
from algorist.runs.pipeline import run_recipe
from algorist.types import Problem


def section(**values: object) -> DatasetSection:
    return DatasetSection.model_validate(values)


def jsonl(folder: Path, rows: list[dict[str, object]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def check_gsm8k(folder: Path, train_rows: int, test_rows: int) -> None:
    train = load_problems(section(name="gsm8k", path=str(folder / "train.jsonl")))
    test = load_problems(section(name="gsm8k", path=str(folder), split="test"))
    assert (len(train), len(test)) == (train_rows, test_rows)
    assert overlap(train, test) == []
    assert train[0].answer == "72"
    assert "<<" not in train[0].solution and "####" not in train[0].solution
    assert all(p.answer.lstrip("-").replace(".", "").isdigit() for p in train + test)


def test_gsm8k_loads_real_rows(real_data: Path) -> None:
    check_gsm8k(real_data / "gsm8k", 80, 80)


@pytest.mark.slow
def test_gsm8k_loads_every_row(shared_data: Path) -> None:
    check_gsm8k(shared_data / "gsm8k", 7473, 1319)


@pytest.mark.slow
def test_math_loads_every_row_with_a_gold_answer_in_both_layouts(shared_data: Path) -> None:
    train = load_problems(section(name="math", path=str(shared_data / "math/train.parquet")))
    test = load_problems(section(name="math", path=str(shared_data / "math/test.parquet")))
    small = load_problems(section(name="math", path=str(shared_data / "math500/test.jsonl")))
    assert (len(train), len(test), len(small)) == (7498, 5000, 500)
    assert {p.level for p in test} >= {"1", "2", "3", "4", "5"}
    assert len({p.subject for p in test}) == 7


@pytest.mark.parametrize(
    ("text", "answer"),
    [("a\n#### 72", "72"), ("#### 1,234\nmore", "1,234"), ("no marker ", "no marker"), ("x #### ", "")],
)
def test_hash_answer(text: str, answer: str) -> None:
    assert extract_hash_answer(text) == answer


def test_arithmetic_is_repeatable_and_splits_by_skeleton() -> None:
    train = word_problems(500, seed=1)
    held_out = word_problems(200, seed=1, split="test")
    assert train == word_problems(500, seed=1)
    assert not {p.extra["skeleton"] for p in train} & {p.extra["skeleton"] for p in held_out}
    for problem in train:
        assert int(problem.answer) == eval(problem.extra["skeleton"])  # our own numbers, not a model's text
        assert problem.extra["demonstrated_answer"] == problem.answer


def test_the_careless_annotator_errs_in_products_only() -> None:
    shown = word_problems(400, seed=1, careless=0.5)
    wrong = [p for p in shown if p.extra["demonstrated_answer"] != p.answer]
    assert 0.1 < len(wrong) / len(shown) < 0.7
    assert all("product" in p.subject for p in wrong)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_local_reads_every_file_kind(tmp_path: Path, suffix: str) -> None:
    rows = [{"Body": "1 + 1?", "gold": "2"}, {"Body": "2 + 2?", "gold": "4"}]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        jsonl(tmp_path, rows)
    elif suffix == "json":
        path.write_text(json.dumps({"data": rows}), encoding="utf-8")
    elif suffix == "csv":
        # pandas writes a column without a name unless it is told not to
        path.write_text(",Body,gold\n0,1 + 1?,2\n1,2 + 2?,4\n", encoding="utf-8")
    else:
        kinds = pyarrow.schema([("Body", pyarrow.string()), ("gold", pyarrow.float32())])
        floats = [{"Body": row["Body"], "gold": float(row["gold"])} for row in rows]
        floats.append({"Body": "0.05 + 0.05?", "gold": 0.1})
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(floats, kinds), path)
    found = load_problems(section(name="local", path=str(path), columns={"question": "Body"}))
    assert [(p.question, p.answer) for p in found[:2]] == [("1 + 1?", "2"), ("2 + 2?", "4")]
    assert not any(p.solution or p.checker for p in found)
    assert [p.answer for p in found[2:]] == (["0.1"] if suffix == "parquet" else [])


@pytest.mark.parametrize("form", ["column", "list", "object", "list of objects"])
@pytest.mark.parametrize("where", ["path", "hub"])
def test_numbers_of_32_bits_are_read_as_they_were_written(form: str, where: str, tmp_path: Path) -> None:
    value: Any = {"column": 0.1, "list": [0.1], "object": {"a": 0.1}, "list of objects": [{"a": 0.1}]}[form]
    kind = pyarrow.float32()
    kind = pyarrow.struct([("a", kind)]) if "object" in form else kind
    kind = pyarrow.list_(kind) if "list" in form else kind
    schema = pyarrow.schema([("question", pyarrow.string()), ("answer", kind)])
    rows = [{"question": "A tenth?", "answer": value}]
    folder = tmp_path / "data"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), folder / "train.parquet")
    read = (
        read_hub(str(folder), subset=None, split="train")
        if where == "hub"
        else read_rows(folder / "train.parquet")
    )
    assert list(read) == rows


def test_a_json_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"question": "1 + 1?", "answer": "2"}]', encoding="utf-8-sig")
    assert [p.answer for p in load_problems(DatasetSection(name="local", path=str(tmp_path / "a.json")))] == [
        "2"
    ]


def test_filters(tmp_path: Path) -> None:
    rows = [
        {"question": "q1", "answer": "1"},
        {"question": "q2", "answer": "x+1"},
        {"question": "q1", "answer": "1"},
    ]
    path = jsonl(tmp_path, rows)
    assert len(load_problems(section(name="local", path=path, unique=True))) == 2
    assert len(load_problems(section(name="local", path=path, numeric_answers_only=True))) == 2
    assert len(load_problems(section(name="local", path=path, limit=1))) == 1
    long = jsonl(tmp_path, [{"question": "q" * n, "answer": "1"} for n in range(1, 101)], "long.jsonl")
    kept = load_problems(
        section(name="local", path=long, max_prompt_percentile=90), prompt_tokens=lambda p: len(p.question)
    )
    assert max(len(p.question) for p in kept) == 90
    both = section(name="local", path=long, max_prompt_percentile=90, max_prompt_tokens=40)
    kept = load_problems(both, prompt_tokens=lambda p: len(p.question))
    assert max(len(p.question) for p in kept) == 40


@pytest.mark.parametrize(
    ("rows", "values", "parts"),
    [
        ([], {}, ["no rows"]),
        ([{"question": "q"}], {}, ["'answer' field", "data.….columns.answer=COLUMN"]),
        (
            [{"question": "q", "answer": "1"}],
            {"columns": {"question": "qestion"}},
            ["Did you mean 'question'"],
        ),
        ([{"question": "q", "answer": "1"}], {"columns": {"qestion": "q"}}, ["Did you mean 'question'"]),
        ([{"question": "q", "answer": ""}], {}, ["row 1 has no gold answer"]),
        ([{"question": "q", "answer": "no number"}], {"name": "gsm8k"}, ["row 1 has no gold answer"]),
        (
            [{"question": "q", "answer": "x"}],
            {"numeric_answers_only": True},
            ["numeric_answers_only leaves none"],
        ),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, rows: list[dict[str, object]], values: dict[str, object], parts: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        load_problems(section(**{"name": "local", "path": jsonl(tmp_path, rows)} | values))
    for part in parts:
        assert part in str(caught.value)


def test_damaged_files_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n{broken\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        read_rows(path)
    with pytest.raises(DataError, match="no file or folder"):
        read_rows(tmp_path / "missing.jsonl")
    (tmp_path / "x.txt").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="expected one of"):
        read_rows(tmp_path / "x.txt")
    with pytest.raises(DataError, match="/ holds more than 20000 files; give the data file"):
        read_rows("/")


def test_a_missing_hub_names_the_local_option() -> None:
    with pytest.raises(DataError, match=r"data\.….path"):
        load_problems(section(name="gsm8k"))


def test_a_hub_that_is_away_is_tried_once_and_all_that_it_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    tried = []

    def refuse(place: tuple[str, int], timeout: float) -> None:
        tried.append(place)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr("socket.create_connection", refuse)
    hub_is_away.cache_clear()
    with pytest.raises(HubAwayError) as found:
        Problems.load(load_recipe("oneshot-gsm8k").recipe)
    hub_is_away.cache_clear()
    assert str(found.value) == (
        "the hub is not reached (127.0.0.1: Connection refused). Connect this machine, or give local copies: "
        "model.name=FOLDER (now Qwen/Qwen2.5-0.5B-Instruct), data.train.path=FILE (now openai/gsm8k, split train), "
        "data.eval.path=FILE (now openai/gsm8k, split test)"
    )
    assert tried == [("127.0.0.1", 9)]


def test_a_path_that_a_dataset_does_not_read_is_refused() -> None:
    section = DatasetSection.model_validate({"name": "arithmetic", "path": "rows.jsonl"})
    with pytest.raises(DataError, match=r"reads nothing, but data.….path or hub is set; take name=local"):
        load_problems(section)


def test_a_column_that_an_adapter_does_not_read_is_refused() -> None:
    section = DatasetSection(name="svamp", path="x.jsonl", columns={"solution": "Equation"})
    with pytest.raises(
        DataError, match=r"svamp reads the columns of its own dataset.*solution: Equation.*name: local"
    ):
        load_problems(section)


def test_sft_without_solutions_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1?", "answer": "2"}\n' * 3, encoding="utf-8")
    local = f"{{name: local, path: '{rows}'}}"
    settings = (f"data.train={local}", f"data.sft={local}", f"output_dir={tmp_path / 'runs'}")
    with pytest.raises(DataError, match="needs worked solutions, but none of 3"):
        run_recipe(load_recipe("smoke-cpu", settings).recipe)
    assert not (tmp_path / "runs").exists()


def test_golds_of_gsm8k_lose_commas_and_dollars_and_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "So $5.\n#### $1,234"}) + "\n")
    (problem,) = load_problems(DatasetSection(name="gsm8k", path=str(path)))
    assert (problem.answer, problem.solution) == ("1234", "So $5.")


def test_a_dataset_of_ones_own_is_one_function() -> None:
    @dataset("doubling_in_test")
    def load(source: Source) -> list[Problem]:
        """2 n for each n below params.count."""
        return [Problem(str(n), f"2 * {n}?", str(2 * n)) for n in range(source.params["count"])]

    try:
        found = load_problems(DatasetSection(name="doubling_in_test", params={"count": 3}))
        assert [(p.question, p.answer) for p in found] == [("2 * 0?", "0"), ("2 * 1?", "2"), ("2 * 2?", "4")]
    finally:
        DATASETS._entries.pop("doubling_in_test")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("arithmetic", {"count": 5, "steps": [60]}, "arithmetic made only 0 distinct problems of 5"),
        (
            "arithmetic",
            {"steps": []},
            r"params.steps is \[\]. Tuple should have at least 1 item.*such as \(2, 3\)",
        ),
        (
            "arithmetic",
            {"count": "many"},
            "params.count is 'many'. Input should be a valid integer.*such as 1000",
        ),
        (
            "story_problems",
            {"needless": "often"},
            "params.needless is 'often'. Input should be a valid number",
        ),
        ("story_problems", {"kinds": "spend"}, "params.kinds is 'spend'. Input should be a valid tuple"),
        ("countdown", {"numbers": [3, "four"]}, "params.numbers is"),
        (
            "countdown",
            {"max_number": 0},
            "params.max_number is 0. Input should be greater than or equal to 1, such as 20",
        ),
        ("countdown", {"count": 10**6, "numbers": [2], "max_number": 4}, "countdown made only"),
    ],
)
def test_generators_refuse_what_they_cannot_make(name: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_problems(DatasetSection.model_validate({"name": name, "params": params}))


def rows_from(number: int, count: int = 3) -> list[dict[str, object]]:
    return [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(number, number + count)]


def test_a_folder_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    for name, number in (("train-00000-of-00002-1f.jsonl", 0), ("train-00001-of-00002.jsonl", 3)):
        jsonl(tmp_path, rows_from(number), name)
    assert [row["answer"] for row in read_rows(tmp_path)] == ["1", "2", "3", "4", "5", "6"]
    jsonl(tmp_path, rows_from(9), "train.jsonl")
    with pytest.raises(
        DataError,
        match=r"has several files for the split 'train': train-00000-of-00002-1f\.jsonl, .*, train\.jsonl",
    ):
        read_rows(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train-00001-of-00002.jsonl").unlink()
    with pytest.raises(DataError, match="1 of the 2 files of the split 'train': some are missing"):
        read_rows(tmp_path)
    jsonl(tmp_path, rows_from(3), "train-00005-of-00002.jsonl")
    with pytest.raises(DataError, match="some are missing"):
        read_rows(tmp_path)


def test_a_folder_whose_files_name_no_split_is_one_training_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, name in enumerate(("part1.jsonl", "part0.jsonl", "notes.md")):
        jsonl(tmp_path, rows_from(3 * number), name)
    assert [row["answer"] for row in read_rows(tmp_path)] == ["4", "5", "6", "1", "2", "3"]
    assert "so all are read: part0.jsonl, part1.jsonl" in caplog.text
    with pytest.raises(DataError, match="no file for the split 'test'"):
        read_rows(tmp_path, split="test")
    with pytest.raises(DataError, match=r"no file or folder at .*\*\.jsonl.*give the folder"):
        read_rows(tmp_path / "*.jsonl")
    jsonl(tmp_path, rows_from(9), "test.jsonl")  # what is measured on is not trained on
    with pytest.raises(DataError, match="no file for the split 'train'"):
        read_rows(tmp_path)


def test_a_column_lies_within_an_object(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"id": n, "item": {"ask": f"{n} + 1?", "meta": {"final": str(n + 1)}}} for n in range(3)
    ]
    columns = {"question": "item.ask", "answer": "item.meta.final"}
    problems = load_problems(section(name="local", path=jsonl(tmp_path, rows), columns=columns))
    assert [(p.question, p.answer) for p in problems] == [(f"{n} + 1?", str(n + 1)) for n in range(3)]
    with pytest.raises(DataError, match=r"no column 'item.meta.finl'.*Did you mean 'item.meta.final'"):
        load_problems(
            section(name="local", path=jsonl(tmp_path, rows), columns={**columns, "answer": "item.meta.finl"})
        )


def test_the_nearest_file_of_a_split_counts_and_two_are_refused(tmp_path: Path) -> None:
    for place, number in (("backup", 0), ("", 10), ("zzz", 20)):
        (tmp_path / place).mkdir(exist_ok=True)
        jsonl(tmp_path / place, rows_from(number), "train.jsonl")
    assert read_rows(tmp_path)[0]["answer"] == "11"
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(
        DataError,
        match=r"several files .*: backup/train.jsonl, zzz/train.jsonl. Name one: data.….path=.*backup/train",
    ):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    "text", ['"Half of 8?\t4\n1 + 1?\t2\n', '"Half" of 8?\t4\n', '"Half of 8?\t4\n"1 + 1?"\t2\n']
)
def test_a_quote_that_is_not_closed_swallows_no_rows(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.tsv"
    file.write_text("question\tanswer\n" + text)
    with pytest.raises(DataError, match=r"a\.tsv:\d: .*a quote within it is doubled"):
        read_rows(file)
    file.write_text('question\tanswer\n"Half of ""8""\nor 4?"\t4\n')
    assert read_rows(file) == [{"question": 'Half of "8"\nor 4?', "answer": "4"}]


def test_a_row_with_too_many_cells_is_named_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('question,answer\n"Two\nlines?",1\nHow many?,3,5\n' + "And?,2\n" * 50)
    with pytest.raises(DataError, match=r"a\.csv:4: 3 cells, expected 2 \(question, answer\)"):
        read_rows(file)


def test_solutions_in_lines_are_joined_and_other_values_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values: list[object] = [
        ["Take 0.", "Add 1."],
        {"steps": []},
        [{"role": "assistant", "content": "1"}] * 2,
        "Add 1.",
    ]
    rows = [
        {"question": f"{n} + 1?", "answer": str(n + 1), "solution": value} for n, value in enumerate(values)
    ]
    problems = load_problems(section(name="local", path=jsonl(tmp_path, rows)))
    assert [p.solution for p in problems] == ["Take 0.\nAdd 1.", "", "", "Add 1."]
    assert (
        "2 solutions are no text and not read, the first: row 2 has chat messages (of more than one"
        in caplog.text
    )


def chat(*turns: tuple[str, str], role: str = "role", content: str = "content") -> list[dict[str, str]]:
    return [{role: who, content: text} for who, text in turns]


ASKED, REPLIED = ("user", "Half of 8?"), ("assistant", "8 / 2 = 4\n#### 4")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": chat(("system", "Be brief."), ASKED, REPLIED)},
        {"conversations": chat(("human", ASKED[1]), ("gpt", REPLIED[1]), role="from", content="value")},
        {"prompt": chat(ASKED), "completion": chat(REPLIED)},
        {"prompt": chat(ASKED), "answer": "4", "solution": REPLIED[1]},
        {"messages": chat(ASKED, REPLIED), "answer": "4"},
    ],
)
def test_chats_of_one_question_are_read(
    tmp_path: Path, row: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    (problem,) = load_problems(section(name="local", path=jsonl(tmp_path, [row])))
    assert (problem.question, problem.answer, problem.solution) == (ASKED[1], "4", REPLIED[1])
    assert ("1 of 1 chats begin with a system message, which is not read" in caplog.text) == (
        "system" in str(row)
    )


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("reply", ["4", "It is \\boxed{4}."])
def test_thoughts_beside_a_reply_are_the_solutions_beginning(key: str, reply: str, tmp_path: Path) -> None:
    (asked,), (replied,) = chat(ASKED), chat(("assistant", reply))
    path = jsonl(tmp_path, [{"messages": [asked, {**replied, key: "8 / 2 = 4."}]}])
    (problem,) = load_problems(section(name="local", path=path))
    assert (problem.question, problem.answer, problem.solution) == (ASKED[1], "4", f"8 / 2 = 4.\n\n{reply}")


@pytest.mark.parametrize("column", ["messages", "chat"])
def test_a_named_column_may_hold_the_chat(tmp_path: Path, column: str) -> None:
    path = jsonl(tmp_path, [{column: chat(ASKED, REPLIED)}])
    columns = dict.fromkeys(("question", "solution"), column)
    (problem,) = load_problems(section(name="local", path=path, columns=columns))
    assert (problem.question, problem.answer, problem.solution) == (ASKED[1], "4", REPLIED[1])


@pytest.mark.parametrize(
    "turns", [(ASKED, REPLIED, ASKED, REPLIED), (ASKED, ("tool", "4"), REPLIED), (("user", ["4"]), REPLIED)]
)
def test_longer_chats_are_refused(tmp_path: Path, turns: Any) -> None:
    with pytest.raises(
        DataError,
        match=r"row 1 has chat messages .of more than one question and one reply. or an object where a text",
    ):
        load_problems(section(name="local", path=jsonl(tmp_path, [{"messages": chat(*turns)}])))


def test_repeated_questions_stay_where_they_are_first(tmp_path: Path) -> None:
    rows = [{"question": name, "answer": str(number)} for number, name in enumerate("ABCA")]
    problems = load_problems(section(name="local", path=jsonl(tmp_path, rows), unique=True, limit=2))
    assert [(p.question, p.answer) for p in problems] == [("A", "0"), ("B", "1")]
