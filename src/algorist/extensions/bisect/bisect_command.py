"""Find the line of its recipe that makes a run fail, by trials."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import read_recipe
from algorist.cli.session import Stopped, import_quietly
from algorist.cli.terminal import Line, Result, TerminalDisplay, View, table, verb

if TYPE_CHECKING:
    from algorist.extensions.bisect.trials import Bisection

app = typer.Typer(add_completion=False)
OF_DATA = {
    (
        "data.train",
    ): "It learns from half of the held-out problems and solves the other half: look at the training problems.",
    (
        "data.eval",
    ): "It solves training problems that it did not see, and not the held-out ones: look at data.eval.",
    (
        "data.eval",
        "data.train",
    ): "What solves training problems does not solve held-out ones, and the reverse: they are of two kinds.",
}
"""Single lines of data that made a trial better → what that says."""


class Bisected(Result):
    """The lines that make the difference, and all trials."""

    cause: Annotated[list[str], "lines: value → other"]
    sure: Annotated[bool, "whether fewer lines were tried"]
    change: Annotated[list[str], "key=value"]
    trials: Annotated[list[dict[str, Any]], "lines, better, rollouts, evaluation, seconds, why"]
    stopped: bool
    next: Annotated[str, "command"]

    def code(self) -> int:
        return 130 if self.stopped else 0

    def view(self, width: int) -> View:
        rows = [
            (
                "yes" if t["better"] else "not tried" if t["why"] else "no",
                _points(t["rollouts"]), _points(t["evaluation"]), f"{t['seconds']:.0f}", ", ".join(t["keys"]),
            )
            for t in self.trials
        ]  # fmt: skip
        if rows:
            yield "Each trial against the run: points, with 95 % intervals"
            yield table(("better", "rollouts", "evaluation", "s", "changed"), rows)
        yield from dict.fromkeys(t["why"] for t in self.trials if t["why"])
        if self.stopped:
            yield Line("stopped; finished trials are kept. Continue: the same command", "bold yellow")
        if self.cause and self.sure:
            yield Line(f"\nthe cause: {' · '.join(self.cause)}", "bold green")
            better = {t["keys"][0] for t in self.trials if t["better"] and len(t["keys"]) == 1}
            if data := OF_DATA.get(tuple(sorted(better & {"data.train", "data.eval"}))):
                yield data
            yield "Next:"
        elif self.cause:
            yield Line(f"\none of these, or several: {' · '.join(self.cause)}", "bold yellow")
            yield "More trials tell: --trials N. Next:"
        elif not self.stopped:
            yield Line("\nno trial ended better", "bold yellow")
            yield "What remains: the model, the demonstrations, the grader. Next:"
        yield self.next


@verb(app)
def bisect(
    run: Path,
    like: Annotated[str | None, typer.Option(metavar="RECIPE|RUN")] = None,
    trials: Annotated[int, typer.Option(min=1)] = 12,
    as_json: bool = False,
) -> Bisected:
    """Repeat a run with some lines of its recipe changed, then fewer: which line makes it fail?

    Args:
        run: A finished run. Trials lie in RUN-bisect, and none is repeated.
        like: One that works: what differs is tried. When left out, lines are set to what does nothing.
        trials: At most; each takes as long as the run.

    Example: algorist bisect runs/first --like quickstart · Next: the command that it prints
    """
    display = TerminalDisplay(stderr=as_json)
    import_quietly("algorist.extensions.bisect.trials", display.say)
    from algorist.config.load import load_run_recipe
    from algorist.extensions.bisect.trials import Bisection
    from algorist.store.run_folder import RunFolder

    RunFolder.open(run)
    folder = run.with_name(f"{run.name}-bisect")
    good = None
    if like is not None:
        good = (
            load_run_recipe(Path(like), runs="all")
            if Path(like, "config.yaml").is_file()
            else read_recipe(like, [])
        )
    folder.mkdir(parents=True, exist_ok=True)
    bisection = Bisection(run, folder, trials, display, good)
    try:
        bisection.search()
    except KeyboardInterrupt:
        raise Stopped("stopped; finished trials are kept. Continue: the same command") from None
    finally:
        display.close()
    return _result(bisection)


def _result(bisection: Bisection) -> Bisected:
    from algorist.config.yaml_text import one_line_yaml

    sure = bool(bisection.cause)
    best = bisection.trial_of(bisection.cause) if sure else bisection.best()
    cause = best.suspects if best else ()
    rows = [
        {
            "lines": [s.text() for s in t.suspects],
            "keys": [s.short for s in t.suspects],
            "better": t.better,
            "rollouts": _interval(t.gain.rollouts if t.gain else None),
            "evaluation": _interval(t.gain.evaluation if t.gain else None),
            "seconds": t.seconds,
            "why": t.why,
        }
        for t in bisection.trials
    ]
    change = [f"{s.key}={one_line_yaml(s.other)}" for s in cause if not s.key.startswith("rewards.")]
    if len(change) < len(cause):
        changed = bisection.recipe_with(cause).rewards
        rewards = [reward.model_dump(mode="json", exclude_defaults=True) for reward in changed]
        change.append(f"rewards={one_line_yaml(rewards)}")
    words = [str(bisection.run / "config.yaml"), *change, f"run_name={bisection.run.name}-changed"]
    following = f"algorist run {shlex.join(words)}"
    if not cause or any(s.key.startswith("data.") and isinstance(s.now, dict) for s in cause):
        following = (
            f"algorist inspect {bisection.run} --wrong"  # a trial's problems are no problems to train on
        )
    return Bisected([s.text() for s in cause], sure, change, rows, bisection.stopped, following)


def _interval(pair: tuple[float, float] | None) -> list[float] | None:
    return [pair[0], pair[0] - 1.96 * pair[1], pair[0] + 1.96 * pair[1]] if pair else None


def _points(interval: list[float] | None) -> str:
    value, low, high = (f"{100 * number:+.1f}" for number in interval or (0, 0, 0))
    return f"{value} [{low}, {high}]" if interval else ""
