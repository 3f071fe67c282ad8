"""Grade a run's stored rollouts again and show what changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from algorist.cli.terminal import Line, Result, View, verb
from algorist.store.safe_text import number_text

app = typer.Typer(add_completion=False)


class GradedAgain(Result):
    """Changes from grading a store again."""

    rollouts: Annotated[int, "graded again"]
    matcher: Annotated[str, "how answers were compared"]
    changed: Annotated[int, "rollouts whose verdict or reward changes"]
    verdicts_changed: Annotated[int, "verdicts that change"]
    rewards_changed: Annotated[int, "rewards that change"]
    accuracy_before: Annotated[float, "as stored"]
    accuracy_after: Annotated[float, "as graded now"]
    moves: Annotated[dict[str, int], "'reason → reason' and how often"]
    shown: list[dict[str, Any]]

    def view(self, width: int) -> View:
        verdicts, rewards = self.verdicts_changed, self.rewards_changed
        yield (
            f"{self.rollouts} rollouts graded again with '{self.matcher}': {verdicts} verdict{'s' * (verdicts != 1)} and "
            f"{rewards} reward{'s' * (rewards != 1)} change; accuracy {self.accuracy_before:.4f} → {self.accuracy_after:.4f}"
        )
        for move, count in self.moves.items():
            yield f"  {move}: {count}"
        for row in self.shown:
            yield Line(
                f"step {row['step']} · problem {row['problem_id']} · gold {row['gold']} · read {row['extracted']} · "
                f"{row['reason']} → {row['new_reason']} · reward {number_text(row['reward'])} → {number_text(row['new_reward'])}"
            )

    def code(self) -> int:
        return 1 if self.changed else 0


@verb(app)
def regrade(
    run: Path,
    matcher: str | None = None,
    changed: Path | None = None,
    show: Annotated[int, typer.Option(min=0)] = 5,
) -> GradedAgain:
    """Grade the stored rollouts again and say what changes; the store is not touched. Exit 1 if anything does.

    Args:
        run: A run folder.
        matcher: How answers are compared (docs/grading.md lists the names); as the run did when left out.
        changed: Write the rollouts whose verdict or reward changes as JSONL.
        show: Changed rollouts to print.

    Example: algorist regrade runs/quickstart --matcher symbolic --changed changed.jsonl · Next: matcher=NAME in the
    next run
    """
    from algorist.extensions.regrade.differences import differences

    result = differences(run, matcher)
    rows = result.pop("changed")
    if changed is not None:
        changed.write_text("".join(json.dumps(r, ensure_ascii=True) + "\n" for r in rows), encoding="utf-8")
    return GradedAgain(changed=len(rows), shown=rows[:show], **result)
