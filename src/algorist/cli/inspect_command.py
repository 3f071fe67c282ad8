"""``algorist inspect RUN``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from algorist.cli.terminal import Line, Result, View, compact, say, table, verb
from algorist.errors import ConfigError, check_known
from algorist.store.safe_text import number_text, one_line

app = typer.Typer(add_completion=False)


class Inspected(Result):
    """Rows of a store."""

    rows: Annotated[list[dict[str, Any]], "per rollout, completion or row of --sql: its columns"]
    kind: str

    def view(self, width: int) -> View:
        if self.kind == "sql":
            if self.rows:
                cells = [[one_line(_cell(value)) for value in row.values()] for row in self.rows]
                yield table([one_line(name) for name in self.rows[0]], cells)
            return
        for row in self.rows:
            yield Line(_sample(row) if self.kind == "evaluation" else _rollout(row))


@verb(app)
def inspect(
    run: Path,
    step: int | None = None,
    problem: str | None = None,
    reason: str | None = None,
    correct: Annotated[bool | None, typer.Option("--correct/--wrong")] = None,
    contains: str | None = None,
    sort: str = "step",
    limit: Annotated[int, typer.Option(min=1)] = 10,
    sql: str | None = None,
    as_json: bool = False,
) -> Inspected:
    """Browse or query the stored rollouts of a run, or the completions of an evaluation.

    Args:
        run: A run folder, or an evaluation: RUN/eval/NAME.json.
        step: Only this step.
        problem: Only this problem id, across steps.
        reason: Only this grading reason, such as different, no_answer or equal_number.
        correct: Only right or only wrong completions.
        contains: Only completions with this text, case ignored.
        sort: step, reward, advantage or completion_tokens; downwards with a minus: --sort=-reward.
        limit: Rows to show.
        sql: A SELECT over the views rollouts, metrics and samples (all evaluations), in place of the filters; their
            columns: --sql 'describe rollouts'.

    Example: algorist inspect runs/quickstart --sql 'select step, avg(reward) from rollouts group by 1 order by 1' ·
    algorist inspect runs/quickstart --wrong --sort=-reward --limit 3 · Next: algorist diagnose runs/quickstart
    """
    from algorist.store.read import SORTS, query, rollouts

    of_evaluation = run.suffix in (".json", ".parquet")
    if sql is not None:
        rows = query(run.parent.parent if of_evaluation else run, sql)
    elif of_evaluation:
        if step is not None or sort.removeprefix("-") == "advantage":
            raise ConfigError(
                "an evaluation has no steps and no advantages: leave --step and --sort=advantage out"
            )
        rows = _samples(run, problem, reason, correct, contains)
        check_known(sort, SORTS, f"cannot sort by '{sort}'", "Known: {}")
        if (key := sort.removeprefix("-")) != "step":
            rows.sort(key=lambda row: row.get(key) or 0.0, reverse=sort.startswith("-"))
        rows = rows[:limit]
    else:
        every = sql is None and not as_json
        rows = rollouts(
            run,
            step=step,
            problem_id=problem,
            reason=reason,
            correct=correct,
            contains=contains,
            sort=sort,  # type: ignore[arg-type]
            limit=8 * limit if every else limit,
        )
        rows = _once(rows)[:limit] if every else rows
    if not rows:
        say(f"no rows: {_why_none(run, sql)}", stderr=True)
    return Inspected(rows, "sql" if sql is not None else "evaluation" if of_evaluation else "rollouts")


def _samples(
    file: Path, problem: str | None, reason: str | None, correct: bool | None, contains: str | None
) -> list[dict[str, Any]]:
    """Return the completions of an evaluation that pass the filters."""
    from algorist.evaluation.artifact import read_artifact

    values = {"problem_id": problem, "reason": reason, "correct": correct}
    return [
        row
        for row in read_artifact(file.parent, file.stem).samples
        if all(value is None or row[key] == value for key, value in values.items())
        and (contains or "").lower() in row["completion"].lower()
    ]


def _once(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each text of a group once, with the number of its copies."""
    texts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        same = texts.setdefault(
            (row["stage"], row["step"], row["problem_id"], row["completion"]), row | {"copies": 0}
        )
        same["copies"] += 1
    return list(texts.values())


def _sample(row: dict[str, Any]) -> str:
    verdict = f"{'right' if row['correct'] else 'wrong'} ({row['reason']})"
    head = f"problem {row['problem_id']} · {verdict} · read {row['extracted']} · gold {row['gold']} · {row['completion_tokens']} tokens"
    return f"{head}\n{row['question']}\n→ {_text(row)}\n"


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def _why_none(run: Path, sql: str | None) -> str:
    from algorist.store.read import query

    if sql is not None:
        return "the SELECT finds none"
    if run.suffix:
        return "no completion passes these filters"
    if query(run, "SELECT count(*) AS n FROM rollouts")[0]["n"] == 0:
        files = sorted(run.glob("eval/*.json"))
        of = f"; its evaluations have completions too: algorist inspect {files[-1]} --wrong" if files else ""
        return f"{run} has no rollouts (GRPO stores them, and algorist iterate){of}"
    return "no rollout passes these filters"


def _rollout(row: dict[str, Any]) -> str:
    reward, advantage = number_text(row["reward"]), number_text(row["advantage"], "{:+.3f}")
    head = (
        f"step {row['step']} · problem {row['problem_id']} · reward {reward} · advantage {advantage} · "
        f"{row['reason']} · read {row['extracted']} · gold {row['gold']} · {row['completion_tokens']} tokens"
    ) + (f" · {row['copies']} times" if row["copies"] > 1 else "")
    return f"{head}\n{row['question']}\n→ {_text(row)}\n"


def _text(row: dict[str, Any]) -> str:
    """Return a completion with the replies to it, and its calls."""
    from algorist.store.write import conversation

    return "\n".join([compact(conversation(row)), *_call_lines(row)])


def _call_lines(row: dict[str, Any]) -> list[str]:
    """Return one line for each call of a stored completion: tool, time, what was asked, what came."""
    from algorist.types import ENVIRONMENT

    return [
        f"[{turn['source']}, {1000 * (turn['seconds'] or 0):.1f} ms{', ' + turn['error'] if turn['error'] else ''}] "
        f"{' ⏎ '.join(turn['request'].strip().splitlines())[:200]} → {' ⏎ '.join(turn['reply'].splitlines())[:200]}"
        for turn in row.get("turns") or ()
        if turn["source"] != ENVIRONMENT
    ]
