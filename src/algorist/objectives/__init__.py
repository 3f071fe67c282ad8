"""The mathematics of GRPO: advantages, ratios, KL, losses, masks. Pure functions of tensors; the trainer calls these.

``@advantage("name")`` and ``@loss("name")`` register a function for recipes. No file here imports torch when it is loaded, so
that recipes can be checked against the registries without it.
"""

from algorist.objectives.advantages import (
    ADVANTAGES,
    advantage,
    advantage_named,
    batch_normalized,
    group_centered,
    group_normalized,
    leave_one_out,
    maxrl,
    per_reward_normalized,
    probe_advantage,
    reinforce,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    useful_groups,
)
from algorist.objectives.losses import (
    LOSSES,
    Loss,
    Objective,
    loss,
    loss_named,
    policy_loss,
    probe_loss,
    ratio_of,
    token_losses,
)
from algorist.objectives.masks import (
    masked_mean,
    masked_normalize,
    masked_sum,
    mean_lengths,
    top_entropy_mask,
)
from algorist.objectives.ratios import (
    k1,
    k2,
    k3,
    log_ratio,
    on_policy_sequences,
    sampler_weights,
    sequence_ratio,
    token_ratio,
    truncated_weights,
)
from algorist.objectives.reductions import Reduction, token_weights

__all__ = [
    "ADVANTAGES", "LOSSES", "Loss", "Objective", "Reduction", "advantage", "advantage_named", "batch_normalized", "group_centered",
    "group_normalized", "k1", "k2", "k3", "leave_one_out", "log_ratio", "loss", "loss_named", "masked_mean",
    "masked_normalize", "masked_sum", "maxrl", "mean_lengths", "on_policy_sequences", "per_reward_normalized",
    "policy_loss", "probe_advantage", "probe_loss", "ratio_of", "reinforce", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "sampler_weights", "sequence_ratio", "token_losses", "token_ratio",
    "token_weights", "top_entropy_mask", "truncated_weights", "useful_groups",
]  # fmt: skip
