"""Stored rollouts graded and rewarded again: what another grader or matcher would change."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from algorist.config.load import load_run_recipe
from algorist.data import load_problems
from algorist.errors import DataError
from algorist.prompts import get_format
from algorist.rewards import build_rewards
from algorist.store.read import opened, query
from algorist.types import Group, Problem, Rollout, Turn
from algorist_grader import MATCHERS, deciding_matcher, grade_completion


def differences(run: Path, matcher: str | None) -> dict[str, Any]:
    """Return counts and the changed rollouts of a run graded again, with its own recipe's format and rewards.

    Raises:
        CheckpointError: No run there.
        ConfigError: Unknown matcher, or a recipe that no longer loads.
    """
    steps = [row["step"] for row in query(run, "SELECT DISTINCT step FROM rollouts ORDER BY step")]
    recipe = load_run_recipe(run, runs="all")
    name = matcher or recipe.matcher
    MATCHERS.get(name)
    form = get_format(
        recipe.prompt.format, system_prompt=recipe.prompt.system_prompt, tags=recipe.prompt.tags
    )
    rewards = build_rewards(recipe.rewards, form, matcher=name)
    checked = query(run, "SELECT 1 FROM rollouts WHERE checker IS NOT NULL LIMIT 1")
    known: dict[str, Problem] = {}
    with nullcontext() if checked else suppress(DataError):  # columns that rewards read
        known = {p.id: p for p in load_problems(recipe.data.train.model_copy(update={"limit": None}))}
    moves: Counter[str] = Counter()
    changed: list[dict[str, Any]] = []
    total = before = after = verdicts = paid = 0
    rows = (row for step in steps for row in query(run, "SELECT * FROM rollouts WHERE step = ?", [step]))
    with opened(run):
        for row in rows:
            text, gold, identity = row["completion"], row["gold"] or "", row["problem_id"]
            problem = known.get(identity) or Problem(identity, row["question"] or "", gold)
            parsed = form.read(text, row["prompt"] or "")
            verdict = grade_completion(text, gold, parsed=parsed, matcher=name, problem=problem.columns())
            tokens = row["sampled_tokens"] or row["completion_tokens"] or 0
            turns = tuple(Turn(**turn) for turn in row["turns"] or ())
            rollout = Rollout([0] * tokens, text, None, bool(row["truncated"]), parsed, verdict, turns=turns)
            group = Group(problem, row["prompt"] or "", [], [rollout])
            reward = rewards.pay([group])[0].rollouts[0].reward
            total, before, after = total + 1, before + bool(row["correct"]), after + verdict.correct
            other_verdict = (bool(row["correct"]), row["reason"]) != (verdict.correct, verdict.reason)
            stored = row["reward"]
            other_reward = reward != stored if None in (reward, stored) else abs(reward - stored) > 1e-6
            verdicts, paid = verdicts + other_verdict, paid + other_reward
            if other_verdict:
                moves[f"{row['reason']} → {verdict.reason}"] += 1
            if other_verdict or other_reward:
                columns = {
                    k: row[k] for k in ("step", "problem_id", "completion", "gold", "reason", "reward")
                }
                changed.append(
                    {
                        **columns,
                        "new_reason": verdict.reason,
                        "new_reward": reward,
                        "extracted": verdict.extracted,
                    }
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
