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
    with opened(run):
        for step in steps:
            rows = query(run, "SELECT * FROM rollouts WHERE step = ?", [step])
            groups: dict[tuple[Any, ...], Group] = {}  # rewards may compare the completions of a group
            rollouts = []
            for row in rows:
                identity = row["problem_id"]
                problem = known.get(identity) or Problem(identity, row["question"] or "", row["gold"] or "")
                key = row["stage"], row["group"], identity
                group = groups.setdefault(key, Group(problem, row["prompt"] or "", [], []))
                rollouts.append((len(group.rollouts), key))
                group.rollouts.append(_rollout(row, problem, form, name))
            paid_groups = dict(zip(groups, rewards.pay([*groups.values()]), strict=True))
            for row, (place, key) in zip(rows, rollouts, strict=True):
                rollout = paid_groups[key].rollouts[place]
                verdict, reward, stored = rollout.grade, rollout.reward, row["reward"]
                assert verdict is not None  # _rollout made it
                total, before, after = total + 1, before + bool(row["correct"]), after + verdict.correct
                other_verdict = (bool(row["correct"]), row["reason"]) != (verdict.correct, verdict.reason)
                other_reward = reward != stored if None in (reward, stored) else abs(reward - stored) > 1e-6
                verdicts, paid = verdicts + other_verdict, paid + other_reward
                if other_verdict:
                    moves[f"{row['reason']} → {verdict.reason}"] += 1
                if other_verdict or other_reward:
                    columns = {
                        k: row[k] for k in ("step", "problem_id", "completion", "gold", "reason", "reward")
                    }
                    now = {"new_reason": verdict.reason, "new_reward": reward, "extracted": verdict.extracted}
                    changed.append({**columns, **now})
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


def _rollout(row: dict[str, Any], problem: Problem, form: Any, matcher: str) -> Rollout:
    """Return a stored completion as it was sampled, graded again; its token ids are unknown, only their number is."""
    text = row["completion"]
    parsed = form.read(text, row["prompt"] or "")
    verdict = grade_completion(
        text, row["gold"] or "", parsed=parsed, matcher=matcher, problem=problem.columns()
    )
    tokens = row["sampled_tokens"] or row["completion_tokens"] or 0
    turns = tuple(Turn(**turn) for turn in row["turns"] or ())
    return Rollout([0] * tokens, text, None, bool(row["truncated"]), parsed, verdict, turns=turns)
