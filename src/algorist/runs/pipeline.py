"""A run from recipe to closing table: data → model → SFT → evaluation → GRPO → evaluation → report.

Every stage writes into the run folder and is recorded there when it is finished; a resumed run repeats no finished
stage and continues the unfinished one from its newest checkpoint.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from algorist.config.own_files import changed_since, with_copies
from algorist.config.schema import Recipe
from algorist.data.problems import (
    Problems,
    fitting_problems,
    longest_sequence,
    refuse_beyond_context,
    tokenizer_texts,
    trained_otherwise,
    unreadable_golds,
)
from algorist.evaluation.console import RolloutNotes
from algorist.models import products
from algorist.models.attention import describe
from algorist.models.load import Policy, keep_base, load_policy, make_policy, settle
from algorist.models.loaders import own_loader
from algorist.models.memory import bounded_memory
from algorist.models.modes import context_of
from algorist.models.sharding import shapes_of
from algorist.prompts import PromptFormat
from algorist.prompts.chat import opened_by_template
from algorist.rewards import RewardSet, build_rewards
from algorist.rollouts import make_engine
from algorist.rollouts.engines import auto_engine, decodes_natively
from algorist.runs.asking import attach_asking
from algorist.runs.begin import hold_folder, other_lengths
from algorist.runs.draft import Draft
from algorist.runs.evaluate import evaluate_stage
from algorist.runs.paid import fitting_and_paid
from algorist.runs.plan import Plan, make_plan
from algorist.store.run_folder import RunFolder, started_as
from algorist.store.run_log import Display, Lines, LogFile, Logged, Quiet, clock
from algorist.store.stages import LAST_FIRST, STAGES, START, lost_model, step_of
from algorist.store.times import Times, kept_times
from algorist.store.write import MetricsWriter, NoMetrics, NoRollouts, RolloutWriter, rows_of
from algorist.training.callbacks import (
    EventsCallback,
    EveryNSteps,
    FlushBeforeSave,
    MetricsCallback,
    ProgressCallback,
    StopSignal,
)
from algorist.training.checkpoint import last_step, newest_checkpoint, other_count, save_final, train_from
from algorist.training.distributed import is_sharded, shard, uses_fsdp2, whole_weights
from algorist.training.extension import Control, Event
from algorist.training.grpo_setup import check_enough_problems, make_grpo_trainer
from algorist.training.part_size import refuse_what_cannot_fit
from algorist.training.processes import Processes
from algorist.types import Group, Problem

log = logging.getLogger("algorist.runs.pipeline")


@dataclass
class Run:
    """The state of one run in this process."""

    plan: Plan
    folder: RunFolder
    display: Display
    times: Times
    train: list[Problem] = field(init=False)
    sft: list[Problem] = field(init=False)
    held_out: list[Problem] = field(init=False)
    policy: Policy | None = None
    stopped: bool = False
    summaries: dict[str, Any] = field(default_factory=dict)
    notes: RolloutNotes = field(init=False)
    reported: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        problems = self.plan.problems
        self.train, self.sft, self.held_out = problems.train, problems.sft, problems.held_out
        self.notes = RolloutNotes(self.display.say)

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe

    @property
    def processes(self) -> Processes:
        return self.plan.processes

    @property
    def prompt_format(self) -> PromptFormat:
        return self.plan.form

    def rewards(self) -> RewardSet:
        """Return the recipe's rewards, own ones from the run's copies; a file that has changed meanwhile is reported once."""
        for line in changed_since(self.folder.path):
            if line not in self.reported:
                self.display.say(f"warning: {line}")
            self.reported.add(line)
        specs = with_copies(self.recipe, self.folder.path).rewards
        return build_rewards(specs, self.prompt_format, matcher=self.recipe.matcher)

    def loaded(self) -> Policy:
        """Return the policy; the model that the run starts from is loaded when it is first asked for."""
        if self.policy is None:
            with self.times.of("loading"):
                _load_start(self)
        assert self.policy is not None
        return self.policy

    def event(self, kind: Any, stage: str = "", step: int | None = 0, **what: Any) -> Control:
        """Tell the extensions of an event; return what they ask of the loop."""
        return self.plan.extensions.seen(Event(kind, stage, step, **what))


def run_recipe(
    recipe: Recipe,
    *,
    display: Display | None = None,
    resume: bool = False,
    stages: Sequence[str] = STAGES,
    begins: Callable[[Run], None] = lambda _: None,
) -> Run:
    """Plan and run a recipe; return the run.

    Args:
        recipe: The resolved recipe.
        display: Where progress is shown; lines on standard error when left out, nothing with ``Quiet()``. ``training.log`` in
            the run folder has all of it.
        resume: Continue the run in the same folder.
        stages: Which training stages to do; a stage that is switched off in the recipe is left out anyway.
        begins: Called with the run before its first evaluation or stage; what it raises ends the run.

    Raises:
        AlgoristError: Any user's mistake, before the first training step where it can be known.
    """
    return run_draft(
        Draft.of(recipe, stages=stages, resume=resume), display=display or Lines(), begins=begins
    )


def run_draft(draft: Draft, *, display: Display, begins: Callable[[Run], None] = lambda _: None) -> Run:
    """Plan and run a draft; return the run.

    Args:
        draft: The draft.
        display: Where progress is shown.
        begins: Called with the run before its first evaluation or stage; what it raises ends the run.
    """
    main = int(os.environ.get("RANK", "0")) == 0
    shown = Logged(display if main else Quiet())
    return run_plan(make_plan(draft, say=shown.say), display=shown, begins=begins)


def run_plan(plan: Plan, *, display: Display, begins: Callable[[Run], None] = lambda _: None) -> Run:
    """Run a plan and return the run."""
    began, processes, extensions = time.monotonic(), plan.processes, plan.extensions
    with ExitStack() as held:
        folder = processes.from_main(
            lambda: held.enter_context(hold_folder(plan.recipe, plan.draft.inputs, resume=plan.resume))
        )
        held.enter_context(LogFile(folder.path, processes.main, plan.problems.notes, display))
        run = Run(plan, folder, display, held.enter_context(kept_times(folder, processes.main)))
        for line in folder.differences() if plan.resume and processes.main else ():
            display.say(f"warning: {line}")
        # Products of another library round otherwise: every process, and every resume, takes the same.
        products.choose(processes.from_main(lambda: folder.keep("products.json", products.choices)))
        alone = processes.count == 1  # what several have left of a machine's memory is no one's own
        with bounded_memory(plan.device) if alone else nullcontext(), extensions.opened(run):
            _prepare(run)
            begins(run)
            if plan.evaluates_base and not any(_is_finished(run, stage) for stage in STAGES):
                evaluate_stage(run, "base")  # later the model is another one
            if plan.trains("sft"):
                _stage(run, "sft", run_sft)
            if plan.trains("grpo") and not run.stopped:
                _stage(run, "grpo", run_grpo)
            done = [s for s in STAGES if (folder.path / s / "final").is_dir()]
            end = "stopped before the end" if run.stopped else "finished"
            model = folder.path / done[-1] / "final" if done else "none yet"
            log.info("the run %s after %s; its model: %s", end, clock(time.monotonic() - began), model)
            if done and not run.stopped:
                run.event("end", done[-1])
    return run


def run_sft(run: Run) -> None:
    """Train on demonstrations and save ``sft/final``."""
    from algorist.training.sft import demonstrations, make_sft_trainer

    policy = run.loaded()
    as_written = run.sft if run.recipe.sft.source == "prompt_response" else []
    if differ := trained_otherwise(policy.tokenizer, run.prompt_format, as_written):
        run.display.say(f"warning: {differ}")
    metrics, stop = _metrics_writer(run), run.processes.stop_signal(run.display.say)
    trainer = make_sft_trainer(
        model=policy.model,
        tokenizer=policy.tokenizer,
        demos=demonstrations(run.sft, run.prompt_format, policy.tokenizer, run.recipe.sft.source),
        section=run.recipe.sft,
        output_dir=run.folder.path / "sft",
        seed=run.recipe.seed,
        device=run.plan.device,
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
    name, line = auto_engine(section.engine, policy.model, run.plan.rows_at_a_time)
    if line:
        run.display.say(line)
    section = section.model_copy(update={"engine": name})
    rewards = run.rewards()
    metrics, stop = _metrics_writer(run), run.processes.stop_signal(run.display.say)

    def keep(step: int, groups: list[Group], advantages_PG: torch.Tensor) -> None:
        rows = [
            row | {"stage": "grpo", "step": step}
            for index, (group, advantages) in enumerate(zip(groups, advantages_PG.tolist(), strict=True))
            for row in rows_of(group, index=index, advantages=advantages)
        ]
        store.write(rows)
        run.notes.on_rollouts(rows)
        run.notes.on_failures(rewards, len(rows))
        if step == 0 and not any(extension.teaches for extension in run.plan.extensions):
            rewards.check_speaks(groups, run.train[:: 1 + len(run.train) // 32])
        run.event("rollouts", "grpo", step, rows=rows)

    with whole_weights(policy.model):  # ZeRO-3 loads a later stage's model in parts
        engine = make_engine(section.engine, policy.model, policy.tokenizer, section=section, together=True)
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
            extensions=run.plan.extensions,
            output_dir=run.folder.path / "grpo",
            seed=run.recipe.seed,
            device=run.plan.device,
            on_rollouts=keep,
            callbacks=[
                *_callbacks(run, "grpo", metrics, section.eval_every),
                stop,
                FlushBeforeSave(store.flush, metrics.flush),
            ],
        )
        _train(run, "grpo", trainer, stop, metrics, store)


def _prepare(run: Run) -> None:
    """Show the run's settings, the plan's remarks, and faults of its problems."""
    recipe = run.recipe
    log.info("%s", started_as())
    run.display.say(f"run folder {run.folder.path} · device {run.plan.device} · seed {recipe.seed}")
    for line in run.plan.remarks:
        run.display.say(f"warning: {line}")
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    demonstrations = f"{len(run.sft)} demonstrations, " if run.plan.trains("sft") else ""
    run.display.say(
        f"{len(run.train)} training problems ({recipe.data.train.name}), {demonstrations}"
        f"{len(run.held_out)} held out ({recipe.data.eval.name})"
    )
    for line in unreadable_golds(training=run.train, held_out=run.held_out):
        run.display.say(line)


def _load_start(run: Run) -> None:
    """Load the policy that the next stage starts from: the newest finished stage, or the recipe's model."""
    for stage in LAST_FIRST:
        final = run.folder.path / stage / "final"
        if _is_finished(run, stage) and final.is_dir():
            run.policy = _placed(run, partial(load_policy, final, trainable=True, like=run.recipe.model))
            break
    else:
        make = partial(
            make_policy,
            run.recipe.model,
            seed=run.recipe.seed,
            texts=tokenizer_texts([*run.sft[:4000], *run.train[:4000]], run.prompt_format),
            tags=run.prompt_format.markers,
            longest=partial(
                longest_sequence, run.recipe, Problems(run.train, run.sft, run.held_out), run.prompt_format
            ),
        )
        run.policy = _placed(run, make)
        if run.recipe.model.name == "tiny" and run.recipe.model.lora is not None:
            run.processes.from_main(partial(keep_base, run.policy, run.folder.path / "base"))
    model, tokenizer = run.policy.model, run.policy.tokenizer
    run.plan = replace(run.plan, form=opened_by_template(run.plan.form, tokenizer))
    attach_asking(tokenizer, run.recipe, run.prompt_format)
    run.train = fitting_problems(run.recipe.data.train, run.train, run.prompt_format, tokenizer)
    if run.plan.trains("sft"):
        run.sft = fitting_and_paid(run.recipe, run.sft, run.plan.rewards, run.prompt_format, tokenizer)
    run.held_out = fitting_problems(run.recipe.data.eval, run.held_out, run.prompt_format, tokenizer)
    every = list(model.parameters())
    packed = [getattr(p, "quant_state", None) for p in every]  # 4-bit weights: two in a byte
    count = sum(math.prod(q.shape) if q else p.numel() for p, q in zip(every, packed, strict=True))
    trained = sum(p.numel() for p in every if p.requires_grad)
    lines = [
        f"model {run.recipe.model.name}: {count / 1e6:.2f} M parameters, {trained / 1e6:.2f} M trained, "
        f"{describe(run.policy.model)}"
    ]
    if run.processes.count > 1 and hasattr(run.policy.model, "peft_config"):
        lines.append("warning: an adapter in several processes is less tried; all weights: model.lora=null")
    run.processes.from_main(lambda: _check_start(run, tokenizer, context_of(model)))
    for line in lines:
        if line not in run.reported:  # a sharded model is loaded again after each stage
            run.display.say(line)
    run.reported.update(lines)
    run.event("loaded")
    refuse_what_cannot_fit(run.policy.model, run.recipe, [s for s in STAGES if run.plan.trains(s)])


def _check_start(run: Run, tokenizer: Any, context: int | None) -> None:
    """Refuse what would fail after hours: prompts that fill the context, fewer problems than a rollout batch takes (ConfigError)."""
    if run.recipe.eval.enabled:
        refuse_beyond_context("eval", run.held_out, run.prompt_format, tokenizer, context)
    if run.plan.trains("grpo"):
        refuse_beyond_context("train", run.train, run.prompt_format, tokenizer, context)
        check_enough_problems(len(run.train), run.recipe.grpo)


def _placed(run: Run, load: Callable[..., Policy]) -> Policy:
    """Load the policy where it will run; for FSDP2 the main process alone reads it, and each process takes its part."""
    recipe, device = run.recipe, run.plan.device
    alone = run.processes.count == 1 or not uses_fsdp2()
    whole = recipe.model.lora or recipe.model.trust_remote_code or own_loader(recipe.model)
    if alone or whole or "transformers" in (recipe.grpo.engine, recipe.eval.engine):
        return load(device=device)
    read: list[Policy] = []

    def shapes() -> Policy | None:
        """Return the policy with shapes for weights; None for a model that samples by its own forward, and is sharded by the trainer."""
        read.append(load(device=device, on_host=True))
        return replace(read[0], model=shapes_of(read[0].model)) if decodes_natively(read[0].model) else None

    sent = run.processes.from_main(shapes)
    policy = next(iter(read), sent) or load(device=device, on_host=True)
    if sent is not None:
        shard(policy.model, device)
    settle(policy.model, recipe.model, device)
    return policy


def _stage(run: Run, name: str, action: Callable[[Run], None]) -> None:
    """Do a stage and its evaluation unless they are finished."""
    if not _is_finished(run, name):
        run.loaded()
        again = f", whose model, {name}/final, is gone or damaged" if run.folder.is_finished(name) else ""
        run.display.say(f"{name} begins{again}")
        action(run)
        if run.stopped:
            return
        _finish(run, name, {})
    if run.recipe.eval.enabled and not _is_finished(run, f"eval-{name}"):
        summary = evaluate_stage(run, name)
        _finish(run, f"eval-{name}", {k: v.value for k, v in summary.items()})


def _is_finished(run: Run, stage: str) -> bool:
    folder = run.folder
    return run.processes.from_main(lambda: folder.is_finished(stage) and not lost_model(folder.path, stage))


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
) -> None:
    trainer.ends_for_good = run.processes.count == 1  # a finished stage cannot be lengthened
    folder, trainer.saving = run.folder.path / stage, partial(run.times.of, "saving")
    checkpoint, refused = run.processes.from_main(
        lambda: newest_checkpoint(folder, partial(last_step, trainer)) if run.plan.resume else None
    ) or (None, [])
    for line in refused:
        run.display.say(f"{stage}: {line}")
    step = step_of(checkpoint) if checkpoint else 0
    before = metrics.truncate_after(stage, step)
    if store is not None:
        store.truncate_after(step)
    if before > step:
        began = (
            f"continuing from {checkpoint.name}"
            if checkpoint
            else "beginning again, as no checkpoint was saved"
        )
        run.display.say(f"{stage}: {began}; it had come to step {before}")
    elif checkpoint:
        run.display.say(f"{stage}: continuing from {checkpoint.name}")
    if began_with := run.plan.draft.before:
        lengths = other_lengths(began_with, run.recipe, stage)
        trainer.changed = [f"{key} {was} → {now}" for key, was, now in lengths]
    if checkpoint and (line := other_count(stage, checkpoint, run.processes.count)):
        run.display.say(line)
    control = run.event("stage", stage, step, path=folder, trainer=trainer)
    if control.evaluate:
        save_final(trainer, folder / START, run.processes)
        _evaluate_during(run, stage, metrics, 0)
    try:
        if not control.stop:  # ended already: killed before the stage was closed
            with stop, run.times.of(stage):
                train_from(trainer, checkpoint)
    finally:
        metrics.close()
    run.display.finished(stage)
    if stop.stopped:
        run.stopped = True
        return
    run.event("stage_end", stage, trainer.state.global_step, path=folder, trainer=trainer)
    save_final(trainer, folder / "final", run.processes)
    if is_sharded(run.loaded().model):
        run.policy = None  # read again from what was saved
    gc.collect()
    torch.cuda.empty_cache()  # nothing without a GPU


def _callbacks(run: Run, stage: str, metrics: MetricsWriter, eval_every: int | None) -> list[Any]:
    def log_line(step: int, values: dict[str, float]) -> Control:
        if run.processes.main:
            values |= run.notes.on_metrics(stage)
            metrics.write(stage, step, values)
        return run.event("metrics", stage, step, values=values)

    def on(kind: Any) -> Callable[[int], Control]:
        return lambda step: run.event(kind, stage, step, path=run.folder.path / stage)

    callbacks: list[Any] = [
        MetricsCallback(log_line),
        ProgressCallback(partial(run.display.step, stage), partial(run.display.progress, stage)),
    ]
    if eval_every and run.recipe.eval.enabled:
        callbacks.append(EveryNSteps(eval_every, partial(_evaluate_during, run, stage, metrics)))
    return [*callbacks, EventsCallback(on("step"), on("checkpoint"))]


def _evaluate_during(run: Run, stage: str, metrics: MetricsWriter, step: int) -> None:
    summary = evaluate_stage(run, stage, step)
    values = {f"eval/{name}": interval.value for name, interval in summary.items()}
    metrics.write(stage, step, values)
    run.event("evaluation_line", stage, step, values=values)
