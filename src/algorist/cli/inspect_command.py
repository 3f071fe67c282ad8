"""``algorist inspect RUN``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: algorist inspect runs/quickstart --sql 'select step, avg(reward) from rollouts group by 1 order by 1' "
    "· algorist inspect runs/quickstart --wrong --sort=-reward --limit 3 · Next: algorist diagnose runs/quickstart"
)
def inspect(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    problem: Annotated[str | None, typer.Option(help="Only this problem id, across steps.")] = None,
    reason: Annotated[
        str | None,
        typer.Option(help="Only this grading reason, such as different, no_answer or equal_number."),
    ] = None,
    correct: Annotated[
        bool | None, typer.Option("--correct/--wrong", help="Only right or only wrong completions.")
    ] = None,
    contains: Annotated[
        str | None, typer.Option(help="Only completions with this text, case ignored.")
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            help="step, reward, advantage or completion_tokens; downwards with a minus: --sort=-reward."
        ),
    ] = "step",
    limit: Annotated[int, typer.Option(help="Rows to show.", min=1)] = 10,
    sql: Annotated[
        str | None, typer.Option(help="A SELECT over rollouts, metrics and samples, in place of the filters.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")] = False,
) -> None:
    """Browse or query the stored rollouts of a run."""
    from algorist.store.read import query, rollouts

    if sql is not None:
        rows = query(run, sql)
    else:
        rows = rollouts(
            run,
            step=step,
            problem_id=problem,
            reason=reason,
            correct=correct,
            contains=contains,
            sort=sort,  # type: ignore[arg-type]
            limit=limit,
        )
    if not rows:
        print(f"no rows: {_why_none(run, sql)}", file=sys.stderr)
    for row in rows:
        print(json.dumps(row, default=str) if as_json else _told(row, full=sql is not None))


def _why_none(run: Path, sql: str | None) -> str:
    from algorist.store.read import query

    if sql is not None:
        return "the SELECT finds none"
    if query(run, "SELECT count(*) AS n FROM rollouts")[0]["n"] == 0:
        return f"{run} has no rollouts (GRPO stores them, and algorist iterate)"
    return "no rollout passes these filters"


def _told(row: dict[str, Any], *, full: bool) -> str:
    from algorist.store.safe_text import printable

    if full:
        return printable("  ".join(f"{k}={v}" for k, v in row.items()))
    head = (
        f"step {row['step']} · problem {row['problem_id']} · reward {row['reward']:.3f} · advantage {row['advantage']:+.3f} · "
        f"{row['reason']} · {row['completion_tokens']} tokens"
    )
    return printable(f"{head}\n{row['completion']}\n")
