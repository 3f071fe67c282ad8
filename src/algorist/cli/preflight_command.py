"""``algorist preflight RECIPE``, before a run; ``algorist preflight RUN`` or ``… RUN/sft/final``, on what SFT has made."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import Overrides, find_model, read_recipe
from algorist.cli.diagnose_command import view_of
from algorist.cli.session import Stopped, import_quietly
from algorist.cli.terminal import Line, Result, TerminalDisplay, View, ask, verb
from algorist.errors import ConfigError
from algorist.store.run_log import duration
from algorist.store.safe_text import one_line

if TYPE_CHECKING:
    from algorist.config.schema import Recipe
    from algorist.preflight import Preflight
    from algorist.runs.pipeline import Run

app = typer.Typer(add_completion=False)
BUSY = 0.8
"""Share of the time with a processor below which others are worth a word."""


class Preflighted(Result):
    """Estimates and checks before training."""

    model: Annotated[str | None, "what was sampled from"]
    batch: Annotated[dict[str, Any], "sft, grpo: steps, what a step takes, passes"]
    prompts: Annotated[dict[str, Any], "lengths in tokens, and the context"]
    golds: Annotated[dict[str, Any], "readable gold answers"]
    leaked: Annotated[str | None, "held-out problems also trained on"]
    sampling: Annotated[dict[str, Any], "pass rate, useful groups, lengths, tags, rewards, completions"]
    sft: Annotated[dict[str, Any] | None, "steps, seconds, memory; tried: measured"]
    grpo: Annotated[dict[str, Any] | None, "the same"]
    evaluations: Annotated[dict[str, Any] | None, "number, problems, completions, seconds"]
    speed: Annotated[dict[str, float], "seconds of each kind of work"]
    stopped: Annotated[bool, "Ctrl-C ended it"]
    memory_limit: Annotated[int, "bytes of the device"]
    planned: Annotated[dict[str, Any], "stage → changes where it cannot fit"]
    tokenization: Annotated[dict[str, Any], "of prompt and tags"]
    audit: Annotated[dict[str, Any], "own reward → findings"]
    extensions: Annotated[dict[str, Any], "name → rows, advice, numbers"]
    advice: Annotated[list[dict[str, Any]], "findings, as those of `algorist diagnose --json`"]
    result: Any
    shown: Mapping[str, str]
    """Rows that are on the screen already."""

    def code(self) -> int:
        return 130 if self.stopped else 0  # as Ctrl-C ends any verb

    def view(self, width: int) -> View:
        yield _table(
            {name: text for name, text in _rows(self.result).items() if self.shown.get(name) != text}
        )
        for shown in self.sampling.get("shown", ()):
            text = one_line(shown["completion"], 400)
            yield Line(f"  {shown['reason']}, gold {one_line(shown['gold'], 40)}: {text}", "dim")
        if not self.advice and self.batch.get("sft"):
            yield "nothing to change that can be known before SFT"
            if self.sampling:
                yield "pass rates and completions above are the model's before SFT; after it: --model RUN/sft/final"
        elif not self.advice and any("fault" in seen for seen in self.audit.values()):
            yield "change the reward first (see above)"
        elif not self.advice and self.sampling.get("judged"):
            yield Line("nothing to change", "bold green")
        elif not self.advice:
            yield "nothing to change that can be known without sampling"
        for finding in self.result.advice:
            yield from view_of(finding)


@verb(app)
def preflight(
    recipe: str,
    overrides: Overrides = None,
    problems: Annotated[int, typer.Option(min=1)] = 24,
    samples: Annotated[int, typer.Option(min=2)] = 8,
    trial: bool = True,
    minutes: Annotated[float, typer.Option(min=0)] = 2.0,
    model: str | None = None,
    as_json: bool = False,
) -> Preflighted:
    """Before GRPO, on this machine: memory and time first, then pass rates, useful groups, variety, tags, advice.

    Args:
        recipe: A shipped recipe, a .yaml file, or a run or checkpoint folder: its recipe and its model.
        problems: Training problems to sample from, at most.
        samples: Completions per problem.
        trial: Also take a few real steps of each stage, where there is time for them.
        minutes: How long sampling and trial may take once the model is loaded; with 0 nothing is sampled.
        model: Sample from this run, checkpoint, adapter, model folder or hub name, after its SFT.

    Example: algorist preflight quickstart · algorist preflight quickstart --model runs/quickstart/sft/final · Next:
    change the lines it advises, then algorist run RECIPE
    """
    loaded, where = _what(recipe, overrides, model)

    from algorist.runs.draft import Draft

    display, shown = TerminalDisplay(stderr=as_json), {}
    draft = Draft.of(loaded, in_folder=False, model=where)
    import_quietly("algorist.preflight", display.say)
    from algorist.preflight import preflight as look
    from algorist.runs.plan import make_plan

    def show(first: Preflight) -> None:
        if not as_json:
            shown.update(_rows(first))
            display.console.print(_table(shown))

    try:
        result = look(
            make_plan(draft, say=display.say),
            problems=problems,
            samples=samples,
            trial=trial,
            model=where,
            minutes=minutes,
            display=display,
            show=show,
        )
    finally:
        display.close()
    return Preflighted(**result.as_dict(), result=result, shown=shown)


def how_long(run: Run, *, may_ask: bool) -> None:
    """Show the expected time of a run that lasts more than an hour, and ask whether to begin; without a terminal it begins.

    Raises:
        Stopped: The user declined.
    """
    from algorist.preflight.run import before_run

    if run.plan.resume or run.processes.count > 1 or (seen := before_run(run)) is None:
        return
    for name, text in _costs(seen).items():
        run.display.say(f"{name}: {text}")
    for finding in seen.advice:
        run.display.say(finding.sentence)
        run.display.say("\n".join(f"  {shlex.quote(line)}" for line in finding.change))
    if may_ask and ask("begin? yes or no", "no").lower() not in ("y", "yes"):
        raise Stopped(f"not begun: {run.folder.path} holds only its settings. Without the question: --yes")


def _what(name: str, overrides: list[str] | None, model: str | None) -> tuple[Recipe, Path | str | None]:
    """Return the recipe and the model to sample from; None is the recipe's own start.

    Raises:
        ConfigError: A model folder of no run, in place of a recipe.
    """
    from algorist.config.load import recipe_names

    folder = Path(name).expanduser()
    if name in recipe_names() or not folder.is_dir():
        return read_recipe(name, overrides), None if model is None else find_model(model)[0]
    start, run = find_model(name)
    if run is None:
        raise ConfigError(
            f"{name} is a folder that belongs to no run, so it has no recipe. Name one: algorist preflight RECIPE --model {name}"
        )
    if model is not None:
        start = find_model(model)[0]
    return read_recipe(str(run), overrides), start


def _rows(seen: Preflight) -> dict[str, str]:
    of_extensions = {name: text for part in seen.extensions.values() for name, text in part["rows"].items()}
    return {**_counts(seen), **_costs(seen), **_sampled(seen), **of_extensions}


def _table(rows: Mapping[str, str]) -> Any:
    from rich.table import Table

    drawn = Table(show_header=False, box=None, pad_edge=False)
    drawn.add_column(min_width=13)
    for name, text in rows.items():
        drawn.add_row(name, re.sub(r"(?<=\d)%", " %", text))
    return drawn


def _counts(seen: Preflight) -> dict[str, str]:
    rows = {}
    if sft := seen.batch.get("sft"):
        rows["SFT"] = (
            f"{sft['steps']} steps of {sft['demonstrations_per_step']} demonstrations, {sft['passes']:g} passes "
            f"over {sft['demonstrations']}"
        )
    if grpo := seen.batch.get("grpo"):
        rows["GRPO"] = (
            f"{grpo['steps']} steps of {grpo['problems_per_step']:g} problems × {grpo['completions_per_problem']} "
            f"completions, {grpo['rollouts']} rollouts, {grpo['passes']:g} passes over {grpo['problems']}"
        )
    p = seen.prompts
    if not p:
        return rows | {"model": "its weights alone do not fit into memory; it was not loaded"}
    rows["prompts"] = (
        f"median {p['p50']}, 90 % ≤ {p['p90']}, longest {p['p100']} tokens, of those held out {p['longest_held_out']}; "
        f"context {p['context']}"
    )
    rows["gold answers"] = f"{seen.golds['readable_share']:.1%} readable"
    for name, audited in seen.audit.items():
        faults = audited.get("fault", ["no fault in what it pays for right and wrong completions"])
        notes = [f"note: {text}" for text in audited.get("note", [])]
        rows[f"reward {name}"] = "; ".join([*faults, *notes])
    if any(seen.audit.values()):
        rows["in full"] = "algorist rewards audit file.py:function"
    return rows


def _sampled(seen: Preflight) -> dict[str, str]:
    s = seen.sampling
    if not s:
        return {}
    low, high = s["pass_rate_interval"]
    enough = s["judged"]
    tags = ", ".join(f"{tag} {share:.0%}" for tag, share in s["tags"].items())
    return {
        "sampled": f"{s['problems']} problem{'s' * (s['problems'] > 1)} × {s['samples']}: pass rate {s['pass_rate']:.1%}"
        + (
            f" [{low:.1%}, {high:.1%}], all right {s['all_right']:.0%}, all wrong {s['all_wrong']:.0%}"
            if enough
            else "; too little to judge, more with --minutes"
        ),
        **(
            {"useful groups": ", ".join(f"G={g} {share:.0%}" for g, share in s["useful_share"].items())}
            if enough
            else {}
        ),
        "completions": f"mean {s['tokens_mean']:.0f} tokens, {s['truncated']:.0%} truncated, "
        f"{s['end_of_turn_as_text']:.0%} show an end-of-turn token, {s['tokens_per_second']:.0f} tokens/s",
        "variety": f"temperature {s['temperature']:g}: {s['distinct']:.0%} of a group's texts differ, "
        f"{s['identical_groups']:.0%} of the groups hold one text only",
        "tags": f"{tags or 'none'} of {s['ended']} that ended; {s['well_formed']:.0%} of all are well formed",
        "rewards": ", ".join(_rewarded(name, row) for name, row in s["rewards"].items()),
        "grading": ", ".join(f"{name} {count}" for name, count in s["reasons"].items()),
    }


def _rewarded(name: str, row: dict[str, Any]) -> str:
    mean = "no value" if row["mean"] is None else f"{row['mean']:.3f}"
    failed = f" ({row['failures']} of {row['completions']} failed)" if row["failures"] else ""
    return f"{name} {mean}{failed}"


def _costs(seen: Preflight) -> dict[str, str]:
    rows = {}
    limit = f" of {seen.memory_limit / 1e9:.1f}" if seen.memory_limit else ""
    for name, part in (("SFT", seen.sft), ("GRPO", seen.grpo)):
        if not part:
            continue
        memory = part["memory"]
        sizes = ", ".join(
            f"{key.replace('_', ' ')} {size / 1e6:.0f}"
            for key, size in memory.items()
            if size and key not in ("allocator", "peak", "measured_peak")
        )
        measured = memory.get("measured_peak")
        tried = f"; measured {measured / 1e9:.2f} GB in the trial" if measured else ""
        of_step = (
            f" (sampling {part['sampling_s']:.3g}, update {part['update_s']:.3g})"
            if "sampling_s" in part
            else ""
        )
        rows[f"{name} time"] = (
            f"{part['seconds_per_step']:.3g} s per step{' in the trial' if measured else of_step}, "
            f"{duration(part['seconds'])} for {part['steps']} steps"
        )
        rows[f"{name} memory"] = f"{memory['peak'] / 1e9:.2f}{limit} GB (MB: {sizes}){tried}"
    if (planned := seen.evaluations) and planned["evaluations"]:
        each = planned["completions"]
        rows["evaluations"] = (
            f"{planned['evaluations']} × {planned['problems']} problems, {each} completion{'s' * (each > 1)} each, "
            f"{duration(planned['seconds'])}"
        )
    if len(seen.times) > 1:
        rows["in all"] = duration(sum(part["seconds"] for part in seen.times.values()))
    if (free := seen.speed.get("free", 1.0)) < BUSY:
        rows["busy machine"] = (
            f"this process has a processor {free:.0%} of the time; the times are those of a free machine, now {1 / free:.1f} times as long"
        )
    return rows
