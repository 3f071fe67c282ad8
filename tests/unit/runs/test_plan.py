"""One plan: every verb refuses and finds the same things, because it asks the same function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from algorist.config import load_recipe
from algorist.errors import AlgoristError, ConfigError
from algorist.extensions.iterate.rounds import Drawing, iterate
from algorist.preflight.run import preflight
from algorist.runs import plan as planning
from algorist.runs.draft import Draft
from algorist.runs.pipeline import Quiet, run_recipe
from algorist.runs.plan import make_plan
from algorist.runs.rate import rate

VERBS: dict[str, Callable[[Any], Any]] = {
    "run": lambda recipe: run_recipe(recipe, display=Quiet()),
    "preflight": lambda recipe: preflight(make_plan(Draft.of(recipe, in_folder=False)), trial=False),
    "iterate": lambda recipe: iterate(recipe, rounds=1, drawing=Drawing(1, 4, 1.0), display=Quiet()),
}


def recipe_of(folder: Path, *settings: str) -> Any:
    return load_recipe("smoke-cpu", [f"output_dir={folder}", "run_name=r", *settings]).recipe


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.train.pass_rate=[0.1, 0.9]"], "has not been rated with this recipe"),
        (["grpo.engine=transformers", "eval.device=cuda:7"], r"eval\.device is 'cuda:7'"),
        (["matcher=symbolc"], "unknown matcher 'symbolc'. Did you mean 'symbolic'"),
        (["report_to=[mlflow]"], "report_to names mlflow, which is not installed"),
    ],
)
def test_every_verb_refuses_the_same(tmp_path: Path, verb: str, settings: list[str], message: str) -> None:
    recipe = recipe_of(tmp_path, f"model.name={tmp_path}", *settings)
    with pytest.raises((ConfigError, ImportError), match=message):
        VERBS[verb](recipe)
    assert not (tmp_path / "r").exists()


def test_keys_without_effect_are_said(tmp_path: Path) -> None:
    words = ["sft.eval_every=5", "model.revision=v2", f"model.name={tmp_path}"]
    for enabled, count in (("true", 0), ("false", 1)):
        recipe = recipe_of(tmp_path, *words, f"eval.enabled={enabled}")
        remarks = Draft.of(recipe, in_folder=False).remarks
        assert sum("sft.eval_every has no effect: eval.enabled is false" in text for text in remarks) == count
        assert any("model.revision has no effect" in text and str(tmp_path) in text for text in remarks)


def test_an_evaluation_device_fits_the_engine_of_evaluations_not_of_rollouts(tmp_path: Path) -> None:
    """What ``run`` takes, ``iterate`` takes: it had checks of its own."""
    mixed = ["grpo.engine=vllm", "eval.engine=native", "eval.device=cpu", f"model.name={tmp_path}"]
    for verb in ("run", "iterate"):
        with pytest.raises(AlgoristError) as error:
            VERBS[verb](recipe_of(tmp_path, *mixed))
        assert "eval.device" not in str(error.value)  # vLLM or the model is missing, which is another matter
    with pytest.raises(ConfigError, match=r"eval\.device is 'cpu' while their engine is vllm"):
        make_plan(Draft.of(recipe_of(tmp_path, *mixed, "eval.engine=vllm"), in_folder=False))


def test_without_evaluations_there_is_no_baseline(tmp_path: Path) -> None:
    recipe = recipe_of(
        tmp_path, "eval.enabled=false", "eval.baseline=true", "sft.max_steps=1", "grpo.enabled=false"
    )
    run = run_recipe(recipe, display=Quiet())
    assert not run.summaries and not list((run.folder.path / "eval").glob("*"))


def test_rewards_that_an_advantage_cannot_take_are_refused_before_the_run(tmp_path: Path) -> None:
    rewards = "rewards=[correct, {name: soft_overlong, params: {max_tokens: 16, cache_tokens: 4}}]"
    recipe = recipe_of(tmp_path, "sft.enabled=false", "grpo.enabled=true", "grpo.advantage=maxrl", rewards)
    with pytest.raises(ConfigError, match="maxrl divides by the group's mean reward"):
        run_recipe(recipe, display=Quiet())
    assert not [*tmp_path.rglob("config.yaml")]


def test_no_verb_checks_by_itself() -> None:
    """Each check is called in one place, of the draft or of the plan."""
    draft = ("check_names(", "with_pass_rates(", "Problems.load(", "check_stages(")
    plan = ("check_model(", "check_optimizers(", "objective_of(", "Extensions.of(")
    source = Path(planning.__file__).parents[1]
    lines = [
        (str(path.relative_to(source)), line)
        for path in source.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("def ")
    ]
    called = {check: [where for where, line in lines if check in line] for check in (*draft, *plan)}
    for check, beside in {
        "check_stages(": ["cli/run_command.py"],
        "objective_of(": ["training/grpo_setup.py"],
    }.items():
        called[check] = [where for where in called[check] if where not in beside]
    # an extension gives a format to verbs without a plan, and is planned for recipes that a recipe might become
    elsewhere = {
        "runs/asking.py",
        "preflight/memory_advice.py",
        "preflight/trial.py",
        "training/grpo_setup.py",
    }
    called["Extensions.of("] = [where for where in called["Extensions.of("] if where not in elsewhere]
    assert {check: ["runs/draft.py"] for check in draft[:3]}.items() <= called.items(), str(called)
    assert {check: ["runs/plan.py"] for check in plan}.items() <= called.items(), str(called)
    assert called["check_stages("] == []
    assert inspect.signature(rate).parameters.keys() == {"recipe", "samples", "model", "on_progress"}
