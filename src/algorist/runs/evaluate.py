"""The evaluations of a run: of the model before any stage, after each stage, and between the steps of GRPO."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from algorist.evaluation.console import lines_of
from algorist.evaluation.record import finished_evaluation, mark_of, record_evaluation
from algorist.evaluation.run import Alone, EvaluationSetting, Peers
from algorist.models.precision import on_gpu
from algorist.rollouts import make_engine
from algorist.rollouts.engines import ENGINES, auto_engine
from algorist.training.distributed import whole_weights
from algorist.training.processes import model_on

if TYPE_CHECKING:
    from algorist.runs.pipeline import Run

log = logging.getLogger("algorist.runs.evaluate")


def evaluate_stage(run: Run, stage: str, step: int | None = None) -> dict[str, Any]:
    """Evaluate the current policy on the held-out problems and write ``eval/<stage>``; the processes take turns at the batches.

    Training's random state stays as it was: a resumed run does not repeat an evaluation.
    """
    engine = run.recipe.eval.engine or run.recipe.grpo.engine
    alone = ENGINES.get(engine).own_device or run.recipe.eval.device is not None
    device = next(run.loaded().model.parameters()).device
    random_state = torch.random.fork_rng(devices=[device] if on_gpu(device) else [])
    with whole_weights(run.loaded().model), random_state, run.times.of("evaluation"):
        if alone:
            return run.processes.from_main(lambda: _evaluate(run, stage, step, Alone()))
        return _evaluate(run, stage, step, run.processes)


def _evaluate(run: Run, stage: str, step: int | None, peers: Peers) -> dict[str, Any]:
    policy = run.loaded()
    recipe = run.recipe
    setting = EvaluationSetting.from_section(
        recipe.eval, max_tokens=recipe.grpo.max_completion_tokens, matcher=recipe.matcher, seed=recipe.seed
    )
    name, folder = stage if step is None else f"{stage}-step-{step}", run.folder.path / "eval"
    rewards = run.rewards()
    model: Any = recipe.model.name if stage == "base" else run.folder.path / stage / "final"
    mark = mark_of(model, run.held_out, run.prompt_format, setting, recipe.eval.ks, rewards)

    def known() -> dict[str, Any] | None:
        before = finished_evaluation(folder, name, mark) if run.plan.resume and step is None else None
        return before.metrics if before else None

    if (metrics := peers.from_main(known)) is not None:
        run.summaries[name] = metrics
        return metrics
    on_device = model_on(policy.model, recipe.eval.device)
    name_of_engine = recipe.eval.engine or recipe.grpo.engine
    engine, line = auto_engine(name_of_engine, on_device, run.plan.rows_at_a_time)
    if line:
        log.info("%s: %s", name, line)
    summary = record_evaluation(
        folder,
        name,
        peers=peers,
        engine=make_engine(engine, on_device, policy.tokenizer, section=recipe.grpo),
        tokenizer=policy.tokenizer,
        problems=run.held_out,
        prompt_format=run.prompt_format,
        setting=setting,
        ks=recipe.eval.ks,
        rewards=rewards,
        model=str(model) if step is None else f"{model.parent}, step {step}",
        dataset=recipe.data.eval.name,
        mark=mark if step is None else None,
        on_progress=lambda done, total: run.display.progress(f"eval {name}", done, total),
    ).metrics
    run.display.finished(f"eval {name}")
    for line in lines_of(folder, stage, step, summary):
        run.display.say(line)
    run.summaries[name] = summary
    run.event("evaluation", stage, step, values={key: interval.value for key, interval in summary.items()})
    return summary
