"""GRPO without a trainer: the parts that `training/step.py` calls, in a loop of your own, on the quickstart's task.

    python examples/grpo_loop.py runs/quickstart/sft/final

Shapes: P problems, G completions of each, B = P·G, T tokens.
"""

import sys
from pathlib import Path

import torch

from algorist.config.schema import DatasetSection
from algorist.data import load_problems
from algorist.models.load import load_policy
from algorist.objectives import group_centered, policy_loss
from algorist.prompts.attached import attached
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.collect import collect
from algorist.runs.asking import how_to_ask
from algorist.training.batch import Batch
from algorist.training.log_probs import LogProbs

STEPS, PROBLEMS, GROUP, TOKENS = int(sys.argv[2]) if len(sys.argv) > 2 else 60, 16, 8, 80
torch.manual_seed(0)
policy = load_policy(Path(sys.argv[1]), device=torch.device("cpu"), trainable=True)
form = how_to_ask(None, None, attached(policy.tokenizer), None).prompt_format
problems = load_problems(DatasetSection(name="arithmetic", params={"count": STEPS * PROBLEMS, "seed": 1}))
rewards = build_rewards(
    [{"name": "correct"}, {"name": "well_formed", "weight": 0.2}], form, matcher="numeric"
)
engine = make_engine("native", policy.model, policy.tokenizer)
optimizer = torch.optim.AdamW(policy.model.parameters(), lr=3e-4)
log_probs_of = LogProbs()

for step in range(STEPS):
    sampling = SamplingParams(temperature=1.0, max_new_tokens=TOKENS, seed=step)
    few = problems[step * PROBLEMS : (step + 1) * PROBLEMS]
    with torch.no_grad():
        groups = collect(
            engine, policy.tokenizer, few, form, sampling, GROUP, rewards=rewards, matcher="numeric"
        )
    rewards_PG = torch.tensor([[r.reward for r in group.rollouts] for group in groups])
    batch = Batch.from_groups(groups, group_centered(rewards_PG))  # advantages are (B, T) from here on
    batch = batch.take(batch.in_group_order(range(len(batch))))
    log_probs_BT, _ = log_probs_of(policy.model, batch)
    loss = policy_loss(log_probs_BT, batch.advantages, batch.mask, loss="dr_grpo", denominator=TOKENS)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
    optimizer.step()
    right = sum(r.grade.correct for group in groups for r in group.rollouts) / (PROBLEMS * GROUP)
    print(f"step {step + 1}: reward {rewards_PG.mean():.3f}, right {right:.0%}")
