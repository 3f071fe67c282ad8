"""Try SFT, GRPO, both, a teacher, tools: which pays more?

``algorist race RECIPE`` gives each route the same processor seconds, a tenth of the run's for all, and compares what they reach.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import Overrides, RecipeArgument, read_recipe
from algorist.cli.session import import_quietly
from algorist.cli.terminal import Line, Result, TerminalDisplay, View, table, verb
from algorist.errors import ConfigError

if TYPE_CHECKING:
    from algorist.extensions.race.pilots import Race

app = typer.Typer(add_completion=False)


class Raced(Result):
    """Route that is ahead, and all of them."""

    ahead: Annotated[str | None, "route"]
    close: Annotated[list[str], "indistinguishable"]
    routes: Annotated[list[dict[str, Any]], "each"]
    seconds: Annotated[dict[str, float], "planned, taken"]
    next: Annotated[str, "command"]
    stopped: bool

    def code(self) -> int:
        return 130 if self.stopped else 0

    def view(self, width: int) -> View:
        if self.stopped:
            yield Line(
                "stopped; the pilots that were finished are kept. Continue: the same command", "bold yellow"
            )
        heads = ("route", "pilot, %", "seconds", "expected pass@1, 90 %", "gap to the first")
        tried = [r for r in self.routes if r["expected"]]
        if tried:
            yield table(heads, [_row(r) for r in sorted(tried, key=lambda r: -r["expected"][0])])
        yield from (f"{r['name']}: not tried, {r['why']}" for r in self.routes if r["why"])
        if self.ahead is None:
            return
        little = f" by a little, and cannot be told from: {', '.join(self.close)}" if self.close else ""
        yield Line(f"\n{self.ahead} is ahead{little}", "bold yellow" if self.close else "bold green")
        yield "a hint: in ten small tasks the choice was right 9 times, SFT alone 10 times (benchmarks/race.py)"
        taken, run = self.seconds["taken"], self.seconds["run"]
        yield f"pilots took {taken:.1f} seconds of the processor; the run is planned to take {run:.0f}. Next:"
        yield self.next


@verb(app)
def race(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    seconds: Annotated[float | None, typer.Option(min=1)] = None,
    as_json: bool = False,
) -> Raced:
    """Short pilots of the routes that a recipe could take (SFT, GRPO, both, with a teacher, without tools): which is ahead?

    Their folder is NAME-race; the same command does those that are not finished, and repeats none. They are sampled on training
    problems that no pilot trains on; the test set is not looked at.

    Args:
        recipe: A shipped recipe or a .yaml file.
        seconds: For all pilots; a tenth of what the run is planned to take when left out.

    Example: algorist race quickstart · Next: the command that it prints
    """
    from algorist.extensions.race.routes import routes_of

    words = list(overrides or [])
    loaded, display = read_recipe(recipe, words), TerminalDisplay(stderr=as_json)
    routes = routes_of(loaded)
    if len(routes) < 2:
        raise ConfigError(
            f"recipe {loaded.name} has one route, {routes[0].name}: a race needs demonstrations (data.sft), a teacher or tools"
        )
    import_quietly("algorist.extensions.race.pilots", display.say)
    from algorist.extensions.race.pilots import Race
    from algorist.store.run_folder import RunFolder

    folder = RunFolder.create(loaded.path.with_name(f"{loaded.path.name}-race"))
    try:
        with folder.lock():
            pilots = Race(folder, loaded, routes, lambda more: read_recipe(recipe, [*words, *more]), display)
            display.say("measuring this machine with this model …")
            pilots.plan(seconds)
            display.say(
                f"{len(routes)} routes: {'; '.join(route.name for route in routes)}. Their pilots take about "
                f"{pilots.budget.seconds:.0f} seconds of the processor together, the run about {pilots.budget.planned:.0f}; "
                f"{folder.path} keeps them"
            )
            stopped = pilots.run()
    finally:
        display.close()
    return _raced(pilots, [recipe, *words], stopped)


def _raced(race: Race, typed: list[str], stopped: bool) -> Raced:
    expected = race.expected() if race.pilots else None
    ahead, rows, budget = expected.ahead if expected else None, [], race.budget
    for route in race.routes:
        steps = route.steps(budget.training, budget.per_step, budget.share)
        keys = [*route.change, *(f"{stage}.max_steps={count}" for stage, count in steps.items())]
        row: dict[str, Any] = {"name": route.name, "keys": keys, "why": race.dropped.get(route.name)}
        row |= dict.fromkeys(("reached", "seconds", "expected", "gap"))
        if expected and ahead and (pilot := race.pilots.get(route.name)):
            last = pilot.levels[route.stages[-1]]
            row |= {"reached": sum(last) / len(last), "seconds": pilot.seconds}
            row["expected"] = expected.interval(route.name)
            row["gap"] = expected.interval(ahead, route.name) if route.name != ahead else None
        rows.append(row)
    taken = sum(pilot.seconds for pilot in race.pilots.values())
    keys = next((row["keys"] for row in rows if row["name"] == ahead), [])
    seconds = {"run": budget.planned, "planned": budget.seconds, "taken": taken}
    close = expected.close() if expected else []
    said = {key.partition("=")[0].replace(".max_steps", ".epochs") for key in keys}  # either says how long
    kept = [word for word in typed if word.partition("=")[0].replace(".max_steps", ".epochs") not in said]
    return Raced(ahead, close, rows, seconds, f"algorist run {shlex.join([*kept, *keys])}", stopped)


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    def text(interval: tuple[float, float, float] | None, form: str) -> str:
        value, low, high = (format(100 * number, form) for number in interval or (0, 0, 0))
        return f"{value} [{low}, {high}]" if interval else ""

    pilot, expected = f"{100 * row['reached']:.1f}", text(row["expected"], ".1f")
    return row["name"], pilot, f"{row['seconds']:.1f}", expected, text(row["gap"], "+.1f")
