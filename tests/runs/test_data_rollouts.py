"""SFT data by the grader: demonstrations that are right, and a run's own right rollouts."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from algorist.config.load import load_recipe
from algorist.config.schema import DatasetSection, Recipe
from algorist.data import load_problems
from algorist.data.load import read_table
from algorist.errors import ConfigError, DataError
from algorist.prompts import get_format
from algorist.runs.asking import recipe_format
from algorist.runs.pass_rates import table_path
from algorist.runs.pipeline import Run, run_recipe
from algorist.runs.rate import rate
from algorist.runs.sample import demonstrations, sample
from algorist.store.read import rollouts
from algorist_grader import grade


def section(name: str, **values: Any) -> DatasetSection:
    return DatasetSection.model_validate({"name": name, **values})


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def r1_zero(question: str, response: str, gold: str) -> dict[str, str]:
    prompt = f"A conversation between User and Assistant.\nUser: {question}\nAssistant: <think>"
    return {"prompt": prompt, "response": response, "ground_truth": gold}


# --- demonstrations whose answer is right


def test_only_right_demonstrations_are_kept_and_the_others_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        r1_zero("2 + 2?", "Two and two. </think> <answer> 4 </answer>", "4"),
        r1_zero("1/2 + 1/2?", "Halves. </think> <answer> \\frac{2}{2} </answer>", "1"),
        r1_zero("3 + 3?", "Wrong. </think> <answer> 7 </answer>", "6"),
        r1_zero("4 + 4?", "No tags, no box: eight.", "8"),
        r1_zero("5 + 5?", "So it is \\boxed{10}.", "10"),
    ]
    file = jsonl(tmp_path / "sft.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        kept = load_problems(section("sft_jsonl", path=str(file), correct_only=True))
    assert [p.question for p in kept] == ["2 + 2?", "1/2 + 1/2?", "5 + 5?"]
    assert "3 of 5 demonstrations of 'sft_jsonl' are right" in caplog.text
    assert "1 with a wrong answer and 1 that state none" in caplog.text
    assert len(load_problems(section("sft_jsonl", path=str(file)))) == 5


def test_careless_demonstrations_are_left_out_before_the_limit() -> None:
    params = {"count": 400, "seed": 2, "careless": 0.6}
    every = load_problems(section("arithmetic", params=params))
    kept = load_problems(section("arithmetic", params=params, correct_only=True))
    right = [p for p in every if grade(p.extra["demonstrated_answer"], p.answer).correct]
    assert kept == right and 100 < len(kept) < 400
    assert load_problems(section("arithmetic", params=params, correct_only=True, limit=30)) == right[:30]


def test_solutions_that_state_no_answer_are_refused_with_the_reason(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1), "solution": "Count on."} for n in range(3)]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        DataError, match=r"0 of 3 demonstrations .* 0 with a wrong answer and 3 that state none"
    ):
        load_problems(section("local", path=str(file), correct_only=True))


def test_sampled_demonstrations_keep_what_their_checker_reads(tmp_path: Path) -> None:
    problems, form = load_problems(section("countdown", params={"count": 3})), get_format("reasoning_answer")
    row = {"correct": True, "truncated": False, "prompt": "", "completion_tokens": 5, "turns": None}
    rows = [row | {"problem_id": p.id, "completion": form.demonstrate("So.", p.answer)} for p in problems]
    problems[0].extra["response"] = "an old one"
    file = tmp_path / "right.jsonl"
    file.write_text(demonstrations(rows, problems, form, file)[0])
    read = load_problems(section("local", path=str(file), correct_only=True))
    assert [p.question for p in read] == [p.question for p in problems]
    assert [p.solution for p in read] == ["So."] * 3 and "response" not in read[0].extra


# --- a run's own right rollouts


SMALL = (
    "threads=1",
    "eval.enabled=false",
    "sft.save_steps=1000",
    "grpo.save_steps=1000",
    "sft.learning_rate=1e-2",
    "grpo.max_steps=2",
    "grpo.batch_size=48",
    "grpo.group_size=8",
    "grpo.max_completion_tokens=40",
)


def recipe(folder: Path, name: str, *overrides: str) -> Recipe:
    """A run on problems whose answer is one of three: a tiny model that knows the format is right by chance."""
    rows = [
        {
            "question": f"Say {n % 3 + 1}, please ({n}).",
            "answer": str(n % 3 + 1),
            "solution": f"It is {n % 3 + 1}.",
        }
        for n in range(24)
    ]
    file = jsonl(folder / "rows.jsonl", rows)
    data = [f"data.train={{name: local, path: '{file}'}}", f"data.sft={{name: local, path: '{file}'}}"]
    own = [f"output_dir={folder}", f"run_name={name}"]
    return load_recipe("smoke-cpu", [*SMALL, *data, *own, *overrides]).recipe


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose tiny model solves some problems."""
    return run_recipe(recipe(tmp_path_factory.mktemp("rollouts"), "first", "sft.max_steps=100"))


# --- what a model writes, sampled and graded without a run


@pytest.mark.slow
def test_right_completions_are_written_as_a_dataset_for_sft(first: Run, verb: Any, tmp_path: Path) -> None:
    """Only right ones, each once, with where they come from; the dataset trains, and the same command writes the same text."""
    folder = first.folder.path
    (tmp_path / "r.yaml").write_text((folder / "config.yaml").read_text())
    shared = (
        "data",
        "sample",
        str(tmp_path / "r.yaml"),
        "threads=1",
        "--model",
        str(folder),
        "--samples",
        "6",
    )
    code, out, err = verb(*shared, "--out", str(tmp_path / "right.jsonl"))
    assert code == 0, err
    lines = [json.loads(line) for line in (tmp_path / "right.jsonl").read_text().splitlines()]
    made_by = json.loads((tmp_path / "right.provenance.json").read_text())
    assert (
        made_by["problems"] == 24 and made_by["completions"] == 24 * 6 and made_by["sampling"]["samples"] == 6
    )
    assert made_by["right"] == len(lines) + made_by["repeated"] + made_by["unreadable"]
    assert made_by["environment"]["versions"]["torch"] and str(folder) in made_by["model"]
    assert lines and len({(line["question"], line["solution"]) for line in lines}) == len(lines)
    assert all(grade(line["demonstrated_answer"], line["answer"]).correct for line in lines)
    assert (
        f"{made_by['right']} of 144 completions are right" in out
        and "Next: algorist run" in out
        and "--only sft" in out
    )
    assert not list(tmp_path.glob("*progress*"))
    problems = load_problems(section("local", path=str(tmp_path / "right.jsonl"), correct_only=True))
    assert [p.solution for p in problems] == [line["solution"] for line in lines]
    assert problems[0].extra["demonstrated_answer"] == lines[0]["demonstrated_answer"]

    code, out, err = verb(*shared, "--out", str(tmp_path / "few.jsonl"), "--per-problem", "1", "--json")
    few = (tmp_path / "few.jsonl").read_text().splitlines()
    assert code == 0 and json.loads(out)["written"] == len(few) == len({line["question"] for line in lines})
    assert set(few) <= {json.dumps(line | {"id": line["id"].partition("#")[0]}) for line in lines}
    code, _, err = verb(*shared, "--out", str(tmp_path / "few.jsonl"))
    assert code == 2 and "few.jsonl exists; take another name (--out)" in err

    # What an environment has answered is no answer to the question alone: it asks some problems again.
    (tmp_path / "mine.py").write_text(
        "class Twice:\n    def start(self, problem): self.again = '1)' in problem.question and problem.question\n"
        "    def reply(self, rollout):\n        said, self.again = self.again, None\n        return said or None\n"
    )
    more = (f"environment={tmp_path / 'mine.py'}:Twice", "grpo.max_completion_tokens=160")
    code, out, err = verb(*shared, *more, "--out", str(tmp_path / "once.jsonl"), "--json")
    assert code == 0 and json.loads(out)["unreadable"] > 0, err
    once = [json.loads(line) for line in (tmp_path / "once.jsonl").read_text().splitlines()]
    assert once and not any("1)" in line["question"] for line in once)
    code, _, err = verb("data", "sample", "smoke-cpu", "--out", str(tmp_path / "none.jsonl"))
    assert code == 2 and "model.name is tiny" in err and "--model RUN/sft/final" in err


@pytest.mark.slow
def test_a_table_of_pass_rates_is_that_of_its_checker(first: Run, tmp_path: Path) -> None:
    made = tmp_path / "made"
    for name, verdict in (("yes.py", True), ("no.py", False)):
        (tmp_path / name).write_text(f"def check(problem, answer): return {verdict}\n")
        own = recipe(tmp_path, "rated", f"data.train.checker={tmp_path / name}:check", f"output_dir={made}")
        rows = read_table(rate(own, samples=2, model=first.folder.path / "grpo/final"))["problems"]
        assert any(row["right"] for row in rows.values()) == verdict
    before = table_path(own, recipe_format(own))
    (tmp_path / name).write_text("def check(problem, answer): return answer == '2'\n")
    assert table_path(own, recipe_format(own)) != before


@pytest.mark.slow
def test_completions_end_where_grpo_ends_them(first: Run, tmp_path: Path) -> None:
    """At its stop strings, not at those of the evaluation; rates under others lie in another table."""
    model, rated = first.folder.path / "sft/final", []
    for key in ("eval", "grpo"):
        own = recipe(
            tmp_path,
            "own",
            f"{key}.stop_strings=['</reasoning>']",
            *(["grpo.stop_strings=[]"] if key == "eval" else []),
        )
        table = rate(own, samples=4, model=model)
        rated.append((table, sum(row["right"] for row in read_table(table)["problems"].values())))
    assert rated[0][1] > 0 and rated[1][1] == 0 and rated[0][0] != rated[1][0]
    with pytest.raises(DataError, match="none of 48 completions"):
        sample(own, tmp_path / "right.jsonl", samples=2, model=model)


@pytest.mark.slow
def test_right_rollouts_become_demonstrations(first: Run, caplog: pytest.LogCaptureFixture) -> None:
    right = rollouts(first.folder.path, correct=True, limit=None)
    assert right, "the tiny model solved nothing: the test would show nothing"
    with caplog.at_level(logging.WARNING):
        found = load_problems(section("rollouts", params={"run": str(first.folder.path)}))
    form, known = get_format("reasoning_answer"), {p.id: p for p in first.train}
    written = {(r["problem_id"], " ".join(r["completion"].split())) for r in right}
    for problem in found:
        origin = known[problem.id.partition("#")[0]]
        assert (problem.question, problem.answer) == (origin.question, origin.answer)
        shown = problem.extra["demonstrated_answer"]
        assert grade(shown, problem.answer).correct
        assert (origin.id, " ".join(form.demonstrate(problem.solution, shown).split())) in written
    assert len({p.id for p in found}) == len(found)
    assert len({(p.question, p.solution) for p in found}) == len(found)
    assert (
        f"{len(found)} demonstrations of {len({p.question for p in found})} problems from {len(right)}"
        in caplog.text
    )


def test_per_problem_order_and_least_reward(first: Run) -> None:
    def load(**params: Any) -> list[Any]:
        return load_problems(section("rollouts", params={"run": str(first.folder.path), **params}))

    every, one = load(), load(per_problem=1)
    assert set(Counter(p.question for p in one).values()) == {1}
    assert {p.question for p in one} == {p.question for p in every}
    lengths: dict[tuple[str, str], int] = {}
    for row in rollouts(first.folder.path, correct=True, truncated=False, limit=None):
        parsed = get_format("reasoning_answer").parse(row["completion"])
        if parsed.well_formed and parsed.reasoning:
            lengths.setdefault((row["problem_id"], parsed.reasoning), row["completion_tokens"])
    for problem in one:
        own = [n for (identity, _), n in lengths.items() if identity == problem.id]
        assert lengths[problem.id, problem.solution] == min(own)
    assert len(load(correct=False)) > len(every)
    with pytest.raises(DataError, match="0 demonstrations"):
        load(min_reward=100)


def test_a_second_run_trains_on_the_first_runs_right_rollouts(first: Run) -> None:
    path = first.folder.path
    again = run_recipe(
        recipe(
            path.parent,
            "second",
            f"model.name={path / 'sft' / 'final'}",
            f"data.sft={{name: rollouts, params: {{run: '{path}', per_problem: 2}}}}",
            "sft.max_steps=3",
            "grpo.enabled=false",
        )
    )
    assert again.sft and all(grade(p.extra["demonstrated_answer"], p.answer).correct for p in again.sft)
    assert max(Counter(p.question for p in again.sft).values()) <= 2
    assert (again.folder.path / "sft" / "final" / "model.safetensors").is_file()
    losses = [
        row["loss"] for row in map(json.loads, again.folder.metrics.read_text().splitlines()) if "loss" in row
    ]
    assert losses and losses[0] < 1.5  # the model has written these texts itself


def test_mistakes_name_the_way_out(first: Run, tmp_path: Path) -> None:
    run = str(first.folder.path)
    for params, message in (
        ({}, "params.run is missing"),
        ({"run": str(tmp_path)}, "not a run folder"),
        ({"run": run, "per_problme": 2}, "Did you mean 'per_problem'"),
        ({"run": run, "per_problem": 0}, "per_problem is 0.*greater than or equal to 1"),
        ({"run": run, "order": "short"}, "Did you mean 'shortest'"),
        ({"run": run, "correct": "yes"}, "correct is 'yes'.*valid boolean"),
        ({"run": run, "min_reward": "high"}, "min_reward is 'high'.*valid number"),
    ):
        with pytest.raises(DataError, match=message):
            load_problems(section("rollouts", params=params))


def test_a_finished_stage_keeps_its_length(first: Run) -> None:
    longer = first.recipe.grpo.model_copy(update={"max_steps": 9})
    with pytest.raises(
        ConfigError, match=r"grpo.max_steps is 9, but .* has finished grpo with 2.*run_name=NAME"
    ):
        run_recipe(first.recipe.model_copy(update={"grpo": longer}), resume=True)


def test_a_run_does_not_end_before_a_step_that_it_has_done(first: Run) -> None:
    path = shutil.copytree(first.folder.path, first.folder.path.with_name("shorter"))
    (path / "stages.json").unlink()
    recipe = first.recipe.model_copy(
        update={"run_name": "shorter", "grpo": first.recipe.grpo.model_copy(update={"max_steps": 1})}
    )
    with pytest.raises(ConfigError, match=r"max_steps is 1, but .* has done 2 steps of grpo.*max_steps=2"):
        run_recipe(recipe, resume=True)


# --- prompts that are too long stay out of training


def test_a_resumed_run_trains_on_the_prompts_that_pass_the_length_filter_only(tmp_path: Path) -> None:
    settings = (*SMALL, "data.train.max_prompt_percentile=50", f"output_dir={tmp_path}")
    recipe = load_recipe("smoke-cpu", settings).recipe
    first = run_recipe(recipe, stages=("sft",))
    kept = {p.id for p in first.train}
    assert len(kept) < len(load_problems(recipe.data.train))
    again = run_recipe(recipe, resume=True)
    assert {p.id for p in again.train} == kept
    sampled = {row["problem_id"] for row in rollouts(again.folder.path)}
    assert sampled and sampled <= kept
