"""``algorist new``: from a data file to a recipe that runs, a reward and its test."""

from __future__ import annotations

import csv
import json
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import LlamaConfig

from algorist.cli.first_recipe import Machine, billions, default_model
from algorist.config import load_recipe
from algorist.data import load_problems

ROWS = [
    {"Nr": n, "Frage": f"Was gibt {n} + {n % 7}?", "Antwort": str(n + n % 7), "Rechnung": f"{n} + {n % 7} = {n + n % 7}"}
    for n in range(1, 41)
]  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps({"data": rows}), encoding="utf-8")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path.name


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet"])
def test_a_recipe_for_each_kind_of_file(
    verb: Any, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(tmp_path / f"sums.{suffix}", ROWS)
    code, out, err = verb("new", name, "--model", "tiny")
    assert code == 0, err
    used = {
        line.split()[0]: line.split()[-1] for line in out.splitlines() if "Was gibt" in line or "=" in line
    }
    assert used["Frage"] == "question" and used["Rechnung"] == "solution"
    assert "algorist preflight sums.yaml" in out and "algorist run sums.yaml" in out
    text = (tmp_path / "sums.yaml").read_text(encoding="utf-8")
    assert text.count("\n") <= 30 and text.count("#") >= 10
    monkeypatch.chdir(tmp_path)
    data = load_recipe("sums.yaml").recipe.data
    train, held_out = load_problems(data.train), load_problems(data.eval)
    assert (len(train), len(held_out)) == (32, 8)
    assert {p.answer for p in train + held_out} == {row["Antwort"] for row in ROWS}
    assert all(p.solution for p in train)
    assert logging.getLogger("algorist").isEnabledFor(logging.WARNING)


def test_the_rewards_test_runs(verb: Any, tmp_path: Path) -> None:
    rows = [{**row, "Frage": f'"{row["Frage"]}" \\ {{fragt}} er\n\'\'\' """'} for row in ROWS]
    assert verb("new", write(tmp_path / "2 sums.csv", rows), "--model", "tiny")[0] == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_data_2_sums_reward.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout
    reward = tmp_path / "data_2_sums_reward.py"
    text = reward.read_text(encoding="utf-8").replace(
        "1 + len", "99 - len"
    )  # of another size, which a .pyc compares
    reward.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "test_data_2_sums_reward.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1, "a reward that pays longer texts passes the test"


def test_decimal_commas_lacking_answers_and_unreadable_ones_are_shown(verb: Any, tmp_path: Path) -> None:
    rows = [{**row, "Antwort": f"{row['Antwort']},5"} for row in ROWS]
    rows[3]["Antwort"], rows[4]["Antwort"] = "", "\\frac{1}{"
    shown = verb("new", write(tmp_path / "a.csv", rows), "--model", "tiny")[1]
    assert "'2,5' have a decimal comma" in shown and "1 of 40 rows lack" in shown
    params = load_recipe(str(tmp_path / "a.yaml")).recipe.data.train.params
    assert params["decimal"] == "," and params["skip_bad_rows"] is True
    lists = verb("new", "a.csv", "--model", "tiny", "--decimal", ".", "--name", "b", "--json")[1]
    assert json.loads(lists)["decimal"] == "." and json.loads(lists)["left_out"] == 1
    assert "decimal" not in (tmp_path / "b.yaml").read_text(encoding="utf-8")


def test_columns_without_a_known_name_are_guessed_by_what_they_hold(verb: Any, tmp_path: Path) -> None:
    rows = [{"n": r["Nr"], "w": r["Rechnung"], "t": r["Frage"], "v": r["Antwort"]} for r in ROWS]
    name = write(tmp_path / "x.jsonl", [*rows[::2], *rows[1::2]])
    shown = json.loads(verb("new", name, "--model", "tiny", "--json")[1])
    assert shown["columns"] == {"question": "t", "answer": "v", "solution": "w"}
    words = ("--solution", "-", "--name", "y", "--model", "tiny", "--no-trial", "--json")
    shown = json.loads(verb("new", name, *words)[1])
    assert shown["columns"] == {"question": "t", "answer": "v"}
    recipe = load_recipe(str(tmp_path / "y.yaml")).recipe
    assert not recipe.sft.enabled and recipe.eval.baseline


def test_chats_of_one_question_are_question_and_solution(
    verb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [{"role": "user", "content": "Frage"}, {"role": "assistant", "content": "Rechnung"}]
    chats = [{"messages": [{**turn, "content": row[turn["content"]]} for turn in turns]} for row in ROWS]
    code, out, err = verb("new", write(tmp_path / "chats.jsonl", chats), "--model", "tiny")
    assert code == 0 and out.splitlines()[1].endswith("question and solution and answer"), err
    monkeypatch.chdir(tmp_path)
    problems = load_problems(load_recipe("chats.yaml").recipe.data.train)
    assert len(problems) == 32
    assert {(p.question, p.solution) for p in problems} < {(row["Frage"], row["Rechnung"]) for row in ROWS}


def test_names_with_signs_of_yaml_and_a_number_that_never_changes(verb: Any, tmp_path: Path) -> None:
    rows = [{"kind": 1, "Frage?": row["Frage"], "The [answer]": row["Antwort"]} for row in ROWS]
    code, _, err = verb("new", write(tmp_path / "signs.csv", rows), "--model", "tiny", "--no-trial")
    assert code == 0, err
    columns = {"question": "Frage?", "answer": "The [answer]"}
    assert load_recipe(str(tmp_path / "signs.yaml")).recipe.data.train.columns == columns


def test_repeated_questions_that_leave_little_to_measure_with_are_shown(verb: Any, tmp_path: Path) -> None:
    shown = verb("new", write(tmp_path / "a.csv", ROWS + ROWS[:30]), "--model", "tiny")[1]
    assert "30 questions are repeated" in shown and "warning: so few held-out problems" in shown
    line = next(line for line in shown.splitlines() if "to train on" in line)
    assert line.startswith("56 to train on, ") and int(line.split()[4]) < 14
    code, _, err = verb("new", write(tmp_path / "b.csv", ROWS * 9), "--model", "tiny")
    assert code == 2 and "also trained on, since 320 questions are repeated" in err


def test_solutions_that_end_in_the_answer_serve_as_both(verb: Any, tmp_path: Path, real_data: Path) -> None:
    rows = [{"question": r["Frage"], "answer": f"{r['Rechnung']}\n#### {r['Antwort']}"} for r in ROWS]
    shown = json.loads(verb("new", write(tmp_path / "g.jsonl", rows), "--model", "tiny", "--json")[1])
    assert shown["columns"] == {"question": "question", "answer": "answer", "solution": "answer"}
    assert load_recipe(str(tmp_path / "g.yaml")).recipe.matcher == "numeric"
    for worked, name, said in (
        (1, "few", "no worked solutions"),
        (30, "most", "30 of them with worked solutions"),
    ):
        mixed = [
            *rows[:worked],
            *({**row, "answer": row["answer"].partition("#### ")[2]} for row in rows[worked:]),
        ]
        out = verb("new", write(tmp_path / f"{name}.jsonl", mixed), "--model", "tiny", "--no-trial")[1]
        assert said in " ".join(out.split()), out
        recipe = load_recipe(str(tmp_path / f"{name}.yaml")).recipe
        assert recipe.sft.enabled == (worked > 1)
    shown = verb("data", "show", "local,columns={solution: answer}", "--path", "few.jsonl", "-n", "2")[1]
    assert [json.loads(text + "}")["solution"] for text in shown.split("\n}\n")[:-1]] == [
        rows[0]["answer"],
        "",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sums.csv", "--question", "Farge"), "no column 'Farge' for the question. Did you mean 'Frage'?"),
        (("empty.csv",), "has no rows"),
        (("few.csv",), "has 3 rows; expected at least 5"),
        (("none.csv",), "no file or folder at none.csv"),
        (("headless.csv",), "the first line should name the columns, but has the number 7"),
        (("sums.txt",), "expected one of .jsonl, .json, .csv, .tsv, .parquet"),
        (("unclear.csv",), "which column has the question and the answer? Columns: p, s. Name yours: --question COLUMN"),
        (("sums.csv", "--name", "taken"), "taken_reward.py: already there, and nothing was written. Take another name: --name taken2"),
        (("sums.csv", "--name", "a-b"), "such as a_b"),
        (("sums.csv", "--decimal", ";"), "--decimal is ';'; expected . or ,"),
        ((), "which file? algorist new FILE"),
    ],
)  # fmt: skip
def test_mistakes(verb: Any, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    write(tmp_path / "sums.csv", ROWS)
    write(tmp_path / "few.csv", ROWS[:3])
    write(tmp_path / "unclear.csv", [{"p": "x", "s": "y"}] * 9)
    (tmp_path / "headless.csv").write_text("What is 3 + 4?,7\n" * 9)
    (tmp_path / "empty.csv").write_text("Frage,Antwort\n")
    (tmp_path / "sums.txt").write_text("x")
    (tmp_path / "taken_reward.py").write_text("mine")
    before = sorted(tmp_path.iterdir())
    code, _, err = verb("new", *words, "--model", "tiny")
    assert code == 2 and said in err
    code, _, err = verb("new", "sums.csv", "--model", "./nowhere", "--no-trial")
    assert code == 2 and "no run or model at './nowhere'" in err
    assert sorted(tmp_path.iterdir()) == before


def test_questions_on_a_terminal(tmp_path: Path) -> None:
    write(tmp_path / "sums.csv", ROWS)
    ours, theirs = pty.openpty()
    os.write(ours, b"\n" + b"Aufgabe\nFrage\n" + b"\n" + b"-\n" + b"tiny\n")
    command = [sys.executable, "-m", "algorist", "new", "--no-trial"]
    done = subprocess.run(command, cwd=tmp_path, stdin=theirs, capture_output=True, text=True, timeout=60)
    os.close(ours), os.close(theirs)
    assert done.returncode == 0, done.stderr
    assert "no column 'Aufgabe'." in done.stdout and "Columns: Nr, Frage, Antwort, Rechnung" in done.stdout
    recipe = load_recipe(str(tmp_path / "sums.yaml")).recipe
    assert recipe.data.train.columns == {"question": "Frage", "answer": "Antwort"}
    assert recipe.model.name == "tiny" and not recipe.sft.enabled


def test_models_and_adapters_follow_the_memory(verb: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    chosen = [default_model(Machine(gb, True)) for gb in (4, 8, 24)]
    assert chosen == ["smollm2", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"]
    assert [default_model(Machine(gb, False)) for gb in (4, 16)] == ["tiny", "smollm2"]
    assert [billions(m) for m in ("Qwen/Qwen2.5-0.5B-Instruct", "HuggingFaceTB/SmolLM2-135M", "own/model")] == [0.5, 0.135, None]  # fmt: skip
    name = write(tmp_path / "sums.csv", ROWS)
    for number, (model, gb, lora, bits) in enumerate(
        (("a/b-0.5B", 16, False, None), ("a/b-4B", 16, True, None), ("a/b-8B", 12, True, "4bit"))
    ):
        words = ("--model", model, "--memory", str(gb), "--gpu", "--name", f"r{number}", "--json")
        assert verb("new", name, *words)[0] == 0
        assert (tmp_path / f"r{number}.yaml").read_text(encoding="utf-8").count("\n") <= 30
        section = load_recipe(str(tmp_path / f"r{number}.yaml")).recipe.model
        assert ((section.lora is not None), section.quantization) == (lora, bits)


def test_the_type_of_products_is_left_to_the_processor(verb: Any, tmp_path: Path) -> None:
    name = write(tmp_path / "sums.csv", ROWS)
    words = ("--model", "smollm2", "--memory", "16", "--cpu", "--json")
    assert verb("new", name, *words)[0] == 0
    recipe = load_recipe(str(tmp_path / "sums.yaml")).recipe
    assert recipe.model.compute_dtype == "auto" and recipe.model.lora is None
    assert recipe.grpo.batch_size == 32


@pytest.mark.parametrize("gb", [6, 8, 16])
def test_on_a_cpu_the_recipe_fits_the_memory(verb: Any, tmp_path: Path, gb: int) -> None:
    """By preflight's plan for a model of SmolLM2's shape, all weights in float32."""
    from algorist.preflight.memory_advice import plan_from_config

    shape = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip
    name = write(tmp_path / "sums.csv", ROWS)
    assert verb("new", name, "--model", "smollm2", "--memory", str(gb), "--cpu", "--json")[0] == 0
    recipe = load_recipe(str(tmp_path / "sums.yaml")).recipe
    for stage in ("sft", "grpo"):
        plan = plan_from_config(
            recipe, stage, shape, dtype=torch.float32, prompt_tokens=128, base_bytes=7 * 10**8
        )  # type: ignore[arg-type]
        assert plan.peak < gb * 1e9, (stage, plan)
    assert recipe.sft.batch_size * recipe.sft.gradient_accumulation_steps == 8


@pytest.mark.long
@pytest.mark.slow
def test_the_recipe_passes_preflight_and_runs(cli: Any, tmp_path: Path) -> None:
    name = write(tmp_path / "sums.csv", ROWS)
    assert cli("new", name, "--model", "tiny").returncode == 0
    done = cli("preflight", "sums.yaml", "--problems", "2", "--samples", "2")
    assert done.returncode == 0 and "brief" in done.stdout, done.stderr
    done = cli("run", "sums.yaml", "sft.max_steps=2", "grpo.max_steps=2", "threads=1")
    assert done.returncode == 0 and (tmp_path / "runs/sums/report.html").is_file(), done.stderr
    lines = (tmp_path / "runs/sums/metrics.jsonl").read_text(encoding="utf-8")
    assert "rewards/brief/mean" in lines
