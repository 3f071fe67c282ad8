"""An advantage and a loss of your own, in a recipe and in a loop of your own.

In a recipe, in the folder above this one; the run stores the advantages and logs the metrics of the loss:

    algorist run quickstart grpo.advantage=examples/own_algorithm.py:median_centered grpo.loss=examples/own_algorithm.py:reinforce

In a loop of your own, from a model that has learned the format:

    python examples/own_algorithm.py runs/quickstart/sft/final
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

from algorist import (
    Batch,
    LogProbs,
    SamplingParams,
    build_rewards,
    collect,
    load_policy,
    loss,
    make_engine,
    policy_loss,
)
from algorist.config import load_recipe
from algorist.data import load_problems
from algorist.prompts import get_format


def median_centered(rewards: torch.Tensor) -> torch.Tensor:
    """Return reward minus group median, (P, G) → (P, G): one very good completion does not make the others bad."""
    return rewards - rewards.median(-1, keepdim=True).values


@loss("median_reinforce", reduction="token-mean", zero_advantage_adds_nothing=True)
def reinforce(log_probs, advantages, mask):
    """Return -A·log p per token, (B, T), and how likely the tokens were that are now made likelier."""
    return -advantages * log_probs, {"praised_log_prob": log_probs * (advantages > 0)}


def main(model: Path, steps: int = 20) -> None:
    """Train with the two functions above: eight problems, sixteen completions each, in a step."""
    recipe = load_recipe("quickstart").recipe
    problems, form = load_problems(recipe.data.train), get_format("reasoning_answer", system_prompt="")
    policy = load_policy(model, device=torch.device("cpu"), trainable=True)
    engine, log_probs = make_engine("auto", policy.model, policy.tokenizer), LogProbs()
    rewards = build_rewards(recipe.rewards, form, matcher="numeric")
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=3e-4)
    for step in range(1, steps + 1):
        chosen = random.Random(step).sample(problems, 8)
        sampling = SamplingParams(temperature=1.0, max_new_tokens=80, seed=step)
        groups = collect(engine, policy.tokenizer, chosen, form, sampling, 16, rewards=rewards)
        paid = torch.tensor([[rollout.reward for rollout in group.rollouts] for group in groups])
        batch = Batch.from_groups(groups, median_centered(paid))
        found, _ = log_probs(policy.model, batch)
        policy_loss(found, batch.advantages, batch.mask, loss="median_reinforce").backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: reward {paid.mean():.3f}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("give a model folder, such as runs/quickstart/sft/final, and if you like a number of steps")
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
