"""Before GRPO: the gain to expect, with its interval; does it pay?

``algorist forecast RECIPE``; ``algorist forecast RUN``, from what its SFT has made; ``… --add FILE``, a finished run as a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import Overrides, find_model, read_recipe
from algorist.cli.session import import_quietly
from algorist.cli.terminal import Line, Result, TerminalDisplay, View, verb
from algorist.errors import DataError
from algorist.store.run_log import duration

if TYPE_CHECKING:
    from algorist.config.schema import Recipe

app = typer.Typer(add_completion=False)
FAR_FROM = 10
"""Times the largest model of the table beyond which its errors say nothing."""


class ForecastResult(Result):
    """Gain to expect of GRPO, and what to do."""

    verdict: Annotated[str, "train, SFT first, a teacher pays more, do not train this"]
    why: Annotated[str, "the reason"]
    gain: Annotated[dict[str, float], "of pass@1: value, low, high (90 %), loss (probability), plateau"]
    time: Annotated[dict[str, float], "seconds, step of nine tenths"]
    measured: Annotated[dict[str, Any], "row of the table"]
    errors: Annotated[dict[str, Any], "on sealed runs"]
    similar: Annotated[list[dict[str, Any]], "finished runs"]
    remarks: Annotated[list[str], "limits"]
    happened: Annotated[list[float] | None, "with --add: gain, low, high"]

    def view(self, width: int) -> View:
        from rich.table import Table

        drawn = Table(show_header=False, box=None, pad_edge=False)
        drawn.add_column(min_width=13)
        for row in _rows(self):
            drawn.add_row(*row)
        yield drawn
        yield Line(
            f"\n{self.verdict}: {self.why}", "bold green" if self.verdict == "train" else "bold yellow"
        )
        yield from self.remarks


@verb(app)
def forecast(
    recipe: str,
    overrides: Overrides = None,
    model: str | None = None,
    problems: Annotated[int, typer.Option(min=4)] = 48,
    samples: Annotated[int, typer.Option(min=2)] = 8,
    minutes: Annotated[float, typer.Option(min=0.1)] = 4.0,
    table: Path | None = None,
    add: Path | None = None,
    as_json: bool = False,
) -> ForecastResult:
    """Before GRPO: the gain to expect on held-out problems, its 90 % interval, hours, plateau, and whether to train at all.

    Args:
        recipe: A shipped recipe, a .yaml file, or a run's folder: its recipe, from what its SFT has made.
        model: Start from this run, checkpoint, model folder or hub name.
        problems: Held-out problems to sample, at most.
        samples: Completions of each.
        minutes: How long sampling and trial may take once the model is loaded, about.
        table: Further finished runs to learn from: rows that --add wrote.
        add: Append the run, which is finished, with its gain as a row to this table (JSONL).

    Example: algorist forecast quickstart --model runs/quickstart/sft/final · Next: algorist run quickstart · Which route
    is ahead, SFT, GRPO, both, a teacher: algorist race quickstart
    """
    loaded, start = _what(recipe, overrides, model)
    display = TerminalDisplay(stderr=as_json)
    from algorist.runs.draft import Draft

    draft = Draft.of(loaded, in_folder=False, model=start)
    import_quietly("algorist.preflight", display.say)
    from algorist.extensions.forecast.measure import measure
    from algorist.extensions.forecast.table import read_table, row_of
    from algorist.runs.plan import make_plan

    run = Path(recipe).expanduser()
    if add is not None and not (run / "result.json").is_file():
        raise DataError(
            f"{recipe} is no finished run: there is no {run / 'result.json'}; --add takes a run's folder"
        )
    try:
        before = measure(
            make_plan(draft, say=display.say),
            model=start,
            problems=problems,
            samples=samples,
            minutes=minutes,
            say=display.say,
        )
    finally:
        display.close()
    happened = None
    if add is not None:
        row = row_of(run.resolve().name, before, run)
        happened = row["gain"]
        with add.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    sft = loaded.sft.enabled and start is None
    rows = read_table() + (read_table(table) if table else [])
    return _forecast(before.as_dict(), rows, happened, sft=sft)


def _what(name: str, overrides: list[str] | None, model: str | None) -> tuple[Recipe, Path | str | None]:
    """Return the recipe and the model that its GRPO starts from; None is the recipe's."""
    folder = Path(name).expanduser()
    start = None if model is None else find_model(model)[0]
    if not (folder / "config.yaml").is_file():
        return read_recipe(name, overrides), start
    made = folder / "sft" / "final"
    return read_recipe(str(folder / "config.yaml"), overrides), start or (made if made.is_dir() else None)


def _forecast(
    row: dict[str, Any], table: list[dict[str, Any]], happened: list[float] | None, *, sft: bool
) -> ForecastResult:
    from algorist.extensions.forecast.fit import Fitted
    from algorist.extensions.forecast.verdict import LONG, SFT, errors_of, nearest, steps_to_most, verdict

    fitted = Fitted(table)
    gain = fitted.forecast(row)
    word, why = verdict(row, gain)
    remarks = []
    if sft:
        word, why = SFT, f"this is the model before the recipe's SFT; after it: algorist forecast RUN ({why})"
    if row["parameters"] > FAR_FROM * max(one["parameters"] for one in table):
        remarks.append(
            f"no finished run of the table has a model of this size ({row['parameters'] / 1e6:.0f} M parameters): interval and errors "
            "are those of smaller ones; your own runs teach it: algorist forecast RUN --add FILE, then --table FILE"
        )
    like = [{key: one[key] for key in ("name", "start", "gain")} for one in nearest(table, row)]
    return ForecastResult(
        word,
        why,
        {**asdict(gain), "plateau": fitted.forecast(row, LONG).value},
        {"seconds": row["steps"] * row["seconds_per_step"], "most_after": steps_to_most(row)},
        row,
        asdict(errors_of(table)),
        like,
        remarks,
        happened,
    )


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _rows(f: ForecastResult) -> Iterator[tuple[str, str]]:
    from algorist.diagnosis.rule import Share
    from algorist.evaluation.estimators import share_interval
    from algorist.extensions.forecast.fit import pass_rates

    m, errors = f.measured, f.errors
    once = share_interval([count / m["samples"] for count in m["right"]])
    yield (
        "before",
        f"{len(m['right'])} held-out problems × {m['samples']}: pass@1 {once.text()}, pass@{m['samples']} "
        f"{100 * pass_rates(m)[1]:.1f} %; {Share(m['unread'])} unreadable, {Share(m['truncated'])} cut off",
    )
    yield (
        "trial",
        f"{m['tried']} of {m['steps']} steps: {Share(m['useful'])} of the groups useful; correlation of advantage and correctness "
        f"{m['agree']:.2f}; pass@1 {_points(m['shift'])} points by importance weights; drift {m['drift'] / m['tokens']:.3f} nats a token",
    )
    value, low, high = (_points(f.gain[key]) for key in ("value", "low", "high"))
    yield (
        "expected gain",
        f"{value} points [{low}, {high}] of pass@1 in {m['steps']} steps (90 %); losing a point: {Share(f.gain['loss'])}",
    )
    yield "plateau", f"about {_points(f.gain['plateau'])} points"
    yield (
        "time",
        f"{duration(f.time['seconds'])} for all steps; nine tenths of the gain after step {f.time['most_after']}",
    )
    if f.happened:
        value, low, high = map(_points, f.happened)
        yield "happened", f"{value} points [{low}, {high}] (95 %); added to the table"
    for place, one in enumerate(f.similar):
        value, low, high = map(_points, one["gain"])
        text = f"{one['name']}: from {Share(one['start'])} by {value} points [{low}, {high}]"
        yield "" if place else "similar runs", text
    yield (
        "errors",
        f"fitted to {errors['fitted']} runs, on {errors['sealed']} sealed: {Share(errors['covered'])} of the intervals held, "
        f"off by {100 * errors['off']:.1f} points (median); warned of {errors['warned']} of {errors['lost']} that lost, "
        f"of {errors['alarms']} of {errors['healthy']} that gained",
    )
