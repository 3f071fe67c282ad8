"""``algorist rewards list | explain``."""

from __future__ import annotations

import json
import logging
import sys
from typing import Annotated

import typer

from algorist.cli.arguments import Overrides
from algorist.errors import ConfigError
from algorist.store.redact import redact
from algorist.store.safe_text import printable

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="List the rewards; explain the reward of a completion.",
    epilog="Example: algorist rewards explain --completion '<answer>7</answer>' --answer 7",
)


@app.command("list", epilog="Example: algorist rewards list · Next: algorist rewards explain --help")
def list_rewards() -> None:
    """List the registered rewards with their range."""
    from algorist.rewards import REWARDS

    for name in REWARDS:
        reward = REWARDS.get(name)
        first = (reward.function.__doc__ or "").strip().splitlines()[0]
        print(f"{name:<24} {reward.low:>6g} … {reward.high:<6g} {first}")


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
            raise ConfigError(f"'{word}' is not key=value; a recipe stands behind --recipe: --recipe {word}")
    resolved = load_recipe(recipe, overrides or []).recipe
    form = get_format(resolved.prompt.format, tags=resolved.prompt.tags)
    rewards = build_rewards(resolved.rewards, form, matcher=resolved.matcher)
    logging.disable(logging.WARNING)  # a failure is shown below, once
    length = len(completion.split()) if tokens is None else tokens
    found = rewards.explain(completion, answer, completion_ids=[0] * length)
    logging.disable(logging.NOTSET)
    rows = {name: {"value": value, "weight": found.weights[name]} for name, value in found.components.items()}
    print(json.dumps({"total": found.total, "rewards": rows}, indent=2))
    failed = [reward for reward in rewards if reward.failures]
    for reward in failed:
        said = f"error: reward '{reward.__name__}' failed and got its floor: {reward.first_failure}"
        print(printable(redact(said)), file=sys.stderr)
    return 1 if failed else 0
