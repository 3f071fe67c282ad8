"""A run from recipe to closing table: data → model → SFT → evaluation → GRPO → evaluation → report.

Every stage writes into the run folder and is recorded there when it is finished; a resumed run repeats no finished
stage and continues the unfinished one from its newest checkpoint.
"""

from __future__ import annotations

import gc
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from algorist.config.schema import Recipe
from algorist.data import overlap
from algorist.diagnosis.live import LiveDiagnosis
from algorist.evaluation.rollout_notes import RolloutNotes
from algorist.hub.upload import HubUpload, check_hub
from algorist.models import products
from algorist.models.attention import told
from algorist.models.load import Policy, keep_base, load_policy, make_policy, pick_device
from algorist.prompts import PromptFormat
from algorist.prompts.attached import attach
from algorist.prompts.of_recipe import asked_in_training, recipe_format
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.rollouts.engines import auto_engine
from algorist.runs.best import START, KeepBest
from algorist.runs.evaluation import evaluate_stage, rows_at_a_time
from algorist.runs.pass_rates import with_pass_rates
from algorist.runs.plan import (
    Problems,
    check_folder,
    check_machine,
    check_names,
    fitting_problems,
    longest_sequence,
    open_folder,
    other_count,
    tokenizer_texts,
    unreadable_golds,
    why_from_the_model,
    why_no_adapter,
    with_processes,
    without_adapter,
)
from algorist.store.rows import rows_of
from algorist.store.run_folder import RunFolder, started_as
from algorist.store.run_log import Display, Lines, LogFile, Logged, Quiet, clock
from algorist.store.stages import LAST_FIRST, STAGES, step_of
from algorist.store.write import MetricsWriter, NoMetrics, NoRollouts, RolloutWriter, read_metrics
from algorist.tracking.trackers import Trackers, check_trackers, open_trackers
from algorist.training.callbacks import (
    EveryNSteps,
    FlushBeforeSave,
    MetricsCallback,
    ProgressCallback,
    StopSignal,
)
from algorist.training.checkpoint import newest_checkpoint, train_from
from algorist.training.grpo_setup import check_enough_problems, make_grpo_trainer, objective_of
from algorist.training.processes import (
    Processes,
    check_eval_device,
    is_sharded,
    run_device,
    whole_weights,
)
from algorist.types import Group, Problem

log = logging.getLogger("algorist.runs.pipeline")


@dataclass
class Run:
    """The state of one run in this process."""

    recipe: Recipe
    folder: RunFolder
    display: Display
    resume: bool
    device: torch.device
    prompt_format: PromptFormat
    processes: Processes
    trackers: Trackers
    train: list[Problem]
    sft: list[Problem]
    held_out: list[Problem]
    policy: Policy | None = None
    stopped: bool = False
    summaries: dict[str, Any] = field(default_factory=dict)
    live: LiveDiagnosis = field(init=False)
    notes: RolloutNotes = field(init=False)
    hub: HubUpload = field(init=False)

    def __post_init__(self) -> None:
        self.hub = HubUpload(self.recipe, self.folder.path, self.display.say)
        self.notes = RolloutNotes(self.display.say, self.recipe.grpo.samples_every)
        self.live = LiveDiagnosis(self.recipe, self.display.say, str(self.folder.path))

    def loaded(self) -> Policy:
        """Return the policy; the model that the run starts from is loaded when it is first asked for."""
        if self.policy is None:
            _load_start(self)
        assert self.policy is not None
        return self.policy


def run_recipe(
    recipe: Recipe,
    *,
    display: Display | None = None,
    resume: bool = False,
    stages: Sequence[str] = STAGES,
    problems: Problems | None = None,
) -> Run:
    """Run a recipe and return the run.

    Args:
        recipe: The resolved recipe.
        display: Where progress is shown; lines on standard error when left out, nothing with ``Quiet()``. ``training.log`` in
            the run folder has all of it.
        resume: Continue the run in the same folder.
        stages: Which training stages to do; a stage that is switched off in the recipe is left out anyway.
        problems: The recipe's problems, where they are loaded already.

    Raises:
        AlgoristError: Any user's mistake, before the first training step where it can be known.
    """
    began = time.monotonic()
    check_names(recipe)
    recipe = with_pass_rates(recipe)
    if recipe.grpo.enabled and "grpo" in stages:
        objective_of(recipe.grpo)  # refuses what cannot be used, before anything is loaded
    check_trackers(recipe.report_to, recipe.tracking)
    check_eval_device(recipe.eval.device, recipe.eval.engine or recipe.grpo.engine)
    device = run_device(pick_device(recipe.device))
    check_machine(recipe, device)
    processes = Processes.join(device)
    recipe = with_processes(recipe, processes.count)
    display = Logged((display or Lines()) if processes.main else Quiet())
    no_adapter = processes.from_main(
        partial(why_no_adapter, recipe, resume=resume, processes=processes.count)
    )
    if no_adapter:
        recipe = without_adapter(recipe)
    processes.from_main(lambda: check_folder(recipe, resume=resume))
    processes.from_main(lambda: check_hub(recipe.hub, display.say))
    problems = problems or Problems.load(recipe, stages)
    folder = processes.from_main(lambda: open_folder(recipe, resume=resume))
    with (
        folder.lock() if processes.main else nullcontext(),
        LogFile(folder.path, processes.main, problems.told),
        open_trackers(recipe, folder.path, display.say, main=processes.main) as trackers,
    ):
        parts = (problems.train, problems.sft, problems.held_out)
        form = recipe_format(recipe)
        run = Run(recipe, folder, display, resume, device, form, processes, trackers, *parts)
        # Products of another library round otherwise: every process, and every resume, takes the same.
        products.choose(processes.from_main(lambda: folder.keep("products.json", products.choices)))
        from_the_model = processes.from_main(lambda: why_from_the_model(recipe, stages, folder))
        _prepare(run, no_adapter, from_the_model)
        if recipe.eval.baseline and not _is_finished(run, "eval-base"):
            evaluate_stage(run, "base")
        if "sft" in stages and recipe.sft.enabled:
            _stage(run, "sft", run_sft)
        if "grpo" in stages and recipe.grpo.enabled and not run.stopped:
            _stage(run, "grpo", run_grpo)
        done = [s for s in STAGES if (folder.path / s / "final").is_dir()]
        end = "stopped before the end" if run.stopped else "finished"
        model = folder.path / done[-1] / "final" if done else "none yet"
        log.info("the run %s after %s; its model: %s", end, clock(time.monotonic() - began), model)
        if processes.main and done and not run.stopped:
            run.hub.finish(done[-1])
    return run


def run_sft(run: Run) -> None:
    """Train on demonstrations and save ``sft/final``."""
    from algorist.training.sft import demonstrations, make_sft_trainer

    policy = run.loaded()
    metrics = _metrics_writer(run)
    stop = run.processes.stop_signal(run.display.say)
    trainer = make_sft_trainer(
        model=policy.model,
        tokenizer=policy.tokenizer,
        demos=demonstrations(run.sft, run.prompt_format, policy.tokenizer, run.recipe.sft.source),
        section=run.recipe.sft,
        output_dir=run.folder.path / "sft",
        seed=run.recipe.seed,
        device=run.device,
        callbacks=[
            *_callbacks(run, "sft", metrics, run.recipe.sft.eval_every),
            stop,
            FlushBeforeSave(metrics.flush),
        ],
    )
    _train(run, "sft", trainer, stop, metrics)


def run_grpo(run: Run) -> None:
    """Train with verifiable rewards and save ``grpo/final``."""
    policy, section = run.loaded(), run.recipe.grpo
    name, line = auto_engine(section.engine, policy.model, rows_at_a_time(run.recipe))
    if line:
        run.display.say(line)
    section = section.model_copy(update={"engine": name})
    rewards = build_rewards(run.recipe.rewards, run.prompt_format, matcher=run.recipe.matcher)
    metrics = _metrics_writer(run)
    stop = run.processes.stop_signal(run.display.say)

    def keep(step: int, groups: list[Group], advantages_PG: torch.Tensor) -> None:
        rows = [
            row | {"stage": "grpo", "step": step}
            for index, (group, advantages) in enumerate(zip(groups, advantages_PG.tolist(), strict=True))
            for row in rows_of(group, index=index, advantages=advantages)
        ]
        store.write(rows)
        run.notes.on_rollouts(rows)
        run.notes.on_failures(rewards, len(rows))
        run.live.on_rollouts(rows)
        run.trackers.rewards("grpo", rows)

    run.processes.from_main(lambda: check_enough_problems(len(run.train), section))
    best = None
    if section.keep_best and section.eval_every and run.recipe.eval.enabled:
        best = KeepBest(run.folder.path / "grpo", section.stop, len(run.held_out), run.processes)
    engine = None
    if section.engine != "vllm":
        with whole_weights(policy.model):  # ZeRO-3 loads a later stage's model in parts
            engine = make_engine(section.engine, policy.model, policy.tokenizer)
    with RolloutWriter(run.folder.path / "rollouts") if run.processes.main else NoRollouts() as store:
        trainer = make_grpo_trainer(
            model=policy.model,
            tokenizer=policy.tokenizer,
            problems=run.train,
            prompt_format=run.prompt_format,
            section=section,
            rewards=rewards,
            matcher=run.recipe.matcher,
            engine=engine,
            output_dir=run.folder.path / "grpo",
            seed=run.recipe.seed,
            device=run.device,
            on_rollouts=keep,
            callbacks=[
                *_callbacks(run, "grpo", metrics, section.eval_every, best),
                stop,
                FlushBeforeSave(store.flush, metrics.flush),
            ],
        )
        _train(run, "grpo", trainer, stop, metrics, store, best)


def _prepare(run: Run, *warnings: str) -> None:
    """Say what the run works with, the ``warnings`` that are not empty, and what is wrong with its problems."""
    recipe = run.recipe
    log.info("%s", started_as())
    run.display.say(f"run folder {run.folder.path} · device {run.device} · seed {recipe.seed}")
    for line in filter(None, warnings):
        run.display.say(f"warning: {line}")
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    shared = overlap([*run.train, *run.sft], run.held_out)
    if shared:
        log.warning(
            "%d held-out problems also stand in the training data, such as: %s",
            len(shared),
            shared[0].question[:120],
        )
        run.display.say(
            f"warning: {len(shared)} of {len(run.held_out)} held-out problems also stand in the training data"
        )
    run.display.say(
        f"{len(run.train)} training problems ({recipe.data.train.name}), {len(run.sft)} demonstrations, "
        f"{len(run.held_out)} held out ({recipe.data.eval.name})"
    )
    for line in unreadable_golds(training=run.train, held_out=run.held_out):
        run.display.say(line)


def _load_start(run: Run) -> None:
    """Load the policy that the next stage starts from: the newest finished stage, or the recipe's model."""
    for stage in LAST_FIRST:
        final = run.folder.path / stage / "final"
        if _is_finished(run, stage) and final.is_dir():
            run.policy = load_policy(final, device=run.device, trainable=True, like=run.recipe.model)
            break
    else:
        run.policy = make_policy(
            run.recipe.model,
            device=run.device,
            seed=run.recipe.seed,
            texts=tokenizer_texts([*run.sft[:4000], *run.train[:4000]], run.prompt_format),
            tags=run.prompt_format.tags.all(),
            longest=partial(
                longest_sequence, run.recipe, Problems(run.train, run.sft, run.held_out), run.prompt_format
            ),
        )
        if run.recipe.model.name == "tiny" and run.recipe.model.lora is not None:
            run.processes.from_main(partial(keep_base, run.policy, run.folder.path / "base"))
    attach(run.policy.tokenizer, asked_in_training(run.recipe, run.prompt_format))
    run.train = fitting_problems(run.recipe.data.train, run.train, run.prompt_format, run.policy.tokenizer)
    count = sum(p.numel() for p in run.policy.model.parameters())
    trained = sum(p.numel() for p in run.policy.model.parameters() if p.requires_grad)
    run.display.say(
        f"model {run.recipe.model.name}: {count / 1e6:.2f} M parameters, {trained / 1e6:.2f} M trained, "
        f"{told(run.policy.model)}"
    )
    if run.processes.count > 1 and hasattr(run.policy.model, "peft_config"):
        run.display.say(
            "warning: an adapter in several processes is less tried; all weights: model.lora=null"
        )


def _stage(run: Run, name: str, action: Callable[[Run], None]) -> None:
    """Do a stage and its evaluation unless they are finished."""
    if not _is_finished(run, name):
        run.loaded()
        run.display.say(f"{name} begins")
        action(run)
        if run.stopped:
            return
        _finish(run, name, {})
    if run.recipe.eval.enabled and not _is_finished(run, f"eval-{name}"):
        if run.policy is None:
            final = run.folder.path / name / "final"
            run.policy = load_policy(final, device=run.device, trainable=True, like=run.recipe.model)
        summary = evaluate_stage(run, name)
        _finish(run, f"eval-{name}", {k: v.value for k, v in summary.items()})


def _is_finished(run: Run, stage: str) -> bool:
    return run.processes.from_main(lambda: run.folder.is_finished(stage))


def _finish(run: Run, stage: str, result: dict[str, Any]) -> None:
    run.processes.from_main(lambda: run.folder.finish(stage, result))


def _metrics_writer(run: Run) -> MetricsWriter:
    return MetricsWriter(run.folder.path / "metrics.jsonl") if run.processes.main else NoMetrics()


def _train(
    run: Run,
    stage: str,
    trainer: Any,
    stop: StopSignal,
    metrics: MetricsWriter,
    store: RolloutWriter | None = None,
    best: KeepBest | None = None,
) -> None:
    found = run.processes.from_main(
        lambda: newest_checkpoint(run.folder.path / stage) if run.resume else None
    )
    checkpoint, refused = found or (None, [])
    for line in refused:
        run.display.say(f"{stage}: {line}")
    step = step_of(checkpoint) if checkpoint else 0
    metrics.truncate_after(stage, step)
    if store is not None:
        store.truncate_after(step)
    if checkpoint:
        run.display.say(f"{stage}: continuing from {checkpoint.name}")
        if line := other_count(stage, checkpoint, run.processes.count):
            run.display.say(line)
    if best is not None:
        best.begin(trainer, run.processes.from_main(lambda: read_metrics(metrics.path)))
        if best.stop and best.last is None and not trainer.is_deepspeed_enabled:
            _save_final(run, trainer, run.folder.path / stage / START)
            _evaluate_during(run, stage, metrics, best, 0)
    try:
        if best is None or best.ended is None:  # ended already: killed before the stage was closed
            with stop:
                train_from(trainer, checkpoint)
    finally:
        metrics.close()
    run.display.finished(stage)
    if stop.stopped:
        run.stopped = True
        return
    if best is not None:
        best.finish(trainer, run.display.say)
    _save_final(run, trainer, run.folder.path / stage / "final")
    if is_sharded(run.loaded().model):
        run.policy = None  # read again from what was saved
    del trainer
    gc.collect()
    torch.cuda.empty_cache()  # nothing without a GPU


def _save_final(run: Run, trainer: Any, final: Path) -> None:
    unfinished = final.with_name("final.unfinished")
    run.processes.from_main(lambda: shutil.rmtree(unfinished, ignore_errors=True))
    trainer.save_model(str(unfinished))
    run.processes.wait()
    if run.processes.main:
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
    run.processes.wait()


def _callbacks(
    run: Run, stage: str, metrics: MetricsWriter, eval_every: int | None, best: KeepBest | None = None
) -> list[Any]:
    def log_line(step: int, values: dict[str, float]) -> None:
        values |= run.notes.on_metrics(stage, step, values)
        metrics.write(stage, step, values)
        run.live.on_metrics(step, values, stage)
        run.trackers.log(stage, step, values)

    callbacks: list[Any] = [
        MetricsCallback(log_line),
        ProgressCallback(lambda *state: run.display.step(stage, *state)),
        *run.hub.callbacks(stage),
    ]
    if eval_every and run.recipe.eval.enabled:
        action = partial(_evaluate_during, run, stage, metrics, best)
        callbacks += [EveryNSteps(eval_every, action), *([best] if best is not None else [])]
    return callbacks


def _evaluate_during(run: Run, stage: str, metrics: MetricsWriter, best: KeepBest | None, step: int) -> None:
    summary = evaluate_stage(run, stage, step)
    values = {f"eval/{name}": interval.value for name, interval in summary.items()}
    metrics.write(stage, step, values)
    if best is not None:
        best.see(step, values)
