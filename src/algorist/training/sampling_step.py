"""One generation batch: repeated prompts in, one completion per row out, with records and metrics of the rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from algorist.errors import EngineError
from algorist.rollouts.base import Completion, RolloutEngine, SamplingParams

Record = dict[str, Any]


@dataclass
class GenerationBatch:
    """What is known about the rollouts of one generation batch, row by row in the order of the prompts."""

    prompt_ids: list[list[int]] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)
    sampler_log_probs: list[list[float]] | None = None
    truncated: list[bool] = field(default_factory=list)
    completion_texts: list[str] = field(default_factory=list)
    rewards_RK: torch.Tensor | None = None
    seconds: float = 0.0


def sample_rows(
    engine: RolloutEngine, prompt_ids: Sequence[Sequence[int]], params: SamplingParams
) -> list[Completion]:
    """Sample one completion per row; equal prompts are sampled together as a group.

    Args:
        engine: Samples groups.
        prompt_ids: One prompt per row; TRL repeats each prompt once per completion of its group.
        params: Sampling settings.

    Returns:
        One completion per row, in the order of the rows.

    Raises:
        EngineError: The engine returned another number of groups or completions than asked for.
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, ids in enumerate(prompt_ids):
        rows_of.setdefault(tuple(ids), []).append(row)
    by_count: dict[int, list[tuple[int, ...]]] = {}
    for prompt, rows in rows_of.items():
        by_count.setdefault(len(rows), []).append(prompt)
    result: list[Completion | None] = [None] * len(prompt_ids)
    for count, prompts in by_count.items():
        groups = engine.generate([list(p) for p in prompts], count, params)
        if len(groups) != len(prompts) or any(len(group) != count for group in groups):
            raise EngineError(
                f"engine '{getattr(engine, 'name', type(engine).__name__)}' returned groups of sizes "
                f"{[len(group) for group in groups]}; expected {len(prompts)} groups of {count} completions"
            )
        for prompt, group in zip(prompts, groups, strict=True):
            for row, completion in zip(rows_of[prompt], group, strict=True):
                result[row] = completion
    return [completion for completion in result if completion is not None]


def completion_text(completion: Any) -> str:
    """Return the text of a TRL completion: a string, or the messages of a conversation."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def rollout_records(
    batch: GenerationBatch,
    inputs: Sequence[dict[str, Any]],
    advantages: torch.Tensor,
    *,
    step: int,
    reward_names: Sequence[str],
    reward_weights: torch.Tensor,
    decode: Callable[[list[int]], str],
) -> list[Record]:
    """Return one dictionary per completion of a scored generation batch.

    Args:
        batch: The rollouts with ``rewards_RK`` (R rows, K reward functions, NaN where a function does not apply).
        inputs: Dataset rows in the same order; ``problem_id`` is taken from them.
        advantages: (R,) or (R, T).
        step: Optimizer steps done so far.
        reward_names: K names.
        reward_weights: (K,).
        decode: Turns prompt tokens into text.
    """
    assert batch.rewards_RK is not None
    totals = (batch.rewards_RK * reward_weights.to(batch.rewards_RK)).nansum(1).tolist()
    rewards = batch.rewards_RK.tolist()
    advantage = (advantages if advantages.dim() == 1 else advantages[:, 0]).tolist()
    texts: dict[tuple[int, ...], str] = {}
    groups: dict[tuple[int, ...], int] = {}
    records: list[Record] = []
    for row, (prompt, completion) in enumerate(zip(batch.prompt_ids, batch.completion_ids, strict=True)):
        key = tuple(prompt)
        if key not in texts:
            texts[key] = decode(prompt)
        log_probs = batch.sampler_log_probs[row] if batch.sampler_log_probs is not None else None
        records.append(
            {
                "step": step,
                "problem_id": str(inputs[row].get("problem_id", "")),
                "group": groups.setdefault(key, len(groups)),
                "prompt": texts[key],
                "completion": batch.completion_texts[row],
                "prompt_tokens": len(prompt),
                "completion_tokens": len(completion),
                "sampler_log_prob_sum": float(sum(log_probs)) if log_probs is not None else None,
                "rewards": dict(zip(reward_names, rewards[row], strict=True)),
                "reward": totals[row],
                "advantage": advantage[row],
                "truncated": batch.truncated[row],
                "seconds": batch.seconds,
            }
        )
    return records


def rollout_metrics(
    batch: GenerationBatch,
    *,
    group_size: int,
    reward_names: Sequence[str],
    reward_weights: torch.Tensor,
) -> dict[str, float]:
    """Return the metrics of a scored generation batch on this process.

    ``groups/useful_share`` is the share of groups whose total rewards differ; ``rollout/tokens_per_s`` counts
    completion tokens.
    """
    assert batch.rewards_RK is not None
    totals = (batch.rewards_RK * reward_weights.to(batch.rewards_RK)).nansum(1)
    tokens = sum(len(ids) for ids in batch.completion_ids)
    rows = len(batch.completion_ids)
    metrics = {
        "rollout/seconds": batch.seconds,
        "rollout/tokens_per_s": tokens / max(batch.seconds, 1e-9),
        "reward/total": float(totals.mean()),
        "completions/truncated_share": sum(batch.truncated) / max(rows, 1),
        "completions/mean_tokens": tokens / max(rows, 1),
    }
    for index, name in enumerate(reward_names):
        metrics[f"reward/{name}"] = float(batch.rewards_RK[:, index].nanmean())
    if group_size > 1 and rows % group_size == 0:
        spread = totals.view(-1, group_size)
        metrics["groups/useful_share"] = float((spread.amax(1) - spread.amin(1) > 1e-6).float().mean())
    return metrics
