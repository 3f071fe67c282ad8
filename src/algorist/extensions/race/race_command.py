"""Before a long run: which route pays, SFT, GRPO, both, a teacher, tools; by short pilots.

``algorist race RECIPE`` gives each route the same processor seconds, a tenth of the run's for all, and compares what they reach.
"""

from __future__ import annotations

import shlex
from pathlib import Path
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
    """Which route is ahead."""

    ahead: Annotated[str | None, "route"]
    close: Annotated[list[str], "indistinguishable"]
    routes: Annotated[list[dict[str, Any]], "each"]
    seconds: Annotated[dict[str, float], "planned, taken"]
    next: Annotated[str, "command"]
    folder: str
    stopped: bool

    def code(self) -> int:
        return 130 if self.stopped else 0

    def view(self, width: int) -> View:
        if self.stopped:
            yield Line(f"stopped; {self.folder} keeps the pilots that were finished. Go on: the same command", "bold yellow")
        rows = [
            (r["name"], _share(r["reached"]), f"{r['seconds']:.1f}", _text(r["expected"]), _text(r["behind"], signed=True))
            for r in self.routes if r["expected"]
        ]  # fmt: skip
        if rows:
            heads = ("route", "pilot", "seconds", "expected pass@1, 90 %", "behind, points")
            yield table(heads, sorted(rows, key=lambda row: row[0] != self.ahead))
        yield from (f"{r['name']}: not tried, {r['why']}" for r in self.routes if r["why"])
        if self.ahead is None:
            return
        if self.close:
            yield Line(f"\nahead by a little: {self.ahead}; from it cannot be told: {', '.join(self.close)}", "bold yellow")
        else:
            yield Line(f"\nahead: {self.ahead}", "bold green")
        yield (
            f"{self.seconds['taken']:.0f} seconds of the processor for pilots, {self.seconds['taken'] / self.seconds['run']:.0%} of "
            f"what the run is planned to take. Take it:\n{self.next}"
        )


@verb(app)
def race(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    seconds: Annotated[float | None, typer.Option(min=1)] = None,
    as_json: bool = False,
) -> Raced:
    """Short pilots of the routes that a recipe could take (SFT, GRPO, both, with a teacher, without tools): which is ahead?

    The pilots are runs in NAME-race; the same command goes on with those that are not finished, and repeats none. They are evaluated on
    training problems that they do not train on; the test set is not looked at.

    Args:
        recipe: A shipped recipe or a .yaml file.
        seconds: For all pilots; a tenth of what the run is planned to take when left out.

    Example: algorist race quickstart · Next: the command that it prints
    """
    words = list(overrides or [])
    loaded = read_recipe(recipe, words)
    display = TerminalDisplay(stderr=as_json)
    from algorist.extensions.race.routes import routes_of

    routes = routes_of(loaded)
    if len(routes) < 2:
        raise ConfigError(
            f"recipe {loaded.name} has one route, {routes[0].name}: a race needs demonstrations (data.sft), a teacher (grpo.teacher) "
            "or tools"
        )
    import_quietly("algorist.extensions.race.pilots", display.say)
    from algorist.extensions.race.pilots import Race
    from algorist.store.run_folder import RunFolder

    try:
        folder = RunFolder.create(loaded.path.with_name(f"{loaded.path.name}-race"))
        with folder.lock():
            pilots = Race(folder, loaded, routes, lambda change: read_recipe(recipe, [*words, *change]), display)
            display.say("measuring this machine with this model …")
            pilots.plan(seconds)
            display.say(
                f"{len(routes)} routes: {'; '.join(route.name for route in routes)}. Their pilots take about {pilots.budget.seconds:.0f} "
                f"seconds of the processor together, the run about {pilots.budget.planned:.0f}; {folder.path} keeps them"
            )
            stopped = pilots.run()
    finally:
        display.close()
    return _raced(pilots, shlex.join([recipe, *words]), stopped)


def _raced(race: Race, typed: str, stopped: bool) -> Raced:
    budget, rows = race.budget, []
    expected = race.expected() if race.pilots else None
    ahead = expected.ahead if expected else None
    for route in race.routes:
        pilot = race.pilots.get(route.name)
        steps = route.steps(budget.training, budget.per_step, budget.share)
        keys = [*route.change, *(f"{stage}.max_steps={count}" for stage, count in steps.items())]
        row: dict[str, Any] = {"name": route.name, "keys": keys, "why": race.dropped.get(route.name)}
        row |= {"reached": None, "seconds": None, "expected": None, "behind": None}
        if pilot and expected and ahead:
            last = pilot.levels[route.stages[-1]]
            row |= {"reached": sum(last) / len(last), "seconds": pilot.seconds, "expected": expected.interval(route.name)}
            row["behind"] = expected.interval(ahead, route.name) if route.name != ahead else None
        rows.append(row)
    taken = sum(pilot.seconds for pilot in [*race.pilots.values(), *filter(None, [race.teacher])])
    keys = next((row["keys"] for row in rows if row["name"] == ahead), [])
    seconds = {"run": budget.planned, "planned": budget.seconds, "taken": taken}
    close = expected.close() if expected else []
    return Raced(ahead, close, rows, seconds, f"algorist run {typed} {shlex.join(keys)}", str(race.folder.path), stopped)


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _text(interval: tuple[float, float, float] | None, *, signed: bool = False) -> str:
    if interval is None:
        return ""
    value, low, high = (100 * number for number in interval)
    sign = "+" if signed else ""
    return f"{value:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"
