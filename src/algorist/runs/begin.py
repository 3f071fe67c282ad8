"""Begin or continue a run's folder: what may change before it continues, and who writes into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from algorist.config.load import values_of
from algorist.config.own_files import Inputs, check_same_inputs
from algorist.config.schema import Recipe
from algorist.config.yaml_text import flat, to_yaml
from algorist.errors import CheckpointError, ConfigError
from algorist.store.run_folder import RunFolder
from algorist.store.stages import STAGES, checkpoints, step_of
from algorist.store.trust import sign


def settings_at_start(
    recipe: Recipe, inputs: Inputs, *, resume: bool, again: str = ""
) -> dict[str, Any] | None:
    """Return the settings that the run to continue began with, by dotted key, or None for a new run; nothing is written.

    Args:
        recipe, inputs: Its recipe, as it resolves now, and its files.
        resume: Whether the run is continued.
        again: The command that continues it with its own values, for the message; ``algorist run FOLDER --resume`` when left out.

    Raises:
        CheckpointError: The folder holds a run that is not to be continued, or none where one is.
        ConfigError: The recipe or its files differ from the folder's in a way that would make another run.
    """
    path = recipe.path
    folder = RunFolder(path)
    if not resume:
        refuse_begun(folder)
        return None
    if not folder.config.exists():
        raise CheckpointError(f"nothing to resume: {path} holds no run (config.yaml is missing)")
    before = flat(values_of(path))
    check_same_run(before, _normalised(recipe, before), path, again)
    check_same_inputs(inputs, path)
    for stage in filter(folder.is_finished, STAGES):
        for key, was, now in other_lengths(
            before, recipe, stage
        ):  # ``config.yaml`` would say what was not done
            raise ConfigError(
                f"{key} is {now}, but {path} has finished {stage} with {was}. Leave it as it was, or "
                f"train on in a new run: run_name=NAME model.name={path / stage / 'final'}"
            )
    for stage in STAGES:
        steps, done = getattr(recipe, stage).max_steps, [*map(step_of, checkpoints(path / stage)), 0][0]
        if steps and steps < done and not folder.is_finished(stage):
            raise ConfigError(
                f"{stage}.max_steps is {steps}, but {path} has done {done} steps of {stage}: it cannot end before them. Take "
                f"{stage}.max_steps={done} to end there; the model after an earlier step is in {path / stage}/checkpoint-STEP"
            )
    return before


def other_lengths(before: Mapping[str, Any], recipe: Recipe, stage: str) -> list[tuple[str, Any, Any]]:
    """List the keys of a stage's length that have changed, each with what it was and what it is."""
    keys = [(f"{stage}.{name}", getattr(getattr(recipe, stage), name)) for name in ("max_steps", "epochs")]
    return [(key, before.get(key), now) for key, now in keys if before.get(key) != now]


def _normalised(recipe: Recipe, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe by dotted key, as the run would have begun with it: its processes, its rule for the adapter."""
    lora = recipe.model.lora
    if lora is not None and lora.in_several_processes == "off" and not has_adapter(before):
        recipe = without_adapter(recipe)
    now = flat(yaml.safe_load(to_yaml(recipe))) | {"grpo.processes": before.get("grpo.processes")}
    rule = "model.lora.in_several_processes"
    return now | ({rule: before[rule]} if rule in now and rule in before else {})


def has_adapter(before: Mapping[str, Any]) -> bool:
    """Whether a run began with an adapter."""
    return before.get("model.lora", ()) is not None


def check_same_run(before: Mapping[str, Any], after: Mapping[str, Any], path: Path, again: str = "") -> None:
    """Allow changes of length, logging and naming; refuse what would make the resumed run another run.

    Args:
        before: What the run began with, by dotted key.
        after: The same of the recipe as it resolves now.
        path: The run folder, for the message.
        again: The command that continues it, for the message.

    Raises:
        ConfigError: Settings differ that decide what is learned; the message names them with both values.
    """
    free = "sft.max_steps sft.epochs grpo.max_steps grpo.epochs report_to tracking hub description".split()
    free += [f"eval.{name}" for name in ("enabled", "baseline", "batch_size", "engine", "device")]
    if not any((path / stage / "final").is_dir() for stage in STAGES) or not any(path.glob("eval/*.json")):
        free += ["eval."]  # no evaluation that stays and is compared with later ones
    free_last = "logging_steps save_steps save_total_limit eval_every samples_every".split()
    changed = [
        key
        for key in sorted(set(before) | set(after))
        if before.get(key) != after.get(key)
        and not key.startswith((*free, "output_dir", "run_name"))
        and key.rpartition(".")[2] not in free_last
    ]
    if changed:
        lines = "\n".join(
            f"  {key}: {before.get(key)!r} in the run, {after.get(key)!r} now" for key in changed[:8]
        )
        more = f"  and {len(changed) - 8} more\n" if len(changed) > 8 else ""
        raise ConfigError(
            f"{path} was started with other settings, so this would be another run:\n{lines}\n{more}"
            f"Use the same values to resume, as {again or f'algorist run {path} --resume'} does, or start a new run with run_name=NAME"
        )


def without_adapter(recipe: Recipe) -> Recipe:
    """Return the recipe with ``model.lora`` null."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": None})})


@contextmanager
def hold_folder(recipe: Recipe, inputs: Inputs, *, resume: bool) -> Iterator[RunFolder]:
    """Make the run folder, or open it to resume, and hold it against other processes; only then is it looked into and written.

    Raises:
        CheckpointError: Another process holds it, or one has made a run of it meanwhile.
    """
    folder = RunFolder.open(recipe.path) if resume else RunFolder.create(recipe.path)
    with folder.lock():
        if not resume:
            refuse_begun(folder)
            folder.write_environment(seed=recipe.seed)
            folder.keep_inputs(inputs)
        folder.write_text("config.yaml", to_yaml(recipe))
        sign(folder.path)
        yield folder


def refuse_begun(folder: RunFolder) -> None:
    """Refuse to begin a run in a folder that holds one (CheckpointError)."""
    if folder.config.exists() and folder.has_begun():
        raise CheckpointError(
            f"{folder.path} already holds a run. Continue it with --resume, or take another name: run_name={folder.path.name}-2"
        )
