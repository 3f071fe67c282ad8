"""Expert iteration: sample, keep what is right, SFT on it, again."""

from __future__ import annotations

import glob
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import Overrides, RecipeArgument, read_recipe
from algorist.cli.session import Stopped, command_again, import_quietly
from algorist.cli.terminal import Result, TerminalDisplay, View, render, table, verb
from algorist.errors import ConfigError

if TYPE_CHECKING:
    from algorist.config.schema import Recipe
    from algorist.extensions.iterate.rounds import Iteration

app = typer.Typer(add_completion=False)
DECIDED = ("sft.epochs", "sft.max_steps")


class Iterated(Result):
    """Rounds of expert iteration."""

    start: Annotated[dict[str, Any], "metrics of the first model"]
    rounds: Annotated[list[Any], "per round: number, folder, questions, completions, right, solved, metrics"]
    stopped: Annotated[bool, "whether Ctrl-C ended it"]
    done: Any

    def view(self, width: int) -> View:
        """A line per round: what was sampled and right, and the held-out accuracy of the model."""
        if not self.done.rounds:
            return

        def held_out(metrics: dict[str, Any]) -> list[str]:
            pairs = [(name, metrics.get(name)) for name in ("greedy_accuracy", "format")]
            return [interval.text(name) if interval else "" for name, interval in pairs]

        rows = [("start", "", "", "", *held_out(self.done.start), "")] if self.done.start else []
        for r in self.done.rounds:
            share = f"{r.right} ({100 * r.right / r.completions:.1f} %)"
            solved = f"{r.solved} of {r.questions}"
            rows.append(
                (str(r.number), str(r.completions), share, solved, *held_out(r.metrics), r.folder.name)
            )
        headings = ("round", "completions", "right", "problems solved", "accuracy", "format", "run")
        yield table(headings, rows, "expert iteration; held-out greedy accuracy, 95 % intervals")
        last = self.done.rounds[-1].folder
        yield f"The last model is in {last}, its report in {last / 'report.html'}. {_best(self.done)}Next:"
        yield f"algorist inspect {last}"


@verb(app)
def iterate(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    samples: Annotated[int, typer.Option(min=1)] = 8,
    questions: Annotated[int, typer.Option(min=1)] = 1024,
    epochs: float = 2.0,
    resume: bool = False,
    as_json: bool = False,
) -> Iterated:
    """Expert iteration: sample, keep the right completions, SFT on them, evaluate; again from the model that came out.

    Each round is a run of its own, NAME-round-1, NAME-round-2, …

    Args:
        rounds: How many rounds.
        samples: Completions per problem.
        questions: Training problems of a round, drawn again for each.
        epochs: Passes over the right completions; in place of sft.epochs and sft.max_steps.
        resume: Continue the rounds in the same folders.

    Example: algorist iterate quickstart model.name=runs/first/sft/final run_name=better --rounds 2 · Next: algorist
    inspect runs/better-round-1
    """

    if not epochs > 0:
        raise ConfigError(f"--epochs is {epochs:g}; expected more than 0, usually 2")
    for key in (text.partition("=")[0].strip() for text in overrides or []):
        if key in DECIDED:
            raise ConfigError(f"{key} is decided by --epochs here; give --epochs N instead")
    display, loaded = TerminalDisplay(stderr=as_json), None
    try:
        loaded = read_recipe(recipe, overrides)
        import_quietly("algorist.extensions.iterate.rounds", display.say)
        from algorist.extensions.iterate.rounds import Drawing
        from algorist.extensions.iterate.rounds import iterate as do_rounds

        done = do_rounds(
            loaded, rounds=rounds, drawing=Drawing(samples, questions, epochs), display=display, resume=resume
        )
    except KeyboardInterrupt:
        display.close()
        raise Stopped(_stopped_at_once(loaded)) from None
    result = Iterated(dict(done.start), [asdict(r) for r in done.rounds], done.stopped, done)
    if done.stopped:
        render(result, as_json=as_json)
        raise Stopped(f"stopped; everything is saved. Continue: {command_again(resume=True)}")
    return result


def _stopped_at_once(recipe: Recipe | None) -> str:
    pattern = f"{glob.escape(recipe.run_name or recipe.name)}-round-*/config.yaml" if recipe else ""
    rounds = len(list(Path(recipe.output_dir).glob(pattern))) if recipe else 0
    if not rounds:
        return f"stopped before the first round: nothing was made. Start again: {command_again(resume=False)}"
    return f"stopped in round {rounds}; what was drawn and trained before is kept. Continue: {command_again(resume=True)}"


def _best(done: Iteration) -> str:
    """Name the model that did best where it is not the last one."""
    scores = [
        (metrics["greedy_accuracy"].value, where)
        for metrics, where in [
            (done.start, "the model at the start"),
            *((r.metrics, r.folder) for r in done.rounds),
        ]
        if "greedy_accuracy" in metrics
    ]
    if not scores or scores[-1][0] >= max(value for value, _ in scores):
        return ""
    value, where = max(scores, key=lambda pair: pair[0])
    return (
        f"Held out, {where} was best ({100 * value:.1f} %); where rounds make it worse, lower sft.learning_rate or draw more "
        "(--samples, --questions). "
    )
