"""``algorist run RECIPE [key=value …]``: a whole run or one stage of it, in this process or in several."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import Overrides, RecipeArgument, Resume, read_recipe, stage_alone
from algorist.cli.session import (
    CONFIGS,
    Stopped,
    command_again,
    import_quietly,
    launch,
    stopped_at_once,
    work,
)
from algorist.cli.terminal import (
    Line,
    Result,
    TerminalDisplay,
    View,
    closing_table,
    compact,
    note,
    render,
    verb,
)
from algorist.errors import ConfigError, check_known
from algorist.store.safe_text import one_line
from algorist.store.stages import STAGES

if TYPE_CHECKING:
    from algorist.config.schema import Recipe
    from algorist.runs.outcome import Outcome

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
    samples: Sequence[Any] = ()
    """Of the last two evaluations."""
    lines: Sequence[str] = ()

    @classmethod
    def of(cls, outcome: Outcome) -> Ran:
        """Make the result that the terminal shows of an outcome."""
        artifacts = outcome.artifacts
        return cls(
            run=str(outcome.folder),
            report=str(outcome.report),
            evaluations={name: artifact.metrics for name, artifact in artifacts.items()},
            differences=outcome.differences,
            next=outcome.next,
            samples=[artifact.samples for artifact in artifacts.values()][-2:],
        )

    def view(self, width: int) -> View:
        yield from self.lines
        if self.differences:
            names = [_HEADINGS[name] for name in list(self.evaluations)[-2:]]
            before, after = list(self.evaluations.values())[-2:]
            yield closing_table(width, before, after, self.differences, names)
            yield from _examples(self.samples[0], self.samples[1], names)
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
    seeds: Annotated[str | None, typer.Option(metavar="N|until-sure=M")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y")] = False,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
    as_json: bool = False,
) -> Ran | Result | int | None:
    """Run a recipe: data → model → SFT → evaluation → GRPO → evaluation → closing table.

    Batch sizes in a recipe are per process.

    Args:
        only: Only this stage; grpo starts from the finished SFT stage with --resume, else from the recipe's model.
        processes: Several processes, through accelerate; words after -- are its flags.
        seeds: Run it with N seeds, seed … seed + N - 1: mean, spread, one page; or until the gain is proven, M at most.
        yes: Begin without a question what takes more than an hour; where no terminal is, nothing is asked.

    Example: algorist run quickstart · algorist run quickstart --only sft run_name=first · algorist run -n 2 smoke-cpu
    grpo.batch_size=8 · Next: algorist solve 'Sam has 17 coins. Sam loses 2. Sam gives 2 to Lea. How many coins does
    Sam have now?'
    """
    words = list(overrides or [])
    if only is None and not resume and (only := stage_alone(recipe, words)):
        note(
            f"{recipe} was made with --only {only}, so this run is, too; otherwise set sft.enabled and grpo.enabled"
        )
    stages = STAGES if only is None else (only,)
    for stage in stages:
        check_known(stage, STAGES, f"--only {stage} is no stage", "Expected: --only sft or --only grpo")
    split = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    settings, flags = words[:split], words[split:]
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
        return launch(recipe, settings, flags, processes, config or "ddp", own, stages)
    if seeds is not None:
        return _run_seeds(recipe, settings, resume, stages, seeds, as_json, yes)
    return run_stages(recipe, settings, resume, stages, as_json, yes)


def _run_seeds(
    name: str,
    settings: list[str],
    resume: bool,
    stages: tuple[str, ...],
    seeds: str,
    as_json: bool,
    yes: bool,
) -> Ran:
    """Run a recipe once per seed and say mean and spread; with ``resume``, finished seeds are not repeated."""
    from algorist.config.own_files import inputs_of
    from algorist.report.seeds import (
        line_of_proof,
        lines_of_seeds,
        proof,
        read_seeds,
        recipes_of_seeds,
        summarise_seeds,
    )
    from algorist.runs.begin import settings_at_start

    count, until_sure = read_seeds(seeds)
    loaded = read_recipe(name, settings)
    recipes, display = recipes_of_seeds(loaded, count), TerminalDisplay(stderr=as_json)
    known = [resume and (r.path / "config.yaml").is_file() for r in recipes]
    for recipe, continues in zip(recipes, known, strict=True):
        settings_at_start(
            recipe, inputs_of(recipe), resume=continues
        )  # before the first seed has taken its hours
    for number, (recipe, continues) in enumerate(zip(recipes, known, strict=True), start=1):
        display.say(f"seed {recipe.seed} ({number} of {count})")
        done = _run(recipe, display, continues, stages, may_ask=not (yes or as_json) and number == 1)
        if done is not None and not as_json:
            render(done, as_json=False)
        if until_sure:
            seen = proof([r.path for r in recipes[:number]], count)
            display.say(line_of_proof(seen, number, count))
            if seen["sure"]:
                recipes = recipes[:number]
                break
    summary = summarise_seeds(loaded, [recipe.path for recipe in recipes], most=count if until_sure else None)
    place = loaded.path
    files = f"{place}-seeds.json{f' and {place}-seeds.html' if len(recipes) > 1 else ''}"
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
        run = loaded.path
        folder = run if resume or not (run / "config.yaml").is_file() else None  # else it will be refused
        return _run(loaded, display, resume, stages, may_ask=not (yes or as_json))
    except KeyboardInterrupt:
        display.close()
        raise Stopped(stopped_at_once(folder)) from None


def _run(
    loaded: Recipe, display: TerminalDisplay, resume: bool, stages: tuple[str, ...], *, may_ask: bool
) -> Ran | None:
    from algorist.cli.preflight_command import how_long
    from algorist.runs.draft import Draft, check_stages

    check_stages(loaded, stages)
    draft = Draft.of(loaded, stages=stages, resume=resume)  # a mistake is said before torch is imported
    import_quietly("algorist.training.grpo_setup", display.say)
    from algorist.runs.outcome import Outcome
    from algorist.runs.pipeline import run_draft

    def begins(run: Any) -> None:
        run.times.add("starting", run.times.began - draft.took.began)
        how_long(run, may_ask=may_ask and sys.stdin.isatty())

    done = run_draft(draft, display=display, begins=begins)
    if not done.processes.main:
        return None
    if done.stopped:
        raise Stopped(
            f"stopped; everything is saved in {done.folder.path}. Continue: {command_again(resume=True)}"
        )
    return Ran.of(Outcome.of(done))


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
            yield Line(f"{name} ({verdict}): {one_line(compact(row['completion']), 300)}")
