"""Expert iteration: sample training problems, train on the right completions, evaluate; again with the model that came out.

Every round is a run of its own, ``NAME-round-1``, ``NAME-round-2``, …: it holds the round's rollouts, and its SFT stage
takes them through the dataset ``rollouts`` and starts from the final model of the round before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from algorist.config.own_files import inputs_of
from algorist.config.schema import DatasetSection, Recipe
from algorist.data import load_problems
from algorist.data.problems import fitting_problems
from algorist.errors import ConfigError, DataError
from algorist.evaluation.artifact import artifact_names, read_artifact
from algorist.evaluation.estimators import Interval
from algorist.extensions.model_folder.write import export
from algorist.models.load import Policy, make_policy, pick_device
from algorist.report.build import build_report
from algorist.rewards import build_rewards
from algorist.runs.asking import recipe_format
from algorist.runs.begin import hold_folder, settings_at_start
from algorist.runs.draft import Draft
from algorist.runs.pipeline import run_recipe
from algorist.runs.plan import make_plan
from algorist.runs.sample import sample_problems
from algorist.store.run_folder import RunFolder
from algorist.store.run_log import Display, Lines
from algorist.store.write import SCHEMA, RolloutWriter
from algorist.types import Problem

STAGE = "iterate"
AGAIN = "the first algorist iterate command with --resume"
SETTING = "iteration.json"


@dataclass(frozen=True)
class Drawing:
    """Sampling settings of a round; the defaults are those of CS336's expert iteration."""

    samples: int = 8
    """Completions per problem."""
    questions: int = 1024
    """Training problems of a round, chosen anew in each."""
    epochs: float = 2.0
    """Passes of the round's SFT over what was kept."""


@dataclass(frozen=True)
class Round:
    """Results of one round."""

    number: int
    folder: Path
    questions: int
    completions: int
    right: int
    solved: int
    """Problems with a right completion."""
    metrics: dict[str, Interval]
    """Held-out evaluation of the round's model; empty without one."""


@dataclass
class Iteration:
    """The rounds that are finished, and the evaluation of the model that the first one started from."""

    rounds: list[Round] = field(default_factory=list)
    start: dict[str, Interval] = field(default_factory=dict)
    stopped: bool = False


def iterate(
    recipe: Recipe,
    *,
    rounds: int = 5,
    drawing: Drawing | None = None,
    display: Display | None = None,
    resume: bool = False,
) -> Iteration:
    """Do ``rounds`` rounds of expert iteration and return what each did.

    Args:
        recipe: Model, training problems, prompt format, grader, SFT and evaluation; its GRPO stage is left out, but
            completions are drawn at ``grpo.temperature`` and ``grpo.top_p``.
        rounds: Number of rounds.
        drawing: Problems, completions and epochs of a round.
        display: Where progress is shown.
        resume: Continue: finished rounds are kept, the unfinished one continues where it stopped.

    Raises:
        ConfigError: The model is made from scratch, or a resumed round was begun with other settings.
        DataError: No completion of a round is right.
        CheckpointError: The folders hold other runs.
    """
    drawing, display = drawing or Drawing(), display or Lines()
    _check_start(recipe)
    plan = make_plan(Draft.of(recipe, stages=(), in_folder=False), say=display.say)
    recipe = plan.recipe
    for number in range(1, 2 if resume else rounds + 1):
        round_ = round_recipe(recipe, number, rounds, drawing)
        settings_at_start(round_, inputs_of(round_), resume=resume, again=AGAIN)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    done, model = Iteration(), recipe.model.name
    for number in range(1, rounds + 1):
        own = round_recipe(recipe, number, rounds, drawing, model)
        drawn = resume and RunFolder(own.path).is_finished(STAGE)
        policy = None
        if not drawn:  # a model that is not there leaves no folder
            policy = make_policy(own.model, device=pick_device(own.device), seed=own.seed)
        with _opened(own, drawing, resume) as folder:
            display.say(f"round {number} of {rounds} · {folder.path} · starts from {model}")
            if policy is not None:
                _sample(own, policy, folder, drawing, number, display)
        del policy
        counts = folder.stages()[STAGE]
        if not counts["right"]:
            raise DataError(_nothing_right(recipe, folder.path, number, counts))
        if not folder.is_finished("eval-sft" if recipe.eval.enabled else "sft"):
            if run_recipe(own, display=display, resume=True, stages=("sft",)).stopped:
                done.stopped = True
                return done
            build_report(folder.path)
        done.rounds.append(Round(number, folder.path, **counts, metrics=_metrics(folder, "sft")))
        done.start = done.start or _metrics(folder, "base")
        model = str(_whole(folder.path / "sft" / "final"))
    return done


def round_recipe(recipe: Any, number: int, rounds: int, drawing: Drawing, model: str | None = None) -> Recipe:
    """Return the recipe of one round: SFT from ``model`` on the right ones of the round's own rollouts."""
    name = f"{recipe.path.name}-round-{number}"
    run = str(Path(recipe.output_dir) / name)
    rollouts = DatasetSection(name="rollouts", params={"run": run}, checker=recipe.data.train.checker)
    tracked = recipe.tracking.run_name
    own: dict[str, Any] = {
        "run_name": name,
        "model": recipe.model.model_copy(update={"name": model or recipe.model.name}),
        "data": recipe.data.model_copy(update={"sft": rollouts}),
        "sft": recipe.sft.model_copy(
            update={"enabled": True, "epochs": drawing.epochs, "max_steps": None, "source": "problems"}
        ),
        "grpo": recipe.grpo.model_copy(update={"enabled": False}),
        "eval": recipe.eval.model_copy(update={"baseline": recipe.eval.enabled and number == 1}),
        "hub": recipe.hub if number == rounds else type(recipe.hub)(),
        "tracking": recipe.tracking.model_copy(
            update={"run_name": f"{tracked}-round-{number}" if tracked else None}
        ),
    }
    return recipe.model_copy(update=own)


def _check_start(recipe: Recipe) -> None:
    """Refuse a start that can solve nothing."""
    if recipe.model.name == "tiny":
        start = f"{recipe.path.name}-start"
        raise ConfigError(
            "model.name is tiny: a model from scratch solves nothing, so no round would find a right completion. First "
            f"train one, then start from it: algorist run RECIPE --only sft run_name={start}; algorist iterate RECIPE "
            f"model.name={Path(recipe.output_dir) / start / 'sft' / 'final'}"
        )


@contextmanager
def _opened(recipe: Recipe, drawing: Drawing, resume: bool) -> Iterator[RunFolder]:
    """Hold the folder of a round; one that an earlier call has begun must have drawn the same way."""
    known = resume and (recipe.path / "config.yaml").exists()
    inputs = inputs_of(recipe)
    settings_at_start(recipe, inputs, resume=known, again=AGAIN)
    with hold_folder(recipe, inputs, resume=known) as folder:
        before, now = folder.read_json(SETTING) if known else None, asdict(drawing)
        if before is not None and before != now:
            raise ConfigError(
                f"{folder.path} was begun with {_told(before)}, not with {_told(now)}; give those values to resume, or take "
                "another name: run_name=NAME"
            )
        folder.write_json(SETTING, now)
        yield folder


def _told(setting: dict[str, Any]) -> str:
    return ", ".join(f"--{name} {value:g}" for name, value in setting.items())


def _sample(
    recipe: Recipe, policy: Policy, folder: RunFolder, drawing: Drawing, number: int, display: Display
) -> None:
    """Draw completions for a round's problems, grade and store them."""
    form = recipe_format(recipe)
    section = recipe.data.train
    problems = fitting_problems(section, load_problems(section), form, policy.tokenizer)
    problems = random.Random(f"{recipe.seed}-{number}").sample(
        problems, min(drawing.questions, len(problems))
    )
    rows, progress = sample_problems(
        recipe,
        policy,
        problems,
        form,
        samples=drawing.samples,
        seed=recipe.seed + 1_000_003 * number,
        keep=folder.rollouts / "sample.progress.jsonl",
        rewards=build_rewards(recipe.rewards or ["correct"], form, matcher=recipe.matcher),
        on_progress=lambda done, total: display.progress(STAGE, done, total),
    )
    display.finished(STAGE)
    with RolloutWriter(folder.rollouts, stage=STAGE) as store:
        store.truncate_after(0)
        store.write(_stored(rows, problems))
    right = [row["problem_id"] for row in rows if row["correct"]]
    counts = {
        "questions": len(problems),
        "completions": len(rows),
        "right": len(right),
        "solved": len(set(right)),
    }
    folder.finish(STAGE, counts)
    progress.remove()
    display.say(
        f"{len(right)} of {len(rows)} completions are right, for {counts['solved']} of {len(problems)} problems"
    )


def _stored(rows: Sequence[dict[str, Any]], problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """Return rows of ``evaluate`` as rows of the rollout store; the advantage is the reward less the group's mean."""
    groups = {problem.id: number for number, problem in enumerate(problems)}
    rewards: dict[str, list[float]] = {}
    for row in rows:
        if row.get("reward") is not None:
            rewards.setdefault(row["problem_id"], []).append(row["reward"])
    means = {problem: sum(values) / len(values) for problem, values in rewards.items()}
    return [
        {name: row[name] for name in SCHEMA.names if name in row}
        | {"step": 0, "group": groups[row["problem_id"]]}
        | {"advantage": row["reward"] - means[row["problem_id"]] if row.get("reward") is not None else None}
        for row in rows
    ]


def _nothing_right(recipe: Recipe, folder: Path, number: int, counts: dict[str, int]) -> str:
    return (
        f"round {number}: none of {counts['completions']} completions for {counts['questions']} problems is right, so there is "
        f"nothing to train on. See why: algorist inspect {folder}. Then start again, under another name (run_name=NAME), "
        f"with more completions (--samples {8 * counts['completions'] // counts['questions']}), easier problems (data.train.…), "
        f"or a model that already solves some: algorist run RECIPE --only sft run_name={recipe.path.name}-start, and "
        f"model.name={Path(recipe.output_dir) / (recipe.path.name + '-start') / 'sft' / 'final'}"
    )


def _metrics(folder: RunFolder, name: str) -> dict[str, Interval]:
    exists = name in artifact_names(folder.evaluations)
    return read_artifact(folder.evaluations, name).metrics if exists else {}


def _whole(final: Path) -> Path:
    """Return a folder with whole weights: an adapter is merged into its base, and the next round trains a new one."""
    if not (final / "adapter_config.json").is_file():
        return final
    merged = final.with_name("merged")
    if not merged.is_dir():
        export(final, merged, merge=True)
    return merged
