"""A recipe becomes a ``Plan`` once: every check, every derived number, every extension that takes part.

Verbs, stages, preflight and iteration take a plan; ``make_plan`` is the only way to get one, so nothing is checked or computed a second
time. In several processes each makes the same plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from algorist.config.explain import to_yaml
from algorist.config.load import load_run_recipe
from algorist.config.resume import INPUTS, check_same_inputs, check_same_run, keep_inputs
from algorist.config.schema import DatasetSection, GRPOSection, Recipe
from algorist.data import load_problems, with_solutions
from algorist.errors import CheckpointError, ConfigError, check_known
from algorist.grading import MATCHERS, why_unreadable
from algorist.objectives import Objective
from algorist.prompts import PromptFormat, get_format
from algorist.prompts.chat import encode_prompt
from algorist.rewards import build_rewards
from algorist.rollouts.engines import ENGINES
from algorist.runs.asking import recipe_format
from algorist.store.run_folder import RunFolder
from algorist.store.run_log import kept_records
from algorist.store.safe_text import printable
from algorist.store.stages import STAGES
from algorist.store.trust import sign
from algorist.training.extension import Extensions
from algorist.types import Problem

if TYPE_CHECKING:
    import torch

    from algorist.training.distributed import Processes

log = logging.getLogger("algorist.runs.plan")


@dataclass(frozen=True)
class Plan:
    """A recipe that can be run on this machine.

    Attributes:
        recipe: As it will run: with its number of processes, its table of pass rates, without an adapter that is left out.
        stages: Training stages to do, where the recipe has them on.
        resume: Whether the run continues in its folder.
        device: Of this process.
        processes: Those that share the run.
        form: The prompt format.
        objective: What GRPO minimises; None without GRPO.
        extensions: Those that take part.
        problems: What the recipe's data sections hold.
        remarks: What is to be said when the run begins.
        say: Shows a line.
    """

    recipe: Recipe
    stages: tuple[str, ...]
    resume: bool
    device: torch.device
    processes: Processes
    form: PromptFormat
    objective: Objective | None
    extensions: Extensions
    problems: Problems
    remarks: tuple[str, ...]
    say: Callable[[str], None]

    @property
    def path(self) -> Path:
        """The run's folder."""
        return run_path(self.recipe)

    def trains(self, stage: str) -> bool:
        """Whether a training stage is to be done."""
        return stage in self.stages and bool(getattr(self.recipe, stage).enabled)

    @property
    def evaluates_base(self) -> bool:
        """Whether the model is evaluated before any training."""
        return self.recipe.eval.enabled and self.recipe.eval.baseline

    @property
    def rows_at_a_time(self) -> int:
        """Completions per engine call, of GRPO where there is one: evaluations between its steps take the same engine."""
        grpo, held_out = self.recipe.grpo, self.recipe.eval
        if not grpo.enabled:
            return held_out.batch_size * max(1, held_out.samples)
        return grpo.batch_size * (grpo.steps_per_generation or grpo.gradient_accumulation_steps)


def make_plan(
    recipe: Recipe,
    *,
    stages: Sequence[str] = STAGES,
    resume: bool = False,
    problems: Problems | None = None,
    in_folder: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Check a recipe, load its problems, and return the plan; nothing is written, and no model is loaded.

    Args:
        recipe: The resolved recipe.
        stages: Training stages to do.
        resume: Continue the run in the same folder.
        problems: The recipe's problems, where they are loaded already.
        in_folder: Whether the plan's run has a folder of its own, which must be free, or hold the run to resume.
        say: Shows a line.

    Raises:
        AlgoristError: Any user's mistake that can be known before a model is loaded.
    """
    from algorist.models.load import pick_device
    from algorist.runs.pass_rates import with_pass_rates
    from algorist.training.distributed import Processes, check_eval_device, run_device
    from algorist.training.grpo_setup import objective_of

    with kept_records() as notes:
        check_names(recipe)
        form = recipe_format(recipe)
    recipe = with_pass_rates(recipe)
    trains_grpo = recipe.grpo.enabled and "grpo" in stages
    objective = objective_of(recipe.grpo) if trains_grpo else None
    check_eval_device(recipe.eval.device, recipe.eval.engine or recipe.grpo.engine)
    device = run_device(pick_device(recipe.device))
    check_machine(recipe, device)
    processes = Processes.join(device)
    recipe = with_processes(recipe, processes.count)
    no_adapter = processes.from_main(
        partial(why_no_adapter, recipe, resume=resume, processes=processes.count)
    )
    if no_adapter:
        recipe = without_adapter(recipe)
    if in_folder:
        processes.from_main(lambda: check_folder(recipe, resume=resume))
    extensions = Extensions.of(recipe)
    plan = Plan(
        recipe,
        tuple(stages),
        resume,
        device,
        processes,
        form,
        objective,
        extensions,
        problems or Problems([], [], []),
        tuple(filter(None, [no_adapter, *(n.getMessage() for n in notes if n.levelno >= logging.WARNING)])),
        say,
    )
    if trains_grpo and all(reward.weight == 0 for reward in recipe.rewards) and not extensions.teach:
        raise ConfigError(
            "every weight in rewards is 0 while grpo.enabled is true, so nothing would be learned; give one of them a weight, or name a "
            "teacher (grpo.teacher.model)"
            if recipe.rewards
            else "rewards is empty while grpo.enabled is true; name at least one reward"
        )
    extensions.check(plan)
    return plan if problems else replace(plan, problems=Problems.load(recipe, stages))


def check_stages(recipe: Recipe, stages: Sequence[str]) -> None:
    """Refuse a run that would do nothing; from Python it is a way to look at the problems.

    Raises:
        ConfigError: Every stage is off, and so is the evaluation before training.
    """
    on = [s for s in ("sft", "grpo") if s in stages and getattr(recipe, s).enabled]
    if not on and not (recipe.eval.enabled and recipe.eval.baseline):
        raise ConfigError(
            "this run would do nothing: neither SFT nor GRPO is on, and eval.baseline is false. Switch one of sft.enabled, "
            "grpo.enabled and eval.baseline on, or measure a model with algorist eval"
        )


def check_names(recipe: Recipe, *, quick: bool = False) -> None:
    """Refuse unknown prompt formats, rewards, matchers, engines and optimisers (ConfigError) before anything is loaded or written.

    ``quick`` needs neither torch nor a process: it leaves out rewards of one's own and optimisers.
    """
    MATCHERS.get(recipe.matcher)
    for name in filter(None, (recipe.grpo.engine, recipe.eval.engine)):
        ENGINES.get(name)
    form = get_format(recipe.prompt.format, tags=recipe.prompt.tags)
    specs = [spec for spec in recipe.rewards if not (quick and ".py" in spec.name)]
    rewards = build_rewards(specs, form, matcher=recipe.matcher)
    for stage, section in (("sft", recipe.sft), ("grpo", recipe.grpo)):
        if section.enabled:
            section.check_package(stage)
    if quick:
        return
    rewards.probe()
    from transformers.training_args import OptimizerNames

    valid = [str(o.value) for o in OptimizerNames]
    for stage, name in (("sft", recipe.sft.optim), ("grpo", recipe.grpo.optim)):
        usual = "Take adamw_torch, adamw_torch_fused or adamw_8bit (needs bitsandbytes)"
        check_known(name, valid, f"{stage}.optim is '{name}', which is no optimiser of transformers", usual)


def check_machine(recipe: Recipe, device: torch.device) -> None:
    """Refuse what the recipe asks of a machine that this one has not, before anything is loaded or written.

    Raises:
        ConfigError: An attention kernel that does not work here.
        MissingExtraError: What the recipe's loader needs is not here.
    """
    from algorist.models.attention import pick_attention
    from algorist.models.loaders import own_loader
    from algorist.models.precision import pick_precision

    precision = pick_precision(recipe.model, device)
    if other := own_loader(recipe.model):
        other.check(recipe.model, device)
    else:
        pick_attention(recipe.model, device, precision.compute)


@dataclass
class Problems:
    """The problems of a run, loaded before its folder is made: a wrong path or column leaves nothing behind."""

    train: list[Problem]
    sft: list[Problem]
    held_out: list[Problem]
    notes: list[logging.LogRecord] = field(default_factory=list)
    """What was logged while they were loaded, for the run's log."""

    @classmethod
    def load(cls, recipe: Recipe, stages: Sequence[str] = STAGES) -> Problems:
        """Load what the recipe names; demonstrations where SFT is to be done, or a tokenizer made from them.

        Raises:
            DataError: A dataset, a column or a row is missing or unreadable.
        """
        with kept_records() as notes:
            train, sft = load_problems(recipe.data.train), []
            held_out = load_problems(recipe.data.eval) if recipe.eval.enabled else []
            if (recipe.sft.enabled and "sft" in stages) or recipe.model.name == "tiny":
                section = recipe.data.sft or recipe.data.train  # which may have inherited the filter
                unrated = section.model_copy(update={"pass_rate": None})
                sft = load_problems(unrated) if recipe.data.sft or section.pass_rate else train
                if recipe.sft.enabled:
                    with_solutions(sft)
        return cls(train, sft, held_out, notes)


def run_path(recipe: Recipe) -> Path:
    """Return the folder of a recipe's run.

    Raises:
        ConfigError: The run's name is no plain folder name, so that it would lie outside ``output_dir``.
    """
    name = recipe.run_name or recipe.name
    if (
        name in (".", "..")
        or any(c in "/\\" or not c.isprintable() for c in name)
        or len(name.encode()) > 200
    ):
        raise ConfigError(
            f"run_name is '{printable(name[:80])}'; expected a plain folder name of at most 200 bytes, such as run_name=first; "
            "another place is output_dir=FOLDER"
        )
    return Path(recipe.output_dir) / name


def check_folder(recipe: Recipe, *, resume: bool) -> None:
    """Refuse a folder that holds another run, before anything is loaded or written.

    Raises:
        CheckpointError: The folder already holds a run and ``resume`` is off, or holds none and it is on.
        ConfigError: The recipe differs from the folder's in a way that would make another run.
    """
    path = run_path(recipe)
    if (path / "config.yaml").exists() and not resume and RunFolder(path).has_begun():
        raise CheckpointError(
            f"{path} already holds a run. Continue it with --resume, or take another name: run_name={path.name}-2"
        )
    if resume and not (path / "config.yaml").exists():
        raise CheckpointError(f"nothing to resume: {path} holds no run (config.yaml is missing)")
    if resume:
        before = load_run_recipe(path, copies=False)
        same = _in_processes(_as_begun(recipe, before), before.grpo.processes)
        check_same_run(to_yaml(before), to_yaml(same), path)
        check_same_inputs(recipe, path)
        _check_finished(recipe, before, RunFolder(path))


def _check_finished(recipe: Recipe, before: Recipe, folder: RunFolder) -> None:
    """Refuse another length for a stage that is finished: ``config.yaml`` would say what was not done."""
    for stage in STAGES:
        old, new = getattr(before, stage), getattr(recipe, stage)
        for name in ("max_steps", "epochs"):
            was, now = getattr(old, name), getattr(new, name)
            if folder.is_finished(stage) and was != now:
                raise ConfigError(
                    f"{stage}.{name} is {now}, but {folder.path} has finished {stage} with {was}. Leave it as it was, or "
                    f"train on in a new run: run_name=NAME model.name={folder.path / stage / 'final'}"
                )


def why_no_adapter(recipe: Recipe, *, resume: bool, processes: int) -> str:
    """Return why this run trains all weights though its recipe has an adapter, or an empty string.

    ``model.lora.in_several_processes: off`` is decided when a run begins; a continued run keeps what it began with, whatever
    the number of processes is now.
    """
    section, path = recipe.model.lora, run_path(recipe)
    if section is None or section.in_several_processes == "keep":
        return ""
    if resume and (path / "config.yaml").exists():
        if load_run_recipe(path).model.lora is not None:
            return ""
        return "this run began without the recipe's LoRA adapter and goes on so: all weights are trained"
    if processes == 1:
        return ""
    return (
        f"the run has {processes} processes, so its LoRA adapter is left out and all weights are trained, as "
        "model.lora.in_several_processes=off asks; to keep the adapter: model.lora.in_several_processes=keep"
    )


def why_from_the_model(recipe: Recipe, stages: Sequence[str], folder: RunFolder) -> str:
    """Return why GRPO starts without the recipe's SFT, or an empty string: the caller skips it and the folder has none."""
    skipped = recipe.sft.enabled and "sft" not in stages
    trains = recipe.grpo.enabled and "grpo" in stages and not folder.is_finished("grpo")
    named = "sft" not in stages and Path(recipe.model.name).exists()  # a model of the user's own
    if not (skipped and trains) or folder.is_finished("sft") or named:
        return ""
    return (
        f"SFT is skipped and {folder.path} has no finished SFT stage, so GRPO starts from {recipe.model.name} as it is. To do "
        "SFT first: leave --only out, or algorist run RECIPE --only sft, then algorist run RECIPE --only grpo --resume. If "
        "nothing is to be learned from demonstrations: sft.enabled=false"
    )


def with_processes(recipe: Recipe, count: int) -> Recipe:
    """Return the recipe as ``count`` processes run it.

    Raises:
        ConfigError: Their batches together do not hold whole groups.
    """
    if recipe.grpo.processes == count:
        return recipe
    try:
        GRPOSection.model_validate(recipe.grpo.model_dump() | {"processes": count})
    except ValidationError as error:
        raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    return _in_processes(recipe, count)


def _in_processes(recipe: Recipe, count: int) -> Recipe:
    return recipe.model_copy(update={"grpo": recipe.grpo.model_copy(update={"processes": count})})


def without_adapter(recipe: Recipe) -> Recipe:
    """Return the recipe with ``model.lora`` null."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": None})})


def _as_begun(recipe: Recipe, before: Recipe) -> Recipe:
    """Return the recipe with the adapter left out where the run began without it, and with its rule of then."""
    now, then = recipe.model.lora, before.model.lora
    if now is None:
        return recipe
    if then is None:
        return without_adapter(recipe) if now.in_several_processes == "off" else recipe
    lora = now.model_copy(update={"in_several_processes": then.in_several_processes})
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": lora})})


def open_folder(recipe: Recipe, *, resume: bool) -> RunFolder:
    """Create the run folder, or open it to resume."""
    path = run_path(recipe)
    if resume:
        folder = RunFolder.open(path)
    else:
        folder = RunFolder.create(path)
        folder.write_environment(seed=recipe.seed)
        folder.write_json(INPUTS, keep_inputs(recipe, path))
    folder.write_text("config.yaml", to_yaml(recipe))
    sign(folder.path)
    return folder


def other_count(stage: str, checkpoint: Path, processes: int) -> str:
    """Return that a checkpoint was made by another number of processes, or an empty text."""
    from algorist.training.checkpoint import processes_of

    made_by = processes_of(checkpoint)
    if made_by == processes:
        return ""
    return f"{stage}: {checkpoint.name} was made by {made_by} process(es), this run has {processes}: it continues, not bit for bit"


def tokenizer_texts(problems: Iterable[Problem], prompt_format: PromptFormat) -> list[str]:
    """Return the texts that the tokenizer of a model from scratch is trained on: questions and demonstrations."""
    return [text for p in problems for text in (p.question, prompt_format.demonstrate(p.solution, p.answer))]


def fitting_problems(
    section: DatasetSection, problems: list[Problem], prompt_format: PromptFormat, tokenizer: Any
) -> list[Problem]:
    """Return the problems whose prompts pass the section's length filters, which stand before its ``limit``."""
    if section.max_prompt_percentile is None and section.max_prompt_tokens is None:
        return problems
    return load_problems(
        section, prompt_tokens=lambda p: len(encode_prompt(prompt_format, tokenizer, p.question))
    )


def unreadable_golds(training: list[Problem], held_out: list[Problem]) -> list[str]:
    """Return a line per part that has gold answers which the grader cannot read: never paid and never right."""
    lines = []
    for kind, problems in (("training", training), ("held-out", held_out)):
        unread = [(p, why) for p in problems if not p.checker and (why := why_unreadable(p.answer))]
        if unread:
            problem, why = unread[0]
            lines.append(
                f"warning: {len(unread)} of {len(problems)} {kind} problems have a gold answer that the "
                f"grader cannot read, such as {problem.id}: {printable(problem.answer[:60])} ({why})"
            )
    return lines


def longest_sequence(
    recipe: Recipe, problems: Problems, prompt_format: PromptFormat, tokenizer: Any
) -> int | None:
    """Return the most tokens of a prompt with its completion in a run, or None when ``sft.max_length`` sets no bound."""

    def prompt(section: DatasetSection, asking: list[Problem]) -> int:
        sizes = (len(encode_prompt(prompt_format, tokenizer, p.question)) for p in asking)
        return min(max(sizes, default=0), section.max_prompt_tokens or 1 << 62)

    completion, lengths = recipe.grpo.max_completion_tokens, [0]
    if recipe.sft.enabled:
        if recipe.sft.max_length is None:
            return None
        lengths.append(recipe.sft.max_length)
    if recipe.grpo.enabled:
        lengths.append(prompt(recipe.data.train, problems.train) + completion)
    if recipe.eval.enabled:
        longest = recipe.eval.max_completion_tokens or completion
        lengths.append(prompt(recipe.data.eval, problems.held_out) + longest)
    return max(lengths)
