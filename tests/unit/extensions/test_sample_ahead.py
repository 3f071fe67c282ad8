"""``grpo.sample_ahead``: the next rollout batch is sampled during the update, by the policy before it, and a run continues exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from algorist.config import load_recipe
from algorist.errors import ConfigError
from algorist.runs.draft import Draft
from algorist.runs.pipeline import run_recipe
from algorist.runs.plan import make_plan
from algorist.store.read import metrics, query
from algorist.store.run_log import Quiet
from tests.runs.test_checkpoint import cut_back, same
from tests.unit.extensions.test_tools import ENVIRONMENTS

ELSEWHERE = """
import copy
import json
import threading
from pathlib import Path

from algorist.rollouts.engines import engine
from algorist.rollouts.transformers import TransformersEngine
from algorist.training.extension import Extension, extension

updating = threading.Event()


def copied(model):
    other = type(model)(copy.deepcopy(model.config)).eval()
    other.generation_config = model.generation_config
    other.load_state_dict(model.state_dict())
    return other


class Elsewhere(TransformersEngine):
    name, waits = "elsewhere", False

    def with_present_weights(self, tokenizer):
        other = Elsewhere(copied(self.model), tokenizer)
        other.waits = True
        return other

    def generate(self, *arguments):
        if self.waits:  # what is sampled ahead ends during the update, or never
            assert updating.wait(30)
            updating.clear()
        return super().generate(*arguments)


@engine("elsewhere", exact=False)
def elsewhere(model, tokenizer, settings):
    return Elsewhere(model, tokenizer)


@extension
class Watch(Extension):
    name, before = "watch", None

    def batch(self, batch, policy):
        def gap(model):
            there = policy.log_probs_of(batch, model=model) - batch.sampler_log_probs
            return float(there[batch.mask].abs().max())

        now = copied(policy.unwrapped())
        with Path(self.recipe.output_dir, "gaps").open("a") as file:
            file.write(json.dumps([gap(self.before) if self.before else None, gap(now)]) + "\\n")
        self.before = now
        return batch

    def update(self, batch, policy):
        updating.set()
        return batch
"""
OWN = (
    "device=cpu", "threads=1", "sft.enabled=false", "eval.enabled=false", "rewards=[random]", "grpo.engine=elsewhere",
    "grpo={group_size: 4, batch_size: 8, gradient_accumulation_steps: 1, max_steps: 4, save_steps: 2, max_completion_tokens: 10, "
    "learning_rate: 0.01, lr_scheduler: constant, sample_ahead: true, engine: elsewhere}",
)  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    return (*OWN, f"plugins=[{tmp_path}/elsewhere.py]", f"output_dir={tmp_path}")


@pytest.mark.slow
def test_the_policy_before_the_update_samples_during_it(
    tmp_path: Path, settings: tuple[str, ...], registrations_undone: None
) -> None:
    runs = []
    for name in ("whole", "again"):
        recipe = load_recipe("smoke-cpu", [*settings, f"run_name={name}"]).recipe
        runs.append(run_recipe(recipe, display=Quiet()).folder.path)
    gaps = [
        [float(x) for x in line[1:-2].replace("null", "0").split(", ")] for line in (tmp_path / "gaps").open()
    ]
    assert len(gaps) == 8
    for (_, first), *later in (gaps[:4], gaps[4:]):
        assert first < 1e-4  # nothing was sampled ahead of it
        assert all(before < 1e-4 < 1e-2 < now for before, now in later), later
    ratios = [line["sampling/importance_sampling_ratio/mean"] for line in metrics(runs[0], "grpo")]
    assert ratios[0] == pytest.approx(1, abs=1e-4) and all(abs(r - 1) > 1e-4 for r in ratios[1:])
    rows = query(
        runs[0],
        "SELECT step, count(DISTINCT problem_id) AS problems FROM rollouts GROUP BY step ORDER BY step",
    )
    assert [(row["step"], row["problems"]) for row in rows] == [(0, 2), (1, 2), (2, 2), (3, 2)]
    cut_back(runs[1], "grpo", 2)
    run_recipe(load_recipe("smoke-cpu", [*settings, "run_name=again"]).recipe, display=Quiet(), resume=True)
    same(runs[0], runs[1], "grpo")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "grpo.engine=native",
            r"samples while the policy learns, with an engine that runs elsewhere; take \"grpo.engine=vllm\"",
        ),
        ("grpo.sampler_correction=null", r"as if it were this one without grpo\.sampler_correction"),
        ("grpo.top_k=5", r"leave grpo\.top_k, top_p and min_p out"),
    ],
)
def test_where_it_cannot_be_right_it_is_refused(
    settings: tuple[str, ...], setting: str, message: str, registrations_undone: None
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(Draft.of(load_recipe("smoke-cpu", [*settings, setting]).recipe))


def test_several_processes_and_an_evaluation_by_the_same_server_are_refused(
    settings: tuple[str, ...], registrations_undone: None
) -> None:
    plan = make_plan(Draft.of(load_recipe("smoke-cpu", settings).recipe))
    with pytest.raises(ConfigError, match="is for one training process, and the run has 2"):
        plan.extensions.check(replace(plan, processes=replace(plan.processes, count=2)))
    own = ("eval.enabled=true", "grpo.eval_every=2")
    with pytest.raises(ConfigError, match=r"grpo\.eval_every=2 would give the server other weights"):
        make_plan(Draft.of(load_recipe("smoke-cpu", [*settings, *own]).recipe))
    own = (*own, "eval.engine=native", f"environment={ENVIRONMENTS}:HigherLower")
    with pytest.raises(ConfigError, match=r"grpo\.eval_every=2 would begin the environment anew"):
        make_plan(Draft.of(load_recipe("smoke-cpu", [*settings, *own]).recipe))
