"""``algorist regrade RUN``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from algorist.cli.arguments import AsJson
from algorist.cli.terminal import say
from algorist.store.safe_text import printable

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: algorist regrade runs/quickstart --matcher symbolic --changed changed.jsonl "
    "· Next: matcher=NAME in the next run"
)
def regrade(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    matcher: Annotated[
        str | None,
        typer.Option(
            help="How answers are compared (docs/grading.md lists the names); as the run did when left out."
        ),
    ] = None,
    changed: Annotated[
        Path | None, typer.Option(help="Write the rollouts whose verdict or reward changes as JSONL.")
    ] = None,
    show: Annotated[int, typer.Option(help="Changed rollouts to print.", min=0)] = 5,
    as_json: AsJson = False,
) -> int:
    """Grade the stored rollouts again and say what changes; the store is not touched. Exit 1 if anything does."""
    from algorist.evaluation.regrade import differences

    found = differences(run, matcher)
    rows = found.pop("changed")
    if changed is not None:
        changed.write_text("".join(json.dumps(r, ensure_ascii=True) + "\n" for r in rows), encoding="utf-8")
    if as_json:
        print(json.dumps({**found, "changed": len(rows)}))
        return 1 if rows else 0
    verdicts, changed = found["verdicts_changed"], found["rewards_changed"]
    say(
        f"{found['rollouts']} rollouts graded again with '{found['matcher']}': {verdicts} verdict{'s' * (verdicts != 1)} and "
        f"{changed} reward{'s' * (changed != 1)} change; accuracy {found['accuracy_before']:.4f} → {found['accuracy_after']:.4f}"
    )
    for move, count in found["moves"].items():
        say(f"  {move}: {count}")
    for row in rows[:show]:
        say(_told(row))
    return 1 if rows else 0


def _told(row: dict[str, Any]) -> str:
    return printable(
        f"step {row['step']} · problem {row['problem_id']} · gold {row['gold']} · read {row['extracted']} · "
        f"{row['reason']} → {row['new_reason']} · reward {row['reward']:.3f} → {row['new_reward']:.3f}"
    )
