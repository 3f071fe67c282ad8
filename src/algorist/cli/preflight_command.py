"""``algorist preflight RECIPE``, before a run; ``algorist preflight RUN`` or ``… RUN/sft/final``, on what SFT has made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import Overrides, find_model, read_recipe
from algorist.cli.diagnose_command import view_of
from algorist.cli.session import import_quietly
from algorist.cli.terminal import Line, Result, View, console, verb
from algorist.errors import ConfigError
from algorist.store.run_log import clock
from algorist.store.safe_text import one_line

if TYPE_CHECKING:
    from algorist.config.schema import Recipe
    from algorist.preflight import Preflight

app = typer.Typer(add_completion=False)


class Preflighted(Result):
    """What can be known before training."""

    model: Annotated[str | None, "what was sampled from"]
    batch: Annotated[dict[str, Any], "sft, grpo: steps, what a step takes, passes"]
    prompts: Annotated[dict[str, Any], "lengths in tokens, and the context"]
    golds: Annotated[dict[str, Any], "whether the grader can read the gold answers"]
    leaked: Annotated[str | None, "how many held-out problems are also trained on"]
    sampling: Annotated[dict[str, Any], "pass rate, useful groups, lengths, tags, rewards, completions"]
    sft: Annotated[dict[str, Any] | None, "trial steps: seconds, memory"]
    grpo: Annotated[dict[str, Any] | None, "trial steps: seconds, memory"]
    evaluations: Annotated[dict[str, Any] | None, "how many, problems, completions of each, seconds in all"]
    memory_limit: Annotated[int, "bytes of the device"]
    planned: Annotated[dict[str, Any], "stage → what to change where it cannot fit; it is not tried"]
    tokenization: Annotated[dict[str, Any], "what the tokenizer does to prompt and tags"]
    extensions: Annotated[dict[str, Any], "name → rows of the table, advice, numbers"]
    advice: Annotated[list[dict[str, Any]], "findings, as those of `algorist diagnose --json`"]
    result: Any

    def view(self, width: int) -> View:
        from rich.table import Table

        rows = Table(show_header=False, box=None, pad_edge=False)
        of_extensions = {
            name: text for part in self.extensions.values() for name, text in part["rows"].items()
        }
        for row in {
            **_counts(self.result),
            **_sampled(self.result),
            **of_extensions,
            **_costs(self.result),
            **_evaluations(self.evaluations),
        }.items():
            rows.add_row(*row)
        yield rows
        for shown in self.sampling.get("shown", ()):
            text = one_line(shown["completion"], 400)
            yield Line(f"  {shown['reason']}, gold {one_line(shown['gold'], 40)}: {text}", "dim")
        if not self.advice and self.batch.get("sft"):
            yield "nothing to change that can be known before SFT"
            if self.sampling:
                yield "pass rates and completions above are the model's before SFT; after it: --model RUN/sft/final"
        elif not self.advice:
            yield Line("nothing to change", "bold green")
        for finding in self.result.advice:
            yield from view_of(finding)


@verb(app)
def preflight(
    recipe: str,
    overrides: Overrides = None,
    problems: Annotated[int, typer.Option(min=1)] = 24,
    samples: Annotated[int, typer.Option(min=2)] = 8,
    trial: bool = True,
    minutes: Annotated[float, typer.Option(min=0)] = 1.0,
    model: str | None = None,
    as_json: bool = False,
) -> Preflighted:
    """Before GRPO, on this machine: batch arithmetic, prompts, pass rates, useful groups, variety, tags, memory, time, advice.

    Args:
        recipe: A shipped recipe, a .yaml file, or a run or checkpoint folder: its recipe and its model.
        problems: Training problems to sample from.
        samples: Completions per problem.
        trial: Also take a few real steps of each stage.
        minutes: About how long it may take once the model is loaded.
        model: Sample from this run, checkpoint, adapter, model folder or hub name, after its SFT.

    Example: algorist preflight quickstart · algorist preflight quickstart --model runs/quickstart/sft/final · Next:
    change the lines it advises, then algorist run RECIPE
    """
    loaded, where = _what(recipe, overrides, model)

    screen = console(stderr=as_json)
    import_quietly("algorist.preflight", screen.say)
    from algorist.preflight import preflight as look

    result = look(
        loaded,
        problems=problems,
        samples=samples,
        trial=trial,
        model=where,
        minutes=minutes,
        say=lambda text: screen.print(f"{text} …", style="dim"),
    )
    return Preflighted(**result.as_dict(), result=result)


def _what(name: str, overrides: list[str] | None, model: str | None) -> tuple[Recipe, Path | str | None]:
    """Return the recipe and the model to sample from; None is the recipe's own start.

    Raises:
        ConfigError: A model folder that belongs to no run stands where a recipe should.
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
    return read_recipe(str(run / "config.yaml"), overrides), start


def _evaluations(planned: dict[str, Any] | None) -> dict[str, str]:
    if not planned or not planned["evaluations"]:
        return {}
    each = planned["completions"]
    return {
        "evaluations": f"{planned['evaluations']} of {planned['problems']} problems, {each} completion{'s' * (each > 1)} each, about "
        f"{clock(planned['seconds'])} in all"
    }


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
        f"median {p['p50']}, 90 % ≤ {p['p90']}, longest {p['p100']} tokens; context {p['context']}"
    )
    rows["gold answers"] = f"{seen.golds['readable_share']:.1%} readable"
    return rows


def _sampled(seen: Preflight) -> dict[str, str]:
    s = seen.sampling
    if not s:
        return {}
    tags = ", ".join(f"{tag} {share:.0%}" for tag, share in s["tags"].items())
    return {
        "sampled": f"{s['problems']} problems × {s['samples']}: pass rate {s['pass_rate']:.1%}, all right "
        f"{s['all_right']:.0%}, all wrong {s['all_wrong']:.0%}",
        "useful groups": ", ".join(f"G={g} {share:.0%}" for g, share in s["useful_share"].items()),
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
    for name, tried in (("SFT", seen.sft), ("GRPO", seen.grpo)):
        if not tried:
            continue
        memory = tried["memory"]
        parts = ", ".join(
            f"{part.replace('_', ' ')} {size / 1e6:.0f}"
            for part, size in memory.items()
            if size and part not in ("allocator", "peak", "measured_peak")
        )
        minutes, seconds = divmod(int(tried["seconds"]), 60)
        rows[f"{name} time"] = f"{tried['seconds_per_step']:.3g} s per step, {minutes}:{seconds:02d} in all"
        rows[f"{name} memory"] = (
            f"planned {memory['peak'] / 1e9:.2f}{limit} GB (MB: {parts}); measured in the trial "
            f"{memory['measured_peak'] / 1e9:.2f} GB"
        )
    return rows
