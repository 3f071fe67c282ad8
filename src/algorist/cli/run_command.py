"""``algorist run RECIPE [key=value …]``."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import Overrides, RecipeArgument, read_recipe
from algorist.cli.interrupt import Stopped, command_again, stopped_at_once

if TYPE_CHECKING:
    from algorist.cli.display import TerminalDisplay
    from algorist.config.schema import Recipe

app = typer.Typer(add_completion=False)

WandbProject = Annotated[
    str | None, typer.Option("--wandb-project", help="Track with wandb, in this project (tracking.project).")
]
WandbEntity = Annotated[
    str | None, typer.Option("--wandb-entity", help="User or team in wandb (tracking.entity).")
]
NoWandb = Annotated[bool, typer.Option("--no-wandb", help="Leave wandb out, whatever the recipe says.")]
PushToHub = Annotated[bool, typer.Option("--push-to-hub", help="Upload the model after the run (hub.push).")]
HubModelId = Annotated[
    str | None,
    typer.Option("--hub-model-id", help="Repository owner/name; turns the upload on (hub.model_id)."),
]


@app.command(
    epilog="Example: algorist run quickstart · Next: algorist solve 'Sam has 17 coins. Sam loses 2. Sam gives 2 to Lea. How many coins does Sam have now?'"
)
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the same folder.")] = False,
    skip_sft: Annotated[
        bool, typer.Option("--skip-sft", help="Leave SFT out; a finished SFT stage is used.")
    ] = False,
    skip_grpo: Annotated[bool, typer.Option("--skip-grpo", help="Leave GRPO out.")] = False,
    wandb_project: WandbProject = None,
    wandb_entity: WandbEntity = None,
    no_wandb: NoWandb = False,
    push_to_hub: PushToHub = False,
    hub_model_id: HubModelId = None,
) -> int:
    """Run a recipe: data → model → SFT → evaluation → GRPO → evaluation → closing table."""
    overrides = with_flags(
        recipe, overrides, wandb_project, wandb_entity, no_wandb, push_to_hub, hub_model_id
    )
    stages = tuple(s for s, skip in (("sft", skip_sft), ("grpo", skip_grpo)) if not skip)
    return run_stages(recipe, overrides, resume, stages)


def with_flags(
    name: str,
    overrides: list[str] | None,
    wandb_project: str | None,
    wandb_entity: str | None,
    no_wandb: bool,
    push_to_hub: bool,
    hub_model_id: str | None,
) -> list[str]:
    """Return the overrides with those that the flags stand for; shared by run, sft and grpo."""
    added = [
        f"{key}={json.dumps(value)}"
        for key, value in (
            ("tracking.project", wandb_project),
            ("tracking.entity", wandb_entity),
            ("hub.model_id", hub_model_id),
        )
        if value is not None
    ]
    if push_to_hub:
        added.append("hub.push=true")
    wanted = wandb_project is not None or wandb_entity is not None
    if wanted or no_wandb:
        rest = [t for t in read_recipe(name, overrides).report_to if t != "wandb"]
        added.append(f"report_to={json.dumps([*rest, *(['wandb'] if wanted and not no_wandb else [])])}")
    return [*(overrides or []), *added]


def run_stages(name: str, overrides: list[str] | None, resume: bool, stages: tuple[str, ...]) -> int:
    """Run the given stages of a recipe with a terminal display; shared by run, sft and grpo.

    Raises:
        Stopped: Ctrl-C or SIGTERM ended it.
    """
    from algorist.cli.display import TerminalDisplay

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
    _quiet_libraries()
    if "torch" not in sys.modules and sys.stderr.isatty():
        print("loading torch and transformers …", file=sys.stderr, flush=True)
    from algorist.runs.pipeline import run_recipe

    state = run_recipe(loaded, display=display, resume=resume, stages=stages)
    if not state.processes.main:
        return 0
    if state.stopped:
        raise Stopped(
            f"stopped; everything is saved in {state.folder.path}. Continue: {command_again(resume=True)}"
        )
    _close(display, state)
    return 0


def _close(display: Any, state: Any) -> None:
    from algorist.cli.display import closing_table
    from algorist.evaluation.artifact import read_artifact
    from algorist.evaluation.compare import paired_metrics
    from algorist.evaluation.console import solved_question
    from algorist.store.safe_text import printable

    folder = state.folder.path
    there = [s for s in ("base", "sft", "grpo") if (folder / "eval" / f"{s}.json").is_file()]
    if there[1:]:
        first, last = (read_artifact(folder / "eval", name) for name in there[-2:])
        paired = paired_metrics(first.samples, last.samples)
        closing_table(display.console, first.metrics, last.metrics, paired, _headings(there[-2:]))
        _examples(display, first.samples, last.samples)
    elif there:
        from algorist.cli.display import interval_text

        for name, interval in read_artifact(folder / "eval", there[0]).metrics.items():
            display.say(f"{name.replace('_', ' ')}: {interval_text(interval, name)}")
    from algorist.report.build import build_report

    solved = solved_question(read_artifact(folder / "eval", there[-1]).samples) if there else None
    question = (
        solved or "Sam has 17 coins. Sam loses 2. Sam gives 2 to Lea. How many coins does Sam have now?"
    )
    then = [f"solve {shlex.quote(printable(question))} --model {folder}"]
    then += [f"inspect {folder} --sort=-reward"] if list((folder / "rollouts").glob("*.parquet")) else []
    then += [f"compare {folder}/eval/{there[-2]}.json {folder}/eval/{there[-1]}.json"] if there[1:] else []
    display.say(
        f"\nThe run is in {folder}, its report in {build_report(folder)}. Next:\n"
        + "\n".join(f"  algorist {line}" for line in then)
    )


def _headings(names: list[str]) -> tuple[str, str]:
    """Return what the closing table calls two evaluations."""
    first, last = ({"base": "base", "sft": "SFT", "grpo": "GRPO"}[name] for name in names)
    return first, last


def _examples(display: Any, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    """Show three problems whose greedy answer changed, before and after."""
    from rich.panel import Panel
    from rich.text import Text

    from algorist.store.safe_text import printable

    last = {r["problem_id"]: r for r in after if r["greedy"]}
    pairs = [(r, last[r["problem_id"]]) for r in before if r["greedy"] and r["problem_id"] in last]
    pairs.sort(key=lambda pair: pair[1]["correct"] and not pair[0]["correct"], reverse=True)
    for old, new in pairs[:3]:
        lines = [f"{old['question']}  (answer {old['gold']})"]
        for label, row in (("before", old), ("after", new)):
            verdict = "right" if row["correct"] else f"wrong: {row['reason']}"
            lines.append(f"{label} ({verdict}): " + " ⏎ ".join(row["completion"].split("\n")))
        display.console.print(Panel(Text(printable("\n".join(lines)))))


def _quiet_libraries() -> None:
    """Keep the libraries' notes out of the live display; warnings and errors still show."""
    import warnings

    for name in ("transformers", "trl", "datasets", "accelerate", "torch.distributed.elastic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    import os

    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
