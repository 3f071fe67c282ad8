"""Stop strings in an evaluation of real completions."""

from __future__ import annotations

from pathlib import Path

import pytest

from algorist.config.load import load_recipe
from algorist.evaluation.artifact import read_artifact
from algorist.evaluation.record import record_evaluation
from algorist.evaluation.run import EvaluationSetting
from algorist.prompts import get_format
from algorist.prompts.chat import render_prompt
from algorist.rollouts import make_engine
from algorist.training.sft import Demonstration, make_sft_trainer
from algorist.types import Problem
from tests.tiny import CPU, smoke_recipe, tiny_policy


@pytest.mark.slow
def test_a_completion_ends_behind_the_stop_string_and_is_graded_with_it(tmp_path: Path) -> None:
    form, policy = get_format("r1_zero"), tiny_policy("r1_zero")
    problem = Problem("p", "2 + 2?", "4")
    prompt = render_prompt(form, policy.tokenizer, problem.question)
    told = "it is four </think> <answer> 4 </answer> <answer> 5 </answer> How many apples?"
    changes = ["sft.max_steps=60", "sft.learning_rate=1e-2", "sft.batch_size=1", "sft.lr_scheduler=constant"]
    make_sft_trainer(
        model=policy.model,
        tokenizer=policy.tokenizer,
        demos=[Demonstration(prompt, told)],
        section=smoke_recipe(
            tmp_path, *changes, "sft.gradient_accumulation_steps=1", "sft.max_length=null"
        ).sft,
        output_dir=tmp_path / "sft",
        seed=0,
        device=CPU,
    ).train()
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
