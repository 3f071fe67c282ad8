"""``algorist run RECIPE [key=value …]``: a whole run or one stage of it, in this process or in several."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import Overrides, RecipeArgument, Resume, read_recipe
from algorist.cli.interrupt import Stopped, command_again, stopped_at_once
from algorist.cli.launch import CONFIGS, launch, work
from algorist.cli.quiet import import_quietly
from algorist.cli.terminal import TerminalDisplay, closing_table
from algorist.errors import ConfigError, nearest
from algorist.store.safe_text import one_line, printable
from algorist.store.stages import EVALUATED, STAGES

if TYPE_CHECKING:
    from algorist.config.schema import Recipe

app = typer.Typer(add_completion=False)
_HEADINGS = {"base": "base", "sft": "SFT", "grpo": "GRPO"}


@app.command(
    epilog="Example: algorist run quickstart · algorist run quickstart --only sft run_name=first · algorist run -n 2 smoke-cpu "
    "grpo.batch_size=8 · Next: algorist solve 'Sam has 17 coins. Sam loses 2. Sam gives 2 to Lea. How many coins does Sam have now?'"
)
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    resume: Resume = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="sft|grpo",
            help="Only this stage; grpo starts from the finished SFT stage with --resume, else from the recipe's model.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--processes",
            min=1,
            help="Several processes, through accelerate; words after -- are its flags.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--launch",
            metavar="NAME",
            help=f"How they share the model: {', '.join(CONFIGS)} or an accelerate file; without -n one per GPU.",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Run it with N seeds, seed … seed + N - 1: mean, spread, one page.", min=1),
    ] = None,
    wandb_project: Annotated[
        str | None, typer.Option(help="Track with wandb, in this project (tracking.project).")
    ] = None,
    wandb_entity: Annotated[str | None, typer.Option(help="User or team in wandb (tracking.entity).")] = None,
    no_wandb: Annotated[
        bool, typer.Option("--no-wandb", help="Leave wandb out, whatever the recipe says.")
    ] = False,
    push_to_hub: Annotated[
        bool, typer.Option("--push-to-hub", help="Upload the model after the run (hub.push).")
    ] = False,
    hub_model_id: Annotated[
        str | None, typer.Option(help="Repository owner/name; turns the upload on (hub.model_id).")
    ] = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> int:
    """Run a recipe: data → model → SFT → evaluation → GRPO → evaluation → closing table.

    Batch sizes in a recipe are per process.
    """
    if only is not None and only not in STAGES:
        raise ConfigError(
            f"--only {only} is no stage.{nearest(only, STAGES)} Expected: --only sft or --only grpo"
        )
    stages = STAGES if only is None else (only,)
    words = list(overrides or [])
    split = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    settings, flags = words[:split], words[split:]
    settings += tracking_and_hub(
        recipe,
        settings,
        wandb_project=wandb_project,
        wandb_entity=wandb_entity,
        no_wandb=no_wandb,
        push_to_hub=push_to_hub,
        hub_model_id=hub_model_id,
    )
    if worker:
        return work(recipe, settings, resume, stages, run_stages)
    if processes is not None or config is not None or flags:
        if seeds is not None:
            raise ConfigError(
                "--seeds runs one process after another: leave --processes, --launch and words after -- out"
            )
        own = [*(["--resume"] if resume else []), *(["--only", only] if only else [])]
        return launch(recipe, settings, flags, processes, config or "ddp", own)
    if seeds is not None:
        return _run_seeds(recipe, settings, resume, stages, seeds)
    return run_stages(recipe, settings, resume, stages)


def tracking_and_hub(
    recipe: str,
    settings: list[str],
    *,
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


def _run_seeds(name: str, settings: list[str], resume: bool, stages: tuple[str, ...], count: int) -> int:
    """Run a recipe once per seed and say mean and spread; with ``resume``, finished seeds are not repeated."""
    from algorist.runs.plan import check_folder, run_path
    from algorist.runs.seeds import lines_of_seeds, recipes_of_seeds, summarise_seeds

    loaded = read_recipe(name, settings)
    recipes, display = recipes_of_seeds(loaded, count), TerminalDisplay()
    begun = [resume and (run_path(r) / "config.yaml").is_file() for r in recipes]
    for recipe, continues in zip(recipes, begun, strict=True):
        check_folder(recipe, resume=continues)  # before the first seed has taken its hours
    for number, (recipe, continues) in enumerate(zip(recipes, begun, strict=True), start=1):
        display.say(f"seed {recipe.seed} ({number} of {count})")
        _run(recipe, display, continues, stages)
    summary = summarise_seeds(loaded, [run_path(recipe) for recipe in recipes])
    place = run_path(loaded)
    for line in lines_of_seeds(summary):
        display.say(line)
    display.say(f"written to {place}-seeds.json{f' and {place}-seeds.html' if count > 1 else ''}")
    return 0


def run_stages(name: str, overrides: list[str] | None, resume: bool, stages: tuple[str, ...]) -> int:
    """Run the given stages of a recipe with a terminal display; shared by ``run`` and its workers.

    Raises:
        Stopped: Ctrl-C or SIGTERM ended it.
    """

    display, folder = TerminalDisplay(), None
    try:
        loaded = read_recipe(name, overrides)
        run = Path(loaded.output_dir) / (loaded.run_name or loaded.name)
        folder = run if resume or not (run / "config.yaml").is_file() else None  # else it will be refused
        return _run(loaded, display, resume, stages)
    except KeyboardInterrupt:
        display.close()
        raise Stopped(stopped_at_once(folder)) from None


def _run(loaded: Recipe, display: TerminalDisplay, resume: bool, stages: tuple[str, ...]) -> int:
    from algorist.runs.plan import Problems, check_folder, check_names, check_stages, run_path

    check_stages(loaded, stages)
    check_names(loaded, quick=True)  # a wrong name, column or row is said before torch is imported
    problems = None
    if not (resume and (run_path(loaded) / "config.yaml").is_file()):  # what can be resumed is compared later
        check_folder(loaded, resume=resume)
    if not resume and _has_files(loaded):
        problems = Problems.load(loaded, stages)
    import_quietly("algorist.training.grpo_setup", display.say)
    from algorist.runs.pipeline import run_recipe

    state = run_recipe(loaded, display=display, resume=resume, stages=stages, problems=problems)
    if not state.processes.main:
        return 0
    if state.stopped:
        raise Stopped(
            f"stopped; everything is saved in {state.folder.path}. Continue: {command_again(resume=True)}"
        )
    _close(display, state)
    return 0


def _has_files(recipe: Recipe) -> bool:
    """Say whether a dataset is a file, or of an unknown name, which may be one."""
    from algorist.data import DATASETS

    data = recipe.data
    sections = [section for section in (data.train, data.sft, data.eval) if section is not None]
    found = any(section.path or section.name not in DATASETS for section in sections)
    return found and data.train.pass_rate is None  # the table of pass rates is found by the model


def _close(display: Any, state: Any) -> None:
    from algorist.evaluation.artifact import read_artifact
    from algorist.evaluation.compare import paired_metrics
    from algorist.evaluation.console import solved_question

    folder = state.folder.path
    done = [s for s in EVALUATED if (folder / "eval" / f"{s}.json").is_file()]
    if done[1:]:
        first, last = (read_artifact(folder / "eval", name) for name in done[-2:])
        paired = paired_metrics(first.samples, last.samples)
        names = [_HEADINGS[name] for name in done[-2:]]
        closing_table(display.console, first.metrics, last.metrics, paired, names)
        _examples(display, first.samples, last.samples, names)
    from algorist.report.build import build_report

    solved = solved_question(read_artifact(folder / "eval", done[-1]).samples) if done else None
    question = solved or min((p.question for p in state.held_out or state.train), key=len)
    then = [f"solve {shlex.quote(printable(question))} --model {folder}"]
    then += [f"inspect {folder} --sort=-reward"] if list((folder / "rollouts").glob("*.parquet")) else []
    then += [f"compare {folder}/eval/{done[-2]}.json {folder}/eval/{done[-1]}.json"] if done[1:] else []
    display.say(f"\nThe run is in {folder}, its report in {build_report(folder)}. Next:")
    display.say("\n".join(f"algorist {command}" for command in then))


def _examples(
    display: Any, before: list[dict[str, Any]], after: list[dict[str, Any]], names: list[str]
) -> None:
    """Show three problems whose greedy answer changed, before and after."""
    last = {r["problem_id"]: r for r in after if r["greedy"]}
    pairs = [(r, last[r["problem_id"]]) for r in before if r["greedy"] and r["problem_id"] in last]
    changed = [(old, new) for old, new in pairs if old["correct"] != new["correct"]]
    changed.sort(key=lambda pair: bool(pair[0]["correct"]))
    for old, new in changed[:3] or pairs[:1]:
        display.console.print(f"\n{one_line(old['question'], 400)}  (answer {old['gold']})", style="bold")
        for name, row in zip(names, (old, new), strict=True):
            verdict = "right" if row["correct"] else f"wrong: {row['reason']}"
            display.console.print(
                f"{name} ({verdict}): {one_line(row['completion'].strip(), 300) or 'nothing'}"
            )
