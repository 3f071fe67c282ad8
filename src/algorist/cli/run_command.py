"""``algorist run RECIPE [key=value …]``: a whole run or one stage of it, in this process or in several."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import Overrides, RecipeArgument, Resume, read_recipe
from algorist.cli.session import (
    CONFIGS,
    Stopped,
    command_again,
    import_quietly,
    launch,
    stopped_at_once,
    work,
)
from algorist.cli.terminal import Line, Result, TerminalDisplay, View, closing_table, render, verb
from algorist.errors import ConfigError, check_known
from algorist.store.safe_text import one_line, printable
from algorist.store.stages import EVALUATED, STAGES

if TYPE_CHECKING:
    from algorist.config.schema import Recipe
    from algorist.report.results import Took

app = typer.Typer(add_completion=False)
_HEADINGS = {"base": "base", "sft": "SFT", "grpo": "GRPO"}


class Ran(Result):
    """A finished run."""

    run: Annotated[str | None, "the run folder; null with --seeds"]
    report: Annotated[str | None, "its page"]
    evaluations: Annotated[dict[str, Any], "base, sft, grpo → metrics: value, low, high (95 %)"]
    differences: Annotated[dict[str, Any], "the last two evaluations, paired: metric → value, low, high"]
    next: Annotated[list[str], "commands"]
    seeds: Annotated[dict[str, Any] | None, "with --seeds: mean, spread and the runs"] = None
    before: Any = ()
    after: Any = ()
    """Samples of the last two evaluations."""
    lines: Sequence[str] = ()

    def view(self, width: int) -> View:
        yield from self.lines
        if self.differences:
            (first, before), (second, after) = list(self.evaluations.items())[-2:]
            names = [_HEADINGS[first], _HEADINGS[second]]
            yield closing_table(width, before, after, self.differences, names)
            yield from _examples(self.before, self.after, names)
        if self.run is not None:
            yield f"\nThe run is in {self.run}, its report in {self.report}. Next:"
            yield "\n".join(self.next)


@verb(app)
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    resume: Resume = False,
    only: Annotated[str | None, typer.Option(metavar="sft|grpo")] = None,
    processes: Annotated[int | None, typer.Option("-n", "--processes", min=1)] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--launch",
            metavar="NAME",
            help=f"How they share the model: {', '.join(CONFIGS)} or an accelerate file; without -n one per GPU.",
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1)] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y")] = False,
    wandb_project: str | None = None,
    wandb_entity: str | None = None,
    no_wandb: bool = False,
    push_to_hub: bool = False,
    hub_model_id: str | None = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
    as_json: bool = False,
) -> Ran | Result | int | None:
    """Run a recipe: data → model → SFT → evaluation → GRPO → evaluation → closing table.

    Batch sizes in a recipe are per process.

    Args:
        only: Only this stage; grpo starts from the finished SFT stage with --resume, else from the recipe's model.
        processes: Several processes, through accelerate; words after -- are its flags.
        seeds: Run it with N seeds, seed … seed + N - 1: mean, spread, one page.
        yes: Begin without a question what takes more than an hour; where no terminal is, nothing is asked.
        wandb_project: Track with wandb, in this project (tracking.project).
        wandb_entity: User or team in wandb (tracking.entity).
        no_wandb: Leave wandb out, whatever the recipe says.
        push_to_hub: Upload the model after the run (hub.push).
        hub_model_id: Repository owner/name; turns the upload on (hub.model_id).

    Example: algorist run quickstart · algorist run quickstart --only sft run_name=first · algorist run -n 2 smoke-cpu
    grpo.batch_size=8 · Next: algorist solve 'Sam has 17 coins. Sam loses 2. Sam gives 2 to Lea. How many coins does
    Sam have now?'
    """
    stages = STAGES if only is None else (only,)
    for stage in stages:
        check_known(stage, STAGES, f"--only {stage} is no stage", "Expected: --only sft or --only grpo")
    words = list(overrides or [])
    split = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    settings, flags = words[:split], words[split:]
    settings += tracking_and_hub(
        recipe, settings, wandb_project, wandb_entity, no_wandb, push_to_hub, hub_model_id
    )
    if worker:
        return work(
            recipe, settings, resume, stages, lambda: run_stages(recipe, settings, resume, stages, as_json)
        )
    if processes is not None or config is not None or flags:
        if seeds is not None:
            raise ConfigError(
                "--seeds runs one process after another: leave --processes, --launch and words after -- out"
            )
        own = [*(["--resume"] * resume), *(["--only", only] if only else []), *(["--json"] * as_json)]
        return launch(recipe, settings, flags, processes, config or "ddp", own)
    if seeds is not None:
        return _run_seeds(recipe, settings, resume, stages, seeds, as_json, yes)
    return run_stages(recipe, settings, resume, stages, as_json, yes)


def tracking_and_hub(
    recipe: str,
    settings: list[str],
    wandb_project: str | None = None,
    wandb_entity: str | None = None,
    no_wandb: bool = False,
    push_to_hub: bool = False,
    hub_model_id: str | None = None,
) -> list[str]:
    """Return the options of trackers and upload as settings."""
    values = {
        "tracking.project": wandb_project,
        "tracking.entity": wandb_entity,
        "hub.model_id": hub_model_id,
        "hub.push": push_to_hub or None,
    }
    added = [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]
    with_wandb = (wandb_project is not None or wandb_entity is not None) and not no_wandb
    if with_wandb or no_wandb:
        resolved: Any = read_recipe(recipe, settings)
        others = [name for name in resolved.report_to if name != "wandb"]
        added.append(f"report_to={json.dumps([*others, *(['wandb'] if with_wandb else [])])}")
    return added


def _run_seeds(
    name: str,
    settings: list[str],
    resume: bool,
    stages: tuple[str, ...],
    count: int,
    as_json: bool,
    yes: bool,
) -> Ran:
    """Run a recipe once per seed and say mean and spread; with ``resume``, finished seeds are not repeated."""
    from algorist.config.resume import begun, run_path
    from algorist.runs.seeds import lines_of_seeds, recipes_of_seeds, summarise_seeds

    loaded = read_recipe(name, settings)
    recipes, display = recipes_of_seeds(loaded, count), TerminalDisplay(stderr=as_json)
    known = [resume and (run_path(r) / "config.yaml").is_file() for r in recipes]
    for recipe, continues in zip(recipes, known, strict=True):
        begun(recipe, resume=continues)  # before the first seed has taken its hours
    for number, (recipe, continues) in enumerate(zip(recipes, known, strict=True), start=1):
        display.say(f"seed {recipe.seed} ({number} of {count})")
        done = _run(recipe, display, continues, stages, may_ask=not (yes or as_json) and number == 1)
        if done is not None and not as_json:
            render(done, as_json=False)
    summary = summarise_seeds(loaded, [run_path(recipe) for recipe in recipes])
    place = run_path(loaded)
    files = f"{place}-seeds.json{f' and {place}-seeds.html' if count > 1 else ''}"
    return Ran(None, None, {}, {}, [], seeds=summary, lines=[*lines_of_seeds(summary), f"written to {files}"])


def run_stages(
    name: str, settings: list[str], resume: bool, stages: tuple[str, ...], as_json: bool, yes: bool = False
) -> Ran | None:
    """Run the given stages of a recipe with a terminal display; shared by ``run`` and its workers.

    Returns:
        The finished run; None in a process that is not the main one.

    Raises:
        Stopped: Ctrl-C or SIGTERM ended it.
    """
    display, folder = TerminalDisplay(stderr=as_json), None
    try:
        loaded = read_recipe(name, settings)
        run = Path(loaded.output_dir) / (loaded.run_name or loaded.name)
        folder = run if resume or not (run / "config.yaml").is_file() else None  # else it will be refused
        return _run(loaded, display, resume, stages, may_ask=not (yes or as_json))
    except KeyboardInterrupt:
        display.close()
        raise Stopped(stopped_at_once(folder)) from None


def _run(
    loaded: Recipe, display: TerminalDisplay, resume: bool, stages: tuple[str, ...], *, may_ask: bool
) -> Ran | None:
    from algorist.cli.preflight_command import how_long
    from algorist.config.resume import begun, run_path
    from algorist.data.problems import Problems
    from algorist.prompts import get_format
    from algorist.report.results import Took
    from algorist.runs.plan import check_names, check_stages

    took = Took(resumed=resume)
    check_stages(loaded, stages)
    form = get_format(loaded.prompt.format, tags=loaded.prompt.tags)
    check_names(loaded, form, own=False)  # a wrong name, column or row is said before torch is imported
    problems = None
    if not (resume and (run_path(loaded) / "config.yaml").is_file()):  # what can be resumed is compared later
        begun(loaded, resume=resume)
    if not resume and _has_files(loaded):
        problems = Problems.load(loaded, stages)
    import_quietly("algorist.training.grpo_setup", display.say)
    from algorist.runs.pipeline import run_recipe

    def begins(run: Any) -> None:
        run.times.add("starting", run.times.began - took.began)
        how_long(run, may_ask=may_ask and sys.stdin.isatty())

    state = run_recipe(
        loaded, display=display, resume=resume, stages=stages, problems=problems, begins=begins
    )
    if not state.processes.main:
        return None
    if state.stopped:
        raise Stopped(
            f"stopped; everything is saved in {state.folder.path}. Continue: {command_again(resume=True)}"
        )
    return _finished(state, took)


def _has_files(recipe: Recipe) -> bool:
    """Say whether a dataset is a file, or of an unknown name, which may be one."""
    from algorist.data import DATASETS

    data = recipe.data
    sections = [section for section in (data.train, data.sft, data.eval) if section is not None]
    from_file = any(section.path or section.name not in DATASETS for section in sections)
    return from_file and data.train.pass_rate is None  # the table of pass rates is found by the model


def _finished(state: Any, took: Took) -> Ran:
    from algorist.evaluation.artifact import read_artifact
    from algorist.evaluation.compare import paired_metrics
    from algorist.evaluation.console import solved_question
    from algorist.report.build import build_report
    from algorist.report.results import write_result

    folder = state.folder.path
    names = [s for s in EVALUATED if (folder / "eval" / f"{s}.json").is_file()]
    artifacts = [read_artifact(folder / "eval", name) for name in names]
    last = [artifact.samples for artifact in artifacts[-2:]]
    solved = solved_question(last[-1]) if last else None
    question = solved or min((p.question for p in state.held_out or state.train), key=len)
    typed = shlex.quote(str(folder))
    then = [f"solve {shlex.quote(printable(question))} --model {typed}"]
    then += [f"inspect {typed} --sort=-reward"] if list((folder / "rollouts").glob("*.parquet")) else []
    then += [f"compare {typed}/eval/{names[-2]}.json {typed}/eval/{names[-1]}.json"] if names[1:] else []
    write_result(state.folder, state.recipe, dict(zip(names, artifacts, strict=True)), took)
    return Ran(
        run=str(folder),
        report=str(build_report(folder)),
        evaluations={name: artifact.metrics for name, artifact in zip(names, artifacts, strict=True)},
        differences=paired_metrics(*last) if names[1:] else {},
        next=[f"algorist {command}" for command in then],
        before=last[0] if last else (),
        after=last[-1] if last else (),
    )


def _examples(before: list[dict[str, Any]], after: list[dict[str, Any]], names: list[str]) -> View:
    """Return three problems whose greedy answer changed, before and after."""
    last = {r["problem_id"]: r for r in after if r["greedy"]}
    pairs = [(r, last[r["problem_id"]]) for r in before if r["greedy"] and r["problem_id"] in last]
    changed = [(old, new) for old, new in pairs if old["correct"] != new["correct"]]
    changed.sort(key=lambda pair: bool(pair[0]["correct"]))
    for old, new in changed[:3] or pairs[:1]:
        yield Line(f"\n{one_line(old['question'], 400)}  (answer {old['gold']})", "bold")
        for name, row in zip(names, (old, new), strict=True):
            verdict = "right" if row["correct"] else f"wrong: {row['reason']}"
            yield Line(f"{name} ({verdict}): {one_line(row['completion'].strip(), 300) or 'nothing'}")
