"""The one schema of stored completions: what a group of rollouts becomes in Parquet, for training and evaluation alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isnan
from typing import Any

import pyarrow

from algorist.types import ENVIRONMENT, Group, Rollout

VERSION = "2"
TURN = pyarrow.struct(
    [
        ("source", pyarrow.string()),
        ("request", pyarrow.string()),
        ("reply", pyarrow.string()),
        ("error", pyarrow.string()),
        ("seconds", pyarrow.float64()),
    ]
)
SCHEMA = pyarrow.schema(
    [
        ("stage", pyarrow.string()),
        ("step", pyarrow.int64()),
        ("problem_id", pyarrow.string()),
        ("group", pyarrow.int64()),
        ("sample", pyarrow.int32()),
        ("greedy", pyarrow.bool_()),
        ("dataset", pyarrow.string()),
        ("subject", pyarrow.string()),
        ("level", pyarrow.string()),
        ("question", pyarrow.string()),
        ("prompt", pyarrow.string()),
        ("completion", pyarrow.string()),
        ("prompt_tokens", pyarrow.int32()),
        ("completion_tokens", pyarrow.int32()),
        ("sampled_tokens", pyarrow.int32()),
        ("turns", pyarrow.list_(TURN)),
        ("truncated", pyarrow.bool_()),
        ("well_formed", pyarrow.bool_()),
        ("has_reasoning", pyarrow.bool_()),
        ("reasoning_characters", pyarrow.int32()),
        ("extracted", pyarrow.string()),
        ("gold", pyarrow.string()),
        ("correct", pyarrow.bool_()),
        ("reason", pyarrow.string()),
        ("checker", pyarrow.string()),
        ("rewards", pyarrow.map_(pyarrow.string(), pyarrow.float64())),
        ("reward", pyarrow.float64()),
        ("advantage", pyarrow.float64()),
        ("sampler_log_prob_sum", pyarrow.float64()),
        ("seconds", pyarrow.float64()),
    ],
    metadata={"algorist.rollouts": VERSION},
)


def rows_of(
    group: Group, *, index: int = 0, advantages: Sequence[float] | None = None
) -> list[dict[str, Any]]:
    """Return one row of ``SCHEMA`` for each rollout of a group; the caller adds ``stage`` and ``step``.

    Args:
        group: A group of graded rollouts.
        index: Place of the group in its batch.
        advantages: The advantage that each rollout was trained with; NaN for one that was sampled only, stored as null.
    """
    problem = group.problem
    rows = []
    for sample, rollout in enumerate(group.rollouts):
        known = rollout.log_probs is not None and all(v is not None for v in rollout.log_probs)
        grade = rollout.grade
        rows.append(
            {
                "problem_id": problem.id,
                "group": index,
                "sample": sample,
                "dataset": problem.extra.get("dataset"),
                "subject": problem.subject,
                "level": problem.level,
                "question": problem.question,
                "prompt": group.prompt,
                "completion": rollout.text,
                "prompt_tokens": len(group.prompt_ids),
                "completion_tokens": len(rollout.completion_ids),
                "sampled_tokens": sum(rollout.sampled_mask),
                "turns": [asdict(turn) for turn in rollout.turns] or None,
                "truncated": rollout.truncated,
                "well_formed": rollout.parsed.well_formed,
                "has_reasoning": rollout.parsed.reasoning is not None,
                "reasoning_characters": len(rollout.parsed.reasoning or ""),
                "extracted": grade.extracted if grade else None,
                "gold": problem.answer,
                "correct": grade.correct if grade else None,
                "reason": grade.reason if grade else None,
                "checker": problem.checker or None,
                "rewards": rollout.rewards,
                "reward": rollout.reward,
                "advantage": None if advantages is None or isnan(advantages[sample]) else advantages[sample],
                "sampler_log_prob_sum": _sampled_sum(rollout) if known else None,
                "seconds": group.seconds,
            }
        )
    return rows


def conversation(row: Mapping[str, Any]) -> str:
    """Return a stored completion with the exchanges with an environment before it."""
    said = [
        f"{turn['request']}\n[{ENVIRONMENT}] {turn['reply']}\n"
        for turn in row.get("turns") or ()
        if turn["source"] == ENVIRONMENT
    ]
    return "".join([*said, row["completion"] or ""])


def call_lines(row: Mapping[str, Any]) -> list[str]:
    """Return one line for each call of a stored completion: tool, time, what was asked, what came."""
    return [
        f"[{turn['source']}, {1000 * (turn['seconds'] or 0):.1f} ms{', ' + turn['error'] if turn['error'] else ''}] "
        f"{' ⏎ '.join(turn['request'].strip().splitlines())[:200]} → {' ⏎ '.join(turn['reply'].splitlines())[:200]}"
        for turn in row.get("turns") or ()
        if turn["source"] != ENVIRONMENT
    ]


def _sampled_sum(rollout: Rollout) -> float:
    pairs = zip(rollout.log_probs or (), rollout.sampled_mask, strict=True)
    return float(sum(value for value, own in pairs if own))
