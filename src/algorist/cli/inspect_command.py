"""``algorist inspect RUN``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: algorist inspect runs/quickstart --sql 'select step, avg(reward) from rollouts group by 1 order by 1'"
)
def inspect(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    problem: Annotated[str | None, typer.Option(help="Only this problem id, across steps.")] = None,
    reason: Annotated[str | None, typer.Option(help="Only this grading reason.")] = None,
    sort: Annotated[str, typer.Option(help="Column to sort by; -column sorts downwards.")] = "step",
    limit: Annotated[int, typer.Option(help="Rows to show.")] = 10,
    sql: Annotated[str | None, typer.Option(help="A SELECT over rollouts, metrics and samples.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")] = False,
) -> None:
    """Browse or query the stored rollouts of a run."""
    from algorist.store.read import query, rollouts

    if sql is not None:
        rows = query(run, sql)
    else:
        rows = rollouts(run, step=step, problem_id=problem, reason=reason, sort=sort, limit=limit)  # type: ignore[arg-type]
    for row in rows:
        print(json.dumps(row, default=str) if as_json else _told(row, full=sql is not None))


def _told(row: dict[str, Any], *, full: bool) -> str:
    from algorist.store.safe_text import printable

    if full:
        return printable("  ".join(f"{k}={v}" for k, v in row.items()))
    head = (
        f"step {row['step']} · problem {row['problem_id']} · reward {row['reward']:.3f} · advantage {row['advantage']:+.3f} · "
        f"{row['reason']} · {row['completion_tokens']} tokens"
    )
    return printable(f"{head}\n{row['completion']}\n")
