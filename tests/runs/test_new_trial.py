"""``algorist new`` for questions and answers alone: a short trial chooses how the recipe learns, or refuses."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from algorist.config import load_recipe
from algorist.config.schema import DatasetSection
from algorist.data import load_problems
from tests.runs.sums import SMALL, Runs

TRIAL = ("--minutes", "30", "--cpu", "--memory", "8")


def write(path: Path, rows: Sequence[tuple[str, object]]) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *rows])
    return path.name


def sums(count: int, wrong: int = 0) -> list[tuple[str, int]]:
    """Return sums that the model of ``runs`` knows, and some whose gold answers nothing reaches."""
    rng, rows = random.Random(3), []
    for number in range(count):
        a, b = rng.randint(1, 6), rng.randint(1, 6)
        rows.append((f"{a} + {b} = ?" + " " * (number // 36), a + b + 100 * (number % 10 < wrong)))
    return rows


def runs_on(verb: Any, folder: Path, name: str, *more: str) -> list[dict[str, Any]]:
    """Run a recipe that ``new`` wrote, in small; return its lines of metrics."""
    small = ("sft.max_steps=2", "grpo.max_steps=1", "grpo.batch_size=16", "eval.enabled=false", "threads=1")
    code, _, err = verb("run", f"{name}.yaml", *small, *more)
    assert code == 0, err
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_a_model_that_is_right_often_enough_gets_grpo_in_the_form_that_it_writes(
    verb: Any, tmp_path: Path, runs: Runs
) -> None:
    name = write(tmp_path / "known.csv", sums(60))
    code, out, err = verb("new", name, "--model", str(runs.model), *TRIAL)
    assert code == 0, err
    assert "So GRPO at once" in out
    recipe = load_recipe(str(tmp_path / "known.yaml")).recipe
    assert recipe.prompt.format in ("reasoning_answer", "last_number") and not recipe.sft.enabled
    text = (tmp_path / "known.yaml").read_text(encoding="utf-8")
    assert "of 32 right" in text and "#   boxed: 0 of 32 right" in text
    assert recipe.grpo.temperature == 0.6


def test_a_model_that_is_seldom_right_imitates_its_own_right_completions(
    verb: Any, tmp_path: Path, runs: Runs
) -> None:
    name = write(tmp_path / "hard.csv", sums(120, wrong=8))
    code, _, err = verb("new", name, "--model", str(runs.model), *TRIAL)
    assert code == 0, err
    recipe = load_recipe(str(tmp_path / "hard.yaml")).recipe
    assert recipe.sft.enabled and recipe.data.sft.path == "hard_right.jsonl"
    rows = [json.loads(line) for line in (tmp_path / "hard_right.jsonl").read_text().splitlines()]
    assert len(rows) >= 8 and all(row["demonstrated_answer"] == row["answer"] for row in rows)
    origin = json.loads((tmp_path / "hard_right.provenance.json").read_text(encoding="utf-8"))
    assert origin["model"] == str(runs.model) and origin["written"] == len(rows)
    held_out = {row["question"] for row in rows} & {p.question for p in load_problems(recipe.data.eval)}
    assert not held_out, "SFT imitates answers to held-out questions"
    assert f"imitate {len(rows)} right completions of its own" in (tmp_path / "hard.yaml").read_text()
    assert {line["stage"] for line in runs_on(verb, tmp_path, "hard")} >= {"sft", "grpo"}


@pytest.mark.long
def test_a_form_whose_prompts_do_not_fit_is_left_out(verb: Any, tmp_path: Path, runs: Runs) -> None:
    long = [("please " * 40 + question, answer) for question, answer in sums(60)]
    code, _, err = verb("new", write(tmp_path / "long.csv", long), "--model", str(runs.model), *TRIAL)
    assert code == 0 or "error: this model cannot learn from this" in err, (
        err
    )  # not that a prompt is too long


@pytest.mark.long
def test_a_teachers_right_completions_are_imitated(verb: Any, tmp_path: Path, runs: Runs) -> None:
    name = write(tmp_path / "taught.csv", sums(60))
    code, _, err = verb("new", name, "--model", "tiny", "--teacher", str(runs.model), *TRIAL)
    assert code == 0, err
    recipe = load_recipe(str(tmp_path / "taught.yaml")).recipe
    assert recipe.model.name == "tiny" and recipe.data.sft.path == "taught_right.jsonl"
    origin = json.loads((tmp_path / "taught_right.provenance.json").read_text(encoding="utf-8"))
    assert origin["model"] == str(runs.model)
    assert {line["stage"] for line in runs_on(verb, tmp_path, "taught", *SMALL[:1])} >= {"sft", "grpo"}


@pytest.mark.long
def test_generated_problems_teach_what_is_like_them(verb: Any, tmp_path: Path) -> None:
    problems = load_problems(DatasetSection(name="arithmetic", params={"count": 60, "seed": 9}))
    name = write(tmp_path / "stories.csv", [(p.question, p.answer) for p in problems])
    code, out, err = verb("new", name, "--model", "tiny", *TRIAL)
    assert code == 0, err
    assert "steps of SFT on generated problems: " in out and "So SFT on generated problems, then GRPO" in out
    recipe = load_recipe(str(tmp_path / "stories.yaml")).recipe
    assert recipe.sft.enabled and recipe.data.sft.name == "arithmetic"
    assert {line["stage"] for line in runs_on(verb, tmp_path, "stories")} >= {"sft", "grpo"}


@pytest.mark.long
def test_a_trial_that_is_too_short_says_so(verb: Any, tmp_path: Path) -> None:
    name = write(tmp_path / "sums.csv", sums(40))
    code, _, err = verb("new", name, "--model", "tiny", "--minutes", "0.1", *TRIAL[2:])
    assert code == 2 and "the time for a trial of tiny, 0.1 minutes, was over after" in err
    assert "More: --minutes 0.4" in err and not (tmp_path / "sums.yaml").exists()


@pytest.mark.long
def test_what_nothing_teaches_is_refused_with_the_figures(verb: Any, tmp_path: Path) -> None:
    name = write(tmp_path / "x.csv", [(f"Who was king in {n}?", f"king {n}") for n in range(40)])
    code, _, err = verb("new", name, "--model", "tiny", *TRIAL)
    assert code == 2 and "this model cannot learn from this: after " in err and ": 0 of 64 right" in err
    assert "--teacher MODEL" in err and "--no-trial" in err
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"], "something was written"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "tiny", "--no-trial"), "(--no-trial)"),
        (("--model", "some/model-0.5B"), "some/model-0.5B has to be downloaded first: --trial does"),
        (("--model", "tiny", "--teacher", "some/model-7B"), "some/model-7B has to be downloaded first"),
    ],
)
def test_without_a_trial_the_recipe_says_so(
    verb: Any, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    name = write(tmp_path / "sums.csv", sums(40))
    code, out, err = verb("new", name, *words)
    assert code == 0, err
    note = f"Not tried whether this model can learn from answers alone ({said.strip('()')}"
    assert note in " ".join(out.split())
    assert note in (tmp_path / "sums.yaml").read_text(encoding="utf-8")
    assert not load_recipe(str(tmp_path / "sums.yaml")).recipe.sft.enabled
