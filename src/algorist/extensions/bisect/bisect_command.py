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


class Bisected(Result):
    """The lines that make the difference, and all trials."""

    cause: Annotated[list[str], "lines: value → other"]
    sure: Annotated[bool, "fewer do not do"]
    change: Annotated[list[str], "key=value"]
    trials: Annotated[list[dict[str, Any]], "lines, keys, better, held_out, rollouts, seconds, why"]
    stopped: bool
    next: Annotated[str, "command"]
    tried: Any

    def code(self) -> int:
        return 130 if self.stopped else 0

    def view(self, width: int) -> View:
        rows = [
            ("yes" if t.size else "no", t.text(), f"{t.seconds:.0f}", ", ".join(s.short for s in t.suspects))
            for t in self.tried
        ]
        if rows:
            yield "Each trial against the run, in points (95 %):"
            yield table(("better", "difference", "s", "changed"), rows)
        if self.stopped:
            yield Line("stopped; finished trials are kept. Continue: the same command", "bold yellow")
        if self.cause and self.sure:
            yield Line(f"\nthe cause: {' · '.join(self.cause)}", "bold green")
            if not self.change:
                yield "It learns from half of the held-out problems, and not from the training problems: look at these."
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
    trials: Annotated[int, typer.Option(min=1)] = 16,
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
    best, trials = bisection.best(), bisection.trials
    cause = best.suspects if best else ()
    rows = [
        {
            "lines": [s.text() for s in t.suspects],
            "keys": [s.short for s in t.suspects],
            "better": t.size > 0,
            "held_out": t.held_out and [t.held_out.value, t.held_out.low, t.held_out.high],
            "rollouts": t.rollouts and t.rollouts[0],
            "seconds": t.seconds,
            "why": t.why,
        }
        for t in trials
    ]
    change = bisection.words(cause)
    words = [str(bisection.run / "config.yaml"), *change, f"run_name={bisection.run.name}-changed"]
    following = f"algorist run {shlex.join(words)}" if change else f"algorist inspect {bisection.run} --wrong"
    sure = bool(bisection.cause)
    return Bisected([s.text() for s in cause], sure, change, rows, bisection.stopped, following, tried=trials)
