"""``algorist rewards list | explain``."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any

import typer

from algorist.cli.arguments import AsJson, Overrides, read_pairs
from algorist.cli.quiet import without_warnings
from algorist.cli.terminal import listing, say
from algorist.errors import ConfigError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="List the rewards; explain the reward of a completion.",
    epilog="Example: algorist rewards explain --completion '<answer>7</answer>' --answer 7",
)


@app.command("list", epilog="Example: algorist rewards list · Next: algorist rewards explain --help")
def list_rewards(as_json: AsJson = False) -> None:
    """List the registered rewards with their range; another name of a reward stands beside it."""
    from algorist.rewards import REWARDS

    names: dict[Any, list[str]] = {}
    for name in REWARDS:
        names.setdefault(REWARDS.get(name).function, []).append(name)
    rows = [
        {
            "reward": ", ".join(same),
            "range": f"{REWARDS.get(same[0]).low:g} … {REWARDS.get(same[0]).high:g}",
            "what it pays": (inspect.getdoc(function) or "").partition("\n")[0].replace("``", ""),
        }
        for function, same in names.items()
    ]
    listing(rows, as_json)


@app.command(
    "explain",
    epilog="Example: algorist rewards explain --completion '<answer>7</answer>' --answer 7 --recipe quickstart "
    "'rewards=[ correct, {name: \"my_rewards.py:brevity\", weight: 0.1}]'",  # rich takes [c for markup
)
def explain(
    completion: Annotated[str, typer.Option(help="The completion.")],
    answer: Annotated[str, typer.Option(help="The gold answer.")],
    overrides: Overrides = None,
    recipe: Annotated[
        str,
        typer.Option(
            help="The recipe (a shipped one or a .yaml file) whose rewards, prompt format and matcher are used."
        ),
    ] = "quickstart",
    row: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A column of the problem's row under your data's name (also question, subject, level); may be repeated.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Length in tokens, for rewards that count them; the number of words when left out.", min=0
        ),
    ] = None,
) -> int:
    """Show each reward of a completion, its weight and the total; exit 1 if one fails. Next: algorist rewards list."""
    from algorist.config import load_recipe
    from algorist.prompts import get_format
    from algorist.rewards import build_rewards

    for word in overrides or []:
        if "=" not in word:
            raise ConfigError(f"'{word}' is not key=value; a recipe follows --recipe: --recipe {word}")
    columns = read_pairs("--row", row, "level=easy")
    resolved = load_recipe(recipe, overrides or []).recipe
    form = get_format(resolved.prompt.format, tags=resolved.prompt.tags)
    rewards = build_rewards(resolved.rewards, form, matcher=resolved.matcher)
    length = len(completion.split()) if tokens is None else tokens
    with without_warnings():  # a failure is shown below, once
        found = rewards.explain(completion, answer, completion_ids=[0] * length, **columns)
    rows = {name: {"value": value, "weight": found.weights[name]} for name, value in found.components.items()}
    print(json.dumps({"total": found.total, "rewards": rows}, indent=2))
    failed = [reward for reward in rewards if reward.failures]
    for reward in failed:
        say(
            f"error: reward '{reward.__name__}' failed and got its floor: {reward.first_failure}", stderr=True
        )
    return 1 if failed else 0
