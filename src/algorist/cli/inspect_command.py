"""``algorist inspect RUN``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from algorist.store.safe_text import one_line, printable

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: algorist inspect runs/quickstart --sql 'select step, avg(reward) from rollouts group by 1 order by 1' "
    "· algorist inspect runs/quickstart --wrong --sort=-reward --limit 3 · Next: algorist diagnose runs/quickstart"
)
def inspect(
    run: Annotated[Path, typer.Argument(help="A run folder, or an evaluation: RUN/eval/NAME.json.")],
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
        str | None,
        typer.Option(
            help="A SELECT over the views rollouts, metrics and samples (all evaluations), in place of the filters; their "
            "columns: --sql 'describe rollouts'."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")] = False,
) -> None:
    """Browse or query the stored rollouts of a run, or the completions of an evaluation."""
    from algorist.store.read import query, rollouts

    of_evaluation = run.suffix in (".json", ".parquet")
    if sql is not None:
        rows = query(run.parent.parent if of_evaluation else run, sql)
    elif of_evaluation:
        rows = _samples(run, problem, reason, correct, contains)[:limit]
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
    if sql is not None and not as_json:
        _table(rows)
        return
    for row in rows:
        print(json.dumps(row, default=str) if as_json else _sample(row) if of_evaluation else _told(row))


def _samples(
    file: Path, problem: str | None, reason: str | None, correct: bool | None, contains: str | None
) -> list[dict[str, Any]]:
    """Return the completions of an evaluation that pass the filters."""
    from algorist.evaluation.artifact import read_artifact

    wanted = {"problem_id": problem, "reason": reason, "correct": correct}
    return [
        row
        for row in read_artifact(file.parent, file.stem).samples
        if all(value is None or row[key] == value for key, value in wanted.items())
        and (contains or "").lower() in row["completion"].lower()
    ]


def _sample(row: dict[str, Any]) -> str:
    verdict = f"{'right' if row['correct'] else 'wrong'} ({row['reason']})"
    head = f"problem {row['problem_id']} · {verdict} · read {row['extracted']} · gold {row['gold']} · {row['completion_tokens']} tokens"
    return printable(f"{head}\n{row['question']}\n→ {row['completion']}\n")


def _table(rows: list[dict[str, Any]]) -> None:
    """Print the rows of a query as a table; a pipe gets its whole width."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        numbers = all(isinstance(row[name], int | float | None) for row in rows)
        table.add_column(Text(one_line(str(name))), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(_cell(value))) for value in row.values()))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=10_000)
    console.print(table)


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def _why_none(run: Path, sql: str | None) -> str:
    from algorist.store.read import query

    if sql is not None:
        return "the SELECT finds none"
    if run.suffix:
        return "no completion passes these filters"
    if query(run, "SELECT count(*) AS n FROM rollouts")[0]["n"] == 0:
        there = sorted(run.glob("eval/*.json"))
        of = f"; its evaluations have completions too: algorist inspect {there[-1]} --wrong" if there else ""
        return f"{run} has no rollouts (GRPO stores them, and algorist iterate){of}"
    return "no rollout passes these filters"


def _told(row: dict[str, Any]) -> str:
    head = (
        f"step {row['step']} · problem {row['problem_id']} · reward {row['reward']:.3f} · advantage {row['advantage']:+.3f} · "
        f"{row['reason']} · {row['completion_tokens']} tokens"
    )
    return printable(f"{head}\n{row['completion']}\n")
