"""``algorist doctor``: can this machine run a recipe, and with what."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from algorist.cli.arguments import AsJson
from algorist.cli.terminal import console, table

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: algorist doctor --json · Next: algorist run quickstart")
def doctor(
    as_json: AsJson = False,
    hub: Annotated[bool, typer.Option(help="Try to reach the hub (two seconds).")] = True,
) -> int:
    """Check versions, devices, the vLLM / TRL pair, disk space and hub access. Exit 1 if something is broken."""
    from algorist.diagnosis.environment import TESTED, environment

    found = environment(hub)
    problems = found["problems"]
    if as_json:
        print(json.dumps(found))
        return 1 if problems else 0
    rows = {}
    for name, version in found["versions"].items():
        tested = TESTED.get(name)
        note = "" if tested is None or version == tested else f" (tests pass with {tested})"
        rows[name] = f"{version or 'not installed'}{note}"
    rows |= {key: found[key] for key in ("device", "vllm", "disk", "hub")}
    screen = console()
    screen.print(table(("", ""), rows.items()))
    screen.say("\n".join(f"problem: {text}" for text in problems) or "everything needed is there")
    return 1 if problems else 0
