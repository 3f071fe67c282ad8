"""``algorist regrade RUN``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Grade the stored rollouts again and say what changes; the store is not touched. Exit 1 if anything does."""
    found = differences(run, matcher)
    rows = found.pop("changed")
    if changed is not None:
        changed.write_text("".join(json.dumps(r, ensure_ascii=True) + "\n" for r in rows), encoding="utf-8")
    if as_json:
        print(json.dumps({**found, "changed": len(rows)}))
        return 1 if rows else 0
    print(
        f"{found['rollouts']} rollouts graded again with '{found['matcher']}': {found['verdicts_changed']} verdicts and "
        f"{found['rewards_changed']} rewards change; accuracy {found['accuracy_before']:.4f} → {found['accuracy_after']:.4f}"
    )
    for move, count in found["moves"].items():
        print(f"  {move}: {count}")
    for row in rows[:show]:
        print(_told(row))
    return 1 if rows else 0


def differences(run: Path, matcher: str | None) -> dict[str, Any]:
    """Return counts and the changed rollouts of a run graded again, with its own recipe's format and rewards.

    Raises:
        CheckpointError: No run there.
        ConfigError: Unknown matcher, or a recipe that no longer loads.
    """
    from algorist.config import load_recipe
    from algorist.grading import MATCHERS, deciding_matcher, grade_completion
    from algorist.prompts import get_format
    from algorist.rewards import build_rewards
    from algorist.store.read import query

    steps = [row["step"] for row in query(run, "SELECT DISTINCT step FROM rollouts ORDER BY step")]
    recipe = load_recipe(str(run / "config.yaml")).recipe
    name = matcher or recipe.matcher
    MATCHERS.get(name)
    form = get_format(
        recipe.prompt.format, system_prompt=recipe.prompt.system_prompt, tags=recipe.prompt.tags
    )
    rewards = build_rewards(recipe.rewards, form, matcher=name)
    moves: Counter[str] = Counter()
    changed: list[dict[str, Any]] = []
    total = before = after = verdicts = paid = 0
    for step in steps:
        for row in query(run, "SELECT * FROM rollouts WHERE step = ?", [step]):
            told = grade_completion(
                row["completion"], row["gold"] or "", parsed=form.parse(row["completion"]), matcher=name
            )
            reward = rewards.explain(row["completion"], row["gold"] or "").total
            total, before, after = total + 1, before + bool(row["correct"]), after + told.correct
            other_verdict = (bool(row["correct"]), row["reason"]) != (told.correct, told.reason)
            other_reward = abs(reward - row["reward"]) > 1e-6
            verdicts, paid = verdicts + other_verdict, paid + other_reward
            if other_verdict:
                moves[f"{row['reason']} → {told.reason}"] += 1
            if other_verdict or other_reward:
                kept = {k: row[k] for k in ("step", "problem_id", "completion", "gold", "reason", "reward")}
                changed.append(
                    {**kept, "new_reason": told.reason, "new_reward": reward, "extracted": told.extracted}
                )
    return {
        "rollouts": total,
        "matcher": deciding_matcher(name),
        "verdicts_changed": verdicts,
        "rewards_changed": paid,
        "accuracy_before": before / max(1, total),
        "accuracy_after": after / max(1, total),
        "moves": dict(moves.most_common()),
        "changed": changed,
    }


def _told(row: dict[str, Any]) -> str:
    from algorist.store.safe_text import printable

    return printable(
        f"step {row['step']} · problem {row['problem_id']} · gold {row['gold']} · read {row['extracted']} · "
        f"{row['reason']} → {row['new_reason']} · reward {row['reward']:.3f} → {row['new_reward']:.3f}"
    )
