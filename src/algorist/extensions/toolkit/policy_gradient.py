"""The policy-gradient functions of the CS336 assignment, with its names, arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from algorist.extensions.toolkit.tokenize import INSTRUCTION_TEMPLATE, tokenize_prompt_and_output
from algorist.objectives import group_centered, group_normalized, token_ratio, useful_groups
from algorist.objectives.masks import masked_mean, masked_normalize, masked_sum

BasicLoss = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"]


RewardFn = Callable[[str, Any], Mapping[str, float]]


def _column(advantages: Tensor) -> Tensor:
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """Return -A·log p per token: REINFORCE.

    Args:
        raw_rewards_or_advantages: (B,) or (B, 1), one value per completion.
        policy_log_probs: (B, T).

    Returns:
        (B, T), not reduced.
    """
    return -_column(raw_rewards_or_advantages) * policy_log_probs


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -min(ratio·A, clip(ratio)·A) per token: PPO's clipped objective.

    Args:
        advantages: (B,) or (B, 1).
        policy_log_probs: (B, T), with gradient.
        old_log_probs: (B, T), under the policy that sampled.
        cliprange: Ratios are clipped to 1 ± this.

    Returns:
        The loss (B, T), not reduced, and ``clipped`` (B, T): 1 where the clipped term is smaller, so that the token
        gets no gradient; ``ratio`` (B, T).

    Source: PPO (1707.06347) eq. 7.
    """
    ratio = token_ratio(policy_log_probs, old_log_probs)
    free = ratio * _column(advantages)
    clipped = ratio.clamp(1 - cliprange, 1 + cliprange) * _column(advantages)
    metadata = {"clipped": (clipped < free).to(ratio.dtype).detach(), "ratio": ratio.detach()}
    return -torch.minimum(free, clipped), metadata


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: BasicLoss,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the per-token loss of one of the three basic kinds.

    Args:
        policy_log_probs: (B, T).
        loss_type: ``no_baseline`` needs ``raw_rewards``; ``reinforce_with_baseline`` needs ``advantages``;
            ``grpo_clip`` needs ``advantages``, ``old_log_probs`` and ``cliprange``.
        raw_rewards: (B,) or (B, 1).
        advantages: (B,) or (B, 1).
        old_log_probs: (B, T).
        cliprange: Half the width of the clipping interval.

    Returns:
        The loss (B, T), not reduced, and the metadata of that kind.

    Raises:
        ValueError: Unknown kind, or an argument that the kind needs is missing.
    """
    needs: dict[str, dict[str, object]] = {
        "no_baseline": {"raw_rewards": raw_rewards},
        "reinforce_with_baseline": {"advantages": advantages},
        "grpo_clip": {"advantages": advantages, "old_log_probs": old_log_probs, "cliprange": cliprange},
    }
    if loss_type not in needs:
        raise ValueError(f"unknown loss_type '{loss_type}'; expected one of {', '.join(needs)}")
    arguments: dict[str, Any] = needs[loss_type]
    missing = [name for name, value in arguments.items() if value is None]
    if missing:
        raise ValueError(f"loss_type '{loss_type}' needs {', '.join(missing)}")
    if loss_type == "grpo_clip":
        return compute_grpo_clip_loss(policy_log_probs=policy_log_probs, **arguments)
    (weights,) = arguments.values()
    return compute_naive_policy_gradient_loss(weights, policy_log_probs), {}


def compute_group_normalized_rewards(
    reward_fn: RewardFn,
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[Any],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Score responses and turn the rewards into group advantages.

    Args:
        reward_fn: ``f(response, ground_truth)`` with keys ``reward``, ``format_reward``, ``answer_reward``.
        rollout_responses: B texts, the responses to a question next to each other.
        repeated_ground_truths: B gold answers, each repeated ``group_size`` times.
        group_size: Responses per question.
        advantage_eps: Added to the deviation.
        normalize_by_std: Divide by the group's unbiased deviation (GRPO); False is Dr. GRPO.

    Returns:
        Advantages (B,), raw rewards (B,), and statistics: mean, std, min and max of the reward, the means of the other
        keys, and the share of useful groups.

    Raises:
        ValueError: The two lists differ in length, or their length is no multiple of ``group_size``.
    """
    if len(rollout_responses) != len(repeated_ground_truths):
        raise ValueError(
            f"{len(rollout_responses)} responses for {len(repeated_ground_truths)} ground truths; "
            "repeat each ground truth once per response"
        )
    scores = [reward_fn(r, g) for r, g in zip(rollout_responses, repeated_ground_truths, strict=True)]
    raw = torch.tensor([float(score["reward"]) for score in scores], dtype=torch.float32)
    if group_size < 1 or raw.numel() % group_size:
        raise ValueError(f"{raw.numel()} responses are no multiple of group_size {group_size}")
    grouped = raw.view(-1, group_size)
    if normalize_by_std:
        advantages = group_normalized(grouped, advantage_eps).flatten()
    else:
        advantages = group_centered(grouped).flatten()
    if not scores:
        return advantages, raw, {}
    metadata = {
        "reward_mean": float(raw.mean()),
        "reward_std": float(raw.std()) if len(raw) > 1 else 0.0,
        "reward_min": float(raw.min()),
        "reward_max": float(raw.max()),
        "useful_groups": float(useful_groups(grouped).float().mean()),
    }
    for key in scores[0]:
        if key != "reward":
            metadata[f"{key}_mean"] = sum(float(score[key]) for score in scores) / len(scores)
    return advantages, raw, metadata


# ---- entropy of next-token distributions

_CHUNK_ELEMENTS = 1 << 24
"""Logits worked on at once: 64 MB in float32."""


def _entropy(logits_NV: Tensor) -> Tensor:
    exact = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    # Of a token that cannot occur (a logit of -inf) the finite floor makes the term and its slope 0.
    logp = torch.log_softmax(exact, -1).clamp(min=torch.finfo(exact.dtype).min)
    return torch.linalg.vecdot(logp.exp(), logp).neg()


def compute_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each next-token distribution, in nats.

    Stable for any logits; a logit of -inf is a token that cannot occur. Forward and backward work on one chunk of positions at a
    time; only the logits are kept.

    Args:
        logits: (…, V), not normalised, any float type; computed in float32 (float64 stays).

    Returns:
        (…), float32 or float64, from 0 to log V.
    """
    parts = logits.reshape(-1, logits.shape[-1]).split(max(1, _CHUNK_ELEMENTS // logits.shape[-1]))
    return torch.cat(
        [checkpoint(_entropy, part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    ).view(logits.shape[:-1])


# ---- log-probabilities of given tokens


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log p(label) at each position, without a normalised copy of the logits.

    Args:
        logits: (B, T, V), position t predicts ``labels[:, t]``; computed in float32 (float64 stays).
        labels: (B, T) token ids.
        temperature: Divides the logits; the temperature of sampling.

    Returns:
        (B, T), at most 0.
    """
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    of_labels = scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return of_labels - torch.logsumexp(scaled, dim=-1)


def get_response_log_probs(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    return_token_entropy: bool = False,
    *,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """Run a causal model and return the log-probabilities of the labels, at all positions.

    Args:
        model: Takes ``input_ids``, returns an object with ``logits`` (B, T, V).
        input_ids: (B, T) token ids.
        labels: (B, T), ``input_ids`` shifted by one.
        return_token_entropy: Also return the entropy at each position, without gradient.
        attention_mask: (B, T), 0 for padding; not needed when padding is on the right.
        temperature: The temperature of sampling.

    Returns:
        ``log_probs`` (B, T) and, if asked for, ``token_entropy`` (B, T); prompt and padding included, so mask them.
    """
    extra = {} if attention_mask is None else {"attention_mask": attention_mask}
    logits = model(input_ids=input_ids, **extra).logits
    result = {"log_probs": token_log_probs(logits, labels, temperature)}
    if return_token_entropy:
        with torch.no_grad():
            result["token_entropy"] = compute_entropy(logits / temperature if temperature != 1.0 else logits)
    return result


# ---- direct preference optimisation


def dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> Tensor:
    """Return -log sigmoid(beta · (policy's log-odds - reference's log-odds)).

    Args:
        chosen: Log-probability of the chosen response under the policy, any shape.
        rejected: The same for the rejected response.
        ref_chosen: The same for the chosen response under the reference.
        ref_rejected: The same for the rejected response under the reference.
        beta: Strength of the tie to the reference.

    Returns:
        The loss, the shape of the inputs. Source: DPO (2305.18290) eq. 7.
    """
    return -F.logsigmoid(beta * ((chosen - rejected) - (ref_chosen - ref_rejected)))


def compute_per_instance_dpo_loss(
    lm: Any,
    lm_ref: Any,
    tokenizer: Any,
    beta: float,
    prompt: str,
    response_chosen: str,
    response_rejected: str,
    *,
    template: str = INSTRUCTION_TEMPLATE,
) -> Tensor:
    """Return the DPO loss of one pair of responses.

    Prompt and response are put into ``template`` and closed with the tokenizer's end-of-text token. Only response
    tokens are counted; those of the prompt would cancel.

    Args:
        lm: The policy, a causal model; the gradient flows here.
        lm_ref: The frozen reference.
        tokenizer: The tokenizer of both.
        beta: Strength of the tie to the reference.
        prompt: The instruction.
        response_chosen: The preferred response.
        response_rejected: The other one.
        template: Text with ``{prompt}`` and, at its end, ``{response}``; ``"{prompt}{response}"`` joins them plainly.

    Returns:
        A scalar, on the policy's device.
    """
    head = template.partition("{response}")[0].replace("{prompt}", prompt)
    outputs = [text + (tokenizer.eos_token or "") for text in (response_chosen, response_rejected)]
    batch = tokenize_prompt_and_output([head, head], outputs, tokenizer)

    def scores(model: Any) -> Tensor:
        device = next(model.parameters()).device
        on = {name: tensor.to(device) for name, tensor in batch.items()}
        log_probs = token_log_probs(model(input_ids=on["input_ids"]).logits, on["labels"])
        return (log_probs * on["response_mask"]).sum(-1)

    policy = scores(lm)
    with torch.no_grad():
        reference = scores(lm_ref).to(policy.device)
    return dpo_loss(policy[0], policy[1], reference[0], reference[1], beta)


# ---- one micro-batch: loss, backward, and numbers to log. For people who write their own loop


def sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run backward on the negative log-likelihood of the responses.

    The loss is -Σ_t log p / ``normalize_constant`` per row, averaged over the rows and divided by
    ``gradient_accumulation_steps``. Rows without response tokens add 0 and are counted.

    Args:
        policy_log_probs: (B, T), with gradient.
        response_mask: (B, T), 1 for response tokens.
        gradient_accumulation_steps: Micro-batches per optimiser step; for a last, smaller window its true number.
        normalize_constant: Divides the sum over tokens.

    Returns:
        The scalar that backward ran on (detached), and ``nll_per_token`` and ``response_tokens``.
    """
    per_row = masked_normalize(-policy_log_probs, response_mask, -1, normalize_constant)
    loss = per_row.mean() / gradient_accumulation_steps
    loss.backward()
    tokens = response_mask.bool().sum()
    nll = masked_sum(-policy_log_probs.detach(), response_mask) / tokens.clamp(min=1)
    return loss.detach(), {"nll_per_token": nll, "response_tokens": tokens}


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: BasicLoss,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    *,
    normalize_constant: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run backward on a policy-gradient loss.

    The per-token loss is averaged over each row's response tokens, then over the rows, and divided by
    ``gradient_accumulation_steps``. With ``normalize_constant`` each row's sum is divided by that instead (Dr. GRPO's
    length normalisation). Rows without response tokens add 0 and are counted.

    Args:
        policy_log_probs: (B, T), with gradient.
        response_mask: (B, T), 1 for response tokens.
        gradient_accumulation_steps: Micro-batches per optimiser step.
        loss_type: ``no_baseline``, ``reinforce_with_baseline`` or ``grpo_clip``.
        raw_rewards: (B,) or (B, 1), for ``no_baseline``.
        advantages: (B,) or (B, 1), for the other two.
        old_log_probs: (B, T), for ``grpo_clip``.
        cliprange: For ``grpo_clip``.
        normalize_constant: Divisor of each row's sum; None takes the row's number of tokens.

    Returns:
        The scalar that backward ran on (detached), and the means over response tokens of the kind's metadata.

    Raises:
        ValueError: An argument that the kind needs is missing.
    """
    inside = torch.where(response_mask.bool(), policy_log_probs, torch.zeros_like(policy_log_probs))
    if old_log_probs is not None:
        old_log_probs = torch.where(response_mask.bool(), old_log_probs, torch.zeros_like(old_log_probs))
    per_token, metadata = compute_policy_gradient_loss(
        inside, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    if normalize_constant is None:
        per_row = masked_sum(per_token, response_mask, -1) / response_mask.bool().sum(-1).clamp(min=1)
    else:
        per_row = masked_normalize(per_token, response_mask, -1, normalize_constant)
    loss = per_row.mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), {name: masked_mean(value, response_mask) for name, value in metadata.items()}
