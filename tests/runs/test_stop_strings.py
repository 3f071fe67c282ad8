"""Stop strings: evaluation and training read the same part of a completion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from algorist.config.load import load_recipe, recipe_names
from algorist.evaluation.artifact import read_artifact
from algorist.evaluation.record import record_evaluation
from algorist.evaluation.run import EvaluationSetting
from algorist.models.load import Policy
from algorist.prompts import get_format
from algorist.prompts.chat import render_prompt
from algorist.rollouts import make_engine
from algorist.runs.pipeline import run_recipe
from algorist.store.read import query
from algorist.store.run_log import Quiet
from algorist.training.grpo_setup import sampling_params
from algorist.training.sft import Demonstration, make_sft_trainer
from algorist.types import Problem
from tests.tiny import CPU, smoke_recipe, tiny_policy


@pytest.mark.parametrize("name", recipe_names())
def test_rollouts_end_where_evaluations_end(name: str) -> None:
    def ends(*changes: str) -> tuple[tuple[str, ...], ...]:
        recipe = load_recipe(name, list(changes)).recipe
        setting = EvaluationSetting.from_section(recipe.eval, max_tokens=9, matcher="exact", seed=0)
        return sampling_params(recipe.grpo, 0).stop_strings, setting.stop_strings

    training, evaluation = ends()
    assert training == evaluation and (evaluation == ("</answer>",) or not name.startswith("math-"))
    assert ends("eval.stop_strings=['Q:']") == (("Q:",), ("Q:",))
    assert ends("eval.stop_strings=['Q:']", "grpo.stop_strings=['A:']") == (("A:",), ("Q:",))
    assert ends("eval.stop_strings=['Q:']", "grpo.stop_strings=[]") == ((), ("Q:",))


@pytest.mark.long
@pytest.mark.slow
def test_a_certain_model_earns_in_training_what_the_evaluation_measures(tmp_path: Path) -> None:
    """A model that writes its answer and goes on writing: read to the stop string it is right, read to its end it is wrong."""
    form, policy = get_format("r1_zero"), tiny_policy("r1_zero")
    completion = "it is four </think> <answer> 4 </answer> <answer> 5 </answer> How many?"
    questions = ["2 + 2?", "How many apples are 4 apples?"]
    demos = [Demonstration(render_prompt(form, policy.tokenizer, text), completion) for text in questions]
    taught(policy, demos, tmp_path)
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    for name, question in zip(("train", "test"), questions, strict=True):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": question, "answer": "4"}) + "\n")
    settings = [
        f"model.name={tmp_path}/model",
        f"data.train={{name: local, path: {tmp_path}/train.jsonl}}",
        f"data.eval={{name: local, path: {tmp_path}/test.jsonl}}",
        "grpo.max_steps=1",
        "grpo.group_size=4",
        "grpo.batch_size=4",
        "grpo.gradient_accumulation_steps=1",
        "grpo.eval_every=null",
        "grpo.max_completion_tokens=100",
        "grpo.temperature=0.01",
        "eval.baseline=true",
        "eval.max_completion_tokens=100",
        "device=cpu",
        "threads=1",
        f"output_dir={tmp_path}",
    ]
    earned = {}
    for name, more in (("stopped", []), ("whole", ["grpo.stop_strings=[]"])):
        run_recipe(load_recipe("math-grpo", [*settings, f"run_name={name}", *more]).recipe, display=Quiet())
        measured = read_artifact(tmp_path / name / "eval", "base").metrics["reward"].value
        earned[name] = measured, {r["reward"] for r in query(tmp_path / name, "SELECT reward FROM rollouts")}
    assert earned == {"stopped": (1.0, {1.0}), "whole": (1.0, {0.0})}


def taught(policy: Policy, demos: list[Demonstration], folder: Path) -> None:
    changes = [
        "sft.max_steps=100",
        "sft.learning_rate=1e-2",
        "sft.lr_scheduler=linear",
        "sft.max_length=null",
    ]
    changes += [f"sft.batch_size={len(demos)}", "sft.gradient_accumulation_steps=1"]
    make_sft_trainer(
        model=policy.model,
        tokenizer=policy.tokenizer,
        demos=demos,
        section=smoke_recipe(folder, *changes).sft,
        output_dir=folder / "sft",
        seed=0,
        device=CPU,
    ).train()


@pytest.mark.long
@pytest.mark.slow
def test_a_completion_ends_behind_the_stop_string_and_is_graded_with_it(tmp_path: Path) -> None:
    form, policy = get_format("r1_zero"), tiny_policy("r1_zero")
    problem = Problem("p", "2 + 2?", "4")
    prompt = render_prompt(form, policy.tokenizer, problem.question)
    told = "it is four </think> <answer> 4 </answer> <answer> 5 </answer> How many apples?"
    taught(policy, [Demonstration(prompt, told)], tmp_path)
    section = load_recipe("math-baseline").recipe.eval
    assert section.stop_strings == ["</answer>"]
    section = section.model_copy(update={"max_completion_tokens": 100})
    found = {}
    for name, stops in (("whole", []), ("stopped", section.stop_strings)):
        setting = EvaluationSetting.from_section(
            section.model_copy(update={"stop_strings": stops}), max_tokens=9, matcher="symbolic", seed=0
        )
        record_evaluation(
            tmp_path,
            name,
            engine=make_engine("native", policy.model, policy.tokenizer),
            tokenizer=policy.tokenizer,
            problems=[problem],
            prompt_format=form,
            setting=setting,
            ks=[1],
            rewards=None,
            model="m",
            dataset="d",
        )
        found[name] = read_artifact(tmp_path, name)
    whole, stopped = (next(r for r in found[n].samples if r["greedy"]) for n in ("whole", "stopped"))
    assert whole["completion"].strip() == told and not whole["correct"]
    assert stopped["completion"].strip() == "it is four </think> <answer> 4 </answer>"
    assert stopped["correct"] and stopped["well_formed"] and stopped["extracted"] == "4"
    assert not stopped["truncated"] and stopped["completion_tokens"] < whole["completion_tokens"]
    assert all(r["completion"].endswith("</answer>") for r in found["stopped"].samples if not r["truncated"])
    assert found["stopped"].protocol["stop_strings"] == ["</answer>"]
    assert "stop_strings" not in found["whole"].protocol
