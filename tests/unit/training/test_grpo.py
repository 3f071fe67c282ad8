"""The trainer against stock TRL on the same rollouts: equal steps, equal references; records, metrics, state."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from algorist.config import load_recipe
from algorist.objectives import LOSSES, policy_loss
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.rollouts.base import Completion, SamplingParams
from algorist.training.grpo import AlgoristGRPOTrainer
from algorist.training.grpo_setup import objective_of
from algorist.types import Group
from algorist_grader.matchers import MATCHERS
from benchmarks.stock_trl import StockGRPOTrainer
from tests.tiny import (
    PROBLEMS,
    QUESTIONS,
    TOKENIZER,
    PlainEngine,
    make_model,
    make_trainer,
    parameters_of,
    raw_format,
    reward_digits,
    rewards_of,
    section,
)

STEP_CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "dapo, accumulation": {"batch_size": 4, "gradient_accumulation_steps": 2},
    "a group over several micro-batches": {"batch_size": 2, "gradient_accumulation_steps": 4},
    "grpo, two iterations": {"loss": "grpo", "num_iterations": 2, "max_steps": 4},
    "a rollout batch feeds several steps": {
        "batch_size": 4,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
    },
    "bnpo, accumulation": {"loss": "bnpo", "batch_size": 4, "gradient_accumulation_steps": 2},
    "dr_grpo, centered": {"loss": "dr_grpo", "advantage": "group_centered"},
    "batch_normalized": {"advantage": "batch_normalized"},
    "cispo, two iterations": {
        "loss": {"name": "cispo", "clip_high": 1.1},
        "num_iterations": 2,
        "max_steps": 4,
    },
    "sequence ratios": {"loss": {"importance": "sequence"}, "num_iterations": 2, "max_steps": 4},
    "masked truncation": {"mask_truncated_completions": True},
    "temperature": {"temperature": 0.7},
    "kl": {"beta": 0.1, "num_iterations": 2, "max_steps": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STEP_CASES)
def test_steps_equal_stock_trl(case: str, tmp_path: Path) -> None:
    """Both trainers learn from the same completions, so weights and logged numbers must agree after each step."""
    runs = []
    for stock in (True, False):
        model = make_model()
        model.save_pretrained(tmp_path / "start")  # TRL loads its reference by this name
        model.config._name_or_path = str(tmp_path / "start")
        # SGD: Adam's first steps are the sign of the gradient, which hides scale and magnifies rounding.
        settings = {**STEP_CASES[case], "optim": "sgd", "learning_rate": 0.05}
        trainer = make_trainer(tmp_path, model, stock=stock, **settings)
        assert isinstance(trainer, StockGRPOTrainer if stock else AlgoristGRPOTrainer)
        before = parameters_of(trainer)
        trainer.train()
        runs.append((parameters_of(trainer) - before, trainer.state.log_history))
    (theirs, their_log), (ours, our_log) = runs
    assert theirs.norm() > 1e-3
    assert float((theirs - ours).norm() / theirs.norm()) < 1e-4
    names = ["loss", "grad_norm", "reward", "reward_std", "entropy", "kl", "num_tokens", "cispo_clip_ratio"]
    names += [
        f"clip_ratio/{kind}" for kind in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
    ]
    names += [f"completions/{kind}" for kind in ("mean_length", "min_length", "max_length", "clipped_ratio")]
    names += ["rewards/reward_digits/mean", "rewards/reward_length/std", "completions/mean_terminated_length"]
    for expected, found in zip(their_log[:-1], our_log[:-1], strict=True):
        for key in names:
            if key in expected and (
                key != "entropy" or "kl" in case
            ):  # entropies of skipped rows are estimates
                close = pytest.approx(expected[key], rel=1e-3, abs=1e-4 if key != "kl" else 1e-6)
                assert found[key] == close, key


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_by_its_name_alone_has_the_defaults_of_its_function(name: str) -> None:
    objective = objective_of(
        load_recipe("quickstart", [f"grpo.loss={name}"]).recipe.grpo, build_rewards(["correct"], raw_format())
    )
    generator = torch.Generator().manual_seed(1)
    log_probs, old = torch.randn(2, 6, 9, generator=generator) - 2
    advantages, mask = torch.randn(6, 1, generator=generator), torch.ones(6, 9, dtype=torch.bool)
    by_recipe, by_name = (
        policy_loss(log_probs, advantages, mask, loss=loss, old_log_probs=old, denominator=9.0)
        for loss in (objective.loss, name)
    )
    assert torch.equal(by_recipe, by_name)


@pytest.mark.slow
def test_cispo_without_more_has_its_own_cap(tmp_path: Path) -> None:
    """On-policy every weight is 1, below CISPO's cap of 5: the gradient is that of ``dapo``, not 0.2 of it."""
    norms = []
    for loss in ("dapo", "cispo"):
        trainer = make_trainer(tmp_path, loss=loss, max_steps=1)
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4) and norms[0] > 1e-3


@pytest.mark.slow
def test_reference_pass_with_adapter_equals_stock_trl(tmp_path: Path) -> None:
    """An adapter that is trained further: the reference is the adapter as it was, not the base model."""
    runs = []
    for stock in (True, False):
        model = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        with torch.no_grad():
            torch.manual_seed(2)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
        settings = {"beta": 0.1, "num_iterations": 2, "max_steps": 4, "optim": "sgd", "learning_rate": 0.05}
        trainer = make_trainer(tmp_path, model, engine=PlainEngine(model), stock=stock, **settings)
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
        after = dict(trainer.model.named_parameters())
        moved = torch.cat([(after[n].detach() - p).flatten() for n, p in before.items() if ".ref." not in n])
        runs.append((moved, [e["kl"] for e in trainer.state.log_history[:-1]]))
    (theirs, their_kl), (ours, our_kl) = runs
    assert theirs.norm() > 1e-4 and their_kl[0] < 1e-9 < max(their_kl)
    assert float((theirs - ours).norm() / theirs.norm()) < 1e-4
    assert our_kl == pytest.approx(their_kl, abs=1e-6)  # TRL's exp(x) - x - 1 cancels in float32


@pytest.mark.slow
def test_records_and_metrics(tmp_path: Path) -> None:
    """One rollout per completion, with the advantage that was trained on; prompts reach the engine once per group."""
    batches: list[tuple[int, list[Group], torch.Tensor]] = []
    model = make_model()
    engine = PlainEngine(model)
    trainer = make_trainer(
        tmp_path, model, engine=engine, seed=5, on_rollouts=lambda *batch: batches.append(batch)
    )
    trainer.train()
    assert len(engine.calls) == 3 == len(batches)
    assert all(len(prompts) == 2 and size == 4 for prompts, size, _ in engine.calls)
    assert len({seed for _, _, seed in engine.calls}) == 3
    assert trainer.model.training
    for number, (step, groups, advantages_PG) in enumerate(batches):
        assert step == number and len(groups) == 2 and advantages_PG.shape == (2, 4)
        for group in groups:
            assert group.prompt == QUESTIONS[int(group.problem.id[1:])]
            for rollout in group.rollouts:
                assert rollout.reward == pytest.approx(
                    sum(v or 0 for v in rollout.rewards.values()), abs=1e-6
                )
                assert set(rollout.rewards) == {"reward_digits", "reward_length"}
                assert rollout.log_probs is not None and sum(rollout.log_probs) < 0
                assert rollout.grade is not None and rollout.grade.gold == group.problem.answer
                assert len(rollout.completion_ids) == 10 or not rollout.truncated
        assert float(advantages_PG.sum()) == pytest.approx(0, abs=1e-3)
    entry = trainer.state.log_history[0]
    for key in (
        "rollout/tokens_per_s",
        "time/rollout_s",
        "time/update_s",
        "time/reward_s",
        "time/batch_s",
        "time/step_s",
        "reward",
        "rewards/reward_length/mean",
        "groups/useful_share",
        "completions/clipped_ratio",
        "completions/mean_length",
    ):
        assert math.isfinite(entry[key]), key
    gap = "sampling/sampling_logp_difference"
    assert 1e-4 > entry[f"{gap}/max"] >= entry[f"{gap}/mean"] >= 0


@pytest.mark.slow
def test_each_completion_is_parsed_and_graded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with rewards that ask for the parse and for the verdict: store and reward cannot disagree."""
    form = raw_format()
    parsed: list[str] = []
    judged: list[tuple[str, str]] = []
    parse, matcher = type(form).parse, MATCHERS.get("symbolic")

    def counting_parse(self: Any, text: str) -> Any:
        parsed.append(text)
        return parse(self, text)

    def counting_judge(answer: str, gold: str, limits: Any) -> Any:
        judged.append((answer, gold))
        return matcher.judge(answer, gold, limits)

    monkeypatch.setattr(type(form), "parse", counting_parse)
    monkeypatch.setitem(MATCHERS._entries, "symbolic", dataclasses.replace(matcher, judge=counting_judge))

    class Script(PlainEngine):
        """Writes boxed numbers, every text only once."""

        def generate(self, prompts: Any, group_size: int, *_: Any) -> Any:
            texts = [
                f"\\boxed{{{100 * len(self.calls) + 10 * i + k}}}"
                for i in range(len(prompts))
                for k in range(group_size)
            ]
            self.calls.append(([], group_size, None))
            rows = [
                Completion(ids := TOKENIZER(text)["input_ids"], [-1.0] * len(ids), "stop") for text in texts
            ]
            return [rows[i * group_size : (i + 1) * group_size] for i in range(len(prompts))]

    model = make_model()
    rewards = build_rewards(["correct", "well_formed", {"name": "correct", "weight": 2.0}], form)
    kept: list[Group] = []
    trainer = make_trainer(
        tmp_path,
        model,
        engine=Script(model),
        rewards=rewards,
        prompt_format=form,
        max_completion_tokens=40,
        on_rollouts=lambda step, groups, advantages: kept.extend(groups),
    )
    trainer.train()
    rollouts = [r for group in kept for r in group.rollouts]
    assert len(rollouts) == 24 and sorted(parsed) == sorted(r.text for r in rollouts)
    assert len(judged) == len(set(judged)) == 24


@pytest.mark.slow
def test_reference_is_frozen_and_not_trained(tmp_path: Path) -> None:
    model = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj"]))
    trainer = make_trainer(tmp_path, model, engine=PlainEngine(model), beta=0.1)
    start = {n: p.detach().clone() for n, p in model.named_parameters() if ".ref." in n}
    trainer.train()
    assert start and all(torch.equal(dict(model.named_parameters())[n], p) for n, p in start.items())
    assert model.active_adapter == "default"
    assert all(("lora_" in n and ".ref." not in n) == p.requires_grad for n, p in model.named_parameters())


def test_what_an_update_is_compared_with_has_no_dropout(tmp_path: Path) -> None:
    """At the first step the reference, log π_old and the model that samples are one; only the update has an adapter's dropout."""

    class Silent(PlainEngine):
        def generate(self, *arguments: Any) -> list[list[Completion]]:
            return [[dataclasses.replace(c, log_probs=None) for c in g] for g in super().generate(*arguments)]

    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(make_model(), lora)
    trainer = make_trainer(tmp_path, model, engine=Silent(model), beta=0.1, num_iterations=2, max_steps=1)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    batch, dropout = trainer.rollouts, [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert dropout and all(module.training and module.p == 0.5 for module in dropout)
    first, second = (trainer.log_probs(model, batch)[0] for _ in range(2))
    assert float((first - second).detach().abs().max()) > 1e-2
    assert torch.equal(trainer.log_probs_of(batch), trainer.log_probs_of(batch))
    model.load_state_dict(start, strict=False)  # tied weights have one name
    sampled, _ = trainer.log_probs(model.eval(), batch)
    for other in (batch.old_log_probs, batch.extra["ref"]):
        torch.testing.assert_close(other, sampled.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("taken", [True, False])
def test_old_log_probs_come_from_the_sampler_where_exact(
    tmp_path: Path, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = 0
    original = AlgoristGRPOTrainer.log_probs_of

    def counting(self: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return original(self, *arguments, **named)

    monkeypatch.setattr(AlgoristGRPOTrainer, "log_probs_of", counting)
    trainer = make_trainer(tmp_path, num_iterations=2, max_steps=1, temperature=0.8, top_k=20)
    if not taken:
        monkeypatch.setattr(trainer, "sampler_is_exact", lambda batch: False)
    trainer.train()
    batch = trainer.rollouts
    assert passes == (0 if taken else 1)
    assert batch.mask.sum() > 20 and not batch.old_log_probs[~batch.mask].any()
    fresh, _ = trainer.log_probs(make_model(), batch)
    torch.testing.assert_close(batch.old_log_probs, fresh.detach(), atol=2e-5, rtol=1e-5)


def test_rollout_state_round_trip(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, num_iterations=2, max_steps=1)
    trainer.train()
    state = trainer.extra_state()
    assert state["position"] == 1 and state["generation_count"] == 1
    torch.save(state, tmp_path / "state.pt")
    other = make_trainer(tmp_path, num_iterations=2, max_steps=1)
    other.load_extra_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.position == 1 and other.dealt == trainer.dealt
    assert other.rollouts.completions == trainer.rollouts.completions
    assert torch.equal(other.rollouts.old_log_probs, trainer.rollouts.old_log_probs)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_native_engine_follows_every_optimizer_step(lora: bool, tmp_path: Path) -> None:
    """Sampler and training log-probs agree after weights and adapters have moved: no stale copies."""
    model: Any = make_model()
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    engine = make_engine("native", model, TOKENIZER)
    trainer = make_trainer(tmp_path, model, engine=engine, num_iterations=2, max_steps=6, learning_rate=3e-2)
    before = parameters_of(trainer).clone()
    trainer.train()
    assert float((parameters_of(trainer) - before).abs().max()) > 1e-2
    name = "sampling/sampling_logp_difference/max"
    gaps = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert len(gaps) == 3 and max(gaps) < 1e-4


@pytest.mark.slow
def test_logged_entropy_counts_skipped_rows(tmp_path: Path) -> None:
    """Rows without advantage are not computed, yet the logged entropy stays close to stock TRL's."""
    means = []
    for stock in (True, False):
        trainer = make_trainer(tmp_path, rewards=rewards_of(reward_digits), stock=stock)
        trainer.train()
        means.append([entry["entropy"] for entry in trainer.state.log_history[:-1]])
    assert means[1] == pytest.approx(means[0], rel=0.1)


@pytest.mark.slow
def test_parts_of_any_size_are_the_same_step(tmp_path: Path) -> None:
    runs = []
    for changes in (
        {"batch_size": 8},
        {"batch_size": 1, "gradient_accumulation_steps": 8},
        {"batch_size": 8, "part_tokens": 12},
    ):
        tokens = changes.pop("part_tokens", None)
        trainer = make_trainer(tmp_path, optim="sgd", learning_rate=0.05, **changes)
        trainer.passes.part_tokens = tokens
        before = parameters_of(trainer)
        trainer.train()
        runs.append(parameters_of(trainer) - before)
    assert runs[0].norm() > 1e-3
    for other in runs[1:]:
        assert float((runs[0] - other).norm() / runs[0].norm()) < 1e-5


def test_gradients_are_made_before_the_first_pass_and_stay_where_the_loss_reaches(tmp_path: Path) -> None:
    """One after the other, so that they leave no holes between activations; a weight that nothing uses keeps none, and does not decay."""
    model, seen = make_model(), []
    model.unused = torch.nn.Parameter(torch.ones(3))
    trainer = make_trainer(tmp_path, model, weight_decay=0.5, learning_rate=0.05, optim="adamw_torch")
    trainer.passes.part_tokens = 12

    def look(*_: Any) -> None:
        if torch.is_grad_enabled():
            seen.append(sum(p.grad is None for p in model.parameters()))

    model.get_input_embeddings().register_forward_hook(look)
    before = parameters_of(trainer)
    trainer.train()
    assert len(seen) > 3 and not any(seen)
    assert bool((model.unused == 1).all()) and float((parameters_of(trainer) - before).norm()) > 1e-3


@pytest.mark.slow
def test_the_reference_is_the_policy_that_was_passed(tmp_path: Path) -> None:
    """Also for a model from scratch, whose config names no folder, and after SFT, whose config names the base model."""
    from algorist.runs.pipeline import run_recipe
    from algorist.store.read import metrics

    recipe = load_recipe(
        "smoke-cpu",
        [f"output_dir={tmp_path}", "run_name=r", "threads=1", "grpo.beta=0.1", "eval.enabled=false"],
    ).recipe
    run_recipe(recipe)
    kl = [line["kl"] for line in metrics(tmp_path / "r", "grpo")]
    assert len(kl) == 2 and 0 <= kl[0] < 1e-6, "the first step is taken by the reference itself"


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ValueError, match=r"grpo.loss is 'dapoo'.*dapo"):
        section(loss="dapoo")
    with pytest.raises(ValueError, match=r"no multiple of grpo\.gradient"):
        section(gradient_accumulation_steps=2, steps_per_generation=3)


def test_rewards_see_every_column_of_the_row(tmp_path: Path) -> None:
    seen: dict[str, list[Any]] = {}

    def remember(completions: list[str], **columns: Any) -> list[float]:
        seen.update({k: v for k, v in columns.items() if isinstance(v, list)})
        return [0.0] * len(completions)

    from dataclasses import replace

    problems = [replace(p, level="3", extra={"difficulty": index}) for index, p in enumerate(PROBLEMS)]
    make_trainer(tmp_path, problems=problems, rewards=rewards_of(remember), max_steps=1).train()
    assert seen["level"] == ["3"] * 8 and set(seen["difficulty"]) < set(range(6))
    assert {"question", "answer", "problem_id", "completion_ids", "prompts", "subject", "solution"} <= set(
        seen
    )


def test_sampling_params_are_the_sections(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, top_p=0.9, top_k=5, temperature=0.5)
    assert trainer.sampling == SamplingParams(0.5, top_p=0.9, top_k=5, max_new_tokens=10, seed=7)
