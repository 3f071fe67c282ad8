"""Policy-gradient losses: a value per token, and how the tokens are reduced to the number that is minimised.

Tensors are (B, T): B completions, T completion positions; ``mask`` is true for the tokens that count (padding, and tokens the
policy did not write, do not). Advantages are (B, T), or (B, 1) where all tokens of a completion share one. A loss is minimised,
hence the minus. ``policy_loss`` agrees with TRL 1.16's ``GRPOTrainer._compute_loss``, value and gradient.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from algorist.errors import ConfigError, nearest
from algorist.objectives.advantages import Advantage
from algorist.objectives.masks import masked_sum
from algorist.objectives.ratios import k3, log_ratio, sequence_ratio, token_ratio
from algorist.objectives.reductions import Reduction, token_weights
from algorist.parameters import REQUIRED, Parameter, check_values, parameters_of
from algorist.user_code import load_function
from algorist_grader.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

Importance = Literal["token", "sequence"]
Positive = Annotated[float, Field(gt=0, le=1e6)]
LossFunction = Callable[..., Any]
TENSORS = ("log_probs", "old_log_probs", "advantages", "mask")
"""Batch tensors that a loss receives, by name."""


@dataclass(frozen=True)
class Loss:
    """A loss: its function, how that is set, its reduction, and whether a completion of advantage 0 adds exactly nothing to it."""

    name: str
    function: LossFunction
    reduction: Reduction
    zero_advantage_adds_nothing: bool = False
    prefix: str = ""
    """Put before the names of its metrics."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values of its parameters, where they are not the function's own defaults."""

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Settable parameters: the function's arguments beyond the batch's tensors."""
        own = parameters_of(self.function, without=TENSORS)
        return {name: replace(p, default=self.settings.get(name, p.default)) for name, p in own.items()}

    @property
    def importance(self) -> Importance:
        """Whether its ratios are per token, or per sequence as it is set to."""
        own = self.parameters.get("importance")
        return own.default if own else "token"  # type: ignore[no-any-return]

    def with_settings(self, values: Mapping[str, Any]) -> Loss:
        """Return the loss with these values of its parameters.

        Raises:
            ConfigError: A parameter that this loss does not have, a value of another type, or a parameter without a default.
        """
        own = self.parameters
        missing = [name for name, parameter in own.items() if parameter.default is REQUIRED]
        if missing:
            raise ConfigError(
                f"the loss '{self.name}' asks for {', '.join(missing)}.{nearest(missing[0], TENSORS)} It gets "
                f"{', '.join(TENSORS)} by name; give every other parameter a default value"
            )
        checked = check_values(own, values, of=f"the loss '{self.name}'", key="grpo.loss")
        return replace(self, settings={**self.settings, **checked})


@dataclass(frozen=True)
class Objective:
    """Objective of a step: the loss, the advantage and their weights.

    Attributes:
        loss: A registered or own loss with its settings.
        advantage: Turns rewards (P, G) into advantages (P, G).
        reward_weights: Each reward's weight in the sum, for advantages of single rewards.
        entropy_bonus: Weight of the entropy, which is subtracted from the loss of each token.
        longest: The longest possible completion in tokens, for ``seq-mean-token-sum-norm``.
        mask_truncated: Completions that the length limit ended do not count.
        skip: Leave out completions of advantage 0 where that is exact.
    """

    loss: Loss
    advantage: Advantage
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    entropy_bonus: float = 0.0
    longest: int = 256
    mask_truncated: bool = False
    skip: bool = True


LOSSES: Registry[Loss] = Registry("loss")


def loss(
    name: str,
    *,
    reduction: Reduction = "token-mean",
    zero_advantage_adds_nothing: bool = False,
    **settings: Any,
) -> Callable[[LossFunction], LossFunction]:
    """Register a loss as ``grpo.loss: name``; the function itself stays as it is.

    The function takes by name what it needs of ``log_probs`` (B, T) with gradient, ``old_log_probs`` (B, T), ``advantages``
    (B, T), ``mask`` (B, T). Its other arguments are its parameters: a recipe sets them in ``grpo.loss``, their defaults, types
    and meanings are those of the signature and the docstring. It returns the loss per token (B, T) or (B, 1), or that and a
    dictionary of metrics: (B, T) is logged as a mean over tokens, (B,) over completions.

    Args:
        name: The name in recipes.
        reduction: How the values per token are reduced, see ``token_weights``.
        zero_advantage_adds_nothing: Completions of advantage 0 need not be computed: they add 0 to loss, gradient and metrics.
        **settings: Values of the function's parameters under this name, where they are not its defaults.
    """

    def decorate(function: LossFunction) -> LossFunction:
        made = Loss(name, function, reduction, zero_advantage_adds_nothing)
        LOSSES.register(name)(made.with_settings(settings) if settings else made)
        # The innermost decorator tells what a function that is named by its file means.
        if not hasattr(function, "loss"):
            function.loss = LOSSES.get(name)  # type: ignore[attr-defined]
        return function

    return decorate


_exact = partial(loss, zero_advantage_adds_nothing=True)


def loss_named(loss: Loss | LossFunction | str) -> Loss:
    """Return a loss by name, by ``file.py:function``, or that of a function (``token-mean`` without ``@loss``).

    Raises:
        ConfigError: Unknown name, or a file that cannot be used.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str) and ".py:" in loss:
        function = load_function(loss, "grpo.loss")
        return replace(loss_named(function), name=loss, function=function, prefix="loss/")
    if isinstance(loss, str):
        return LOSSES.get(loss)
    declared = getattr(loss, "loss", None)
    return declared if isinstance(declared, Loss) else Loss(loss.__name__, loss, "token-mean")


def probe_loss(loss: Loss) -> None:
    """Compute a loss on two made-up completions, so that what is wrong with a user's function is said before anything is loaded.

    Raises:
        ConfigError: It raises, returns another shape or kind, or does not depend on ``log_probs``.
    """
    import torch

    log_probs = torch.full((2, 3), -1.0, requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    old, advantages = log_probs.detach() - 0.1, torch.tensor([1.0, -1.0])
    per_token, _ = token_losses(log_probs, advantages, mask, loss=loss, old_log_probs=old)
    if not per_token.requires_grad:
        raise ConfigError(
            f"the loss '{loss.name}' does not depend on log_probs, so nothing can be learned from it"
        )


def ratio_of(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, importance: Importance) -> Tensor:
    """Return π / π_old per token (B, T), or of whole completions (B, 1)."""
    if importance == "sequence":
        return sequence_ratio(log_probs, old_log_probs, mask)
    return token_ratio(log_probs, old_log_probs, mask)


@_exact("gspo", reduction="seq-mean-token-mean", importance="sequence", clip_low=3e-4, clip_high=4e-4)
@_exact("luspo", reduction="seq-mean-token-sum", importance="sequence", clip_low=2e-3, clip_high=2.5e-3)
@_exact("grpo", reduction="seq-mean-token-mean")
@_exact("bnpo", reduction="micro-batch-token-mean")
@_exact("dr_grpo", reduction="seq-mean-token-sum-norm")
@_exact("dapo", reduction="token-mean")
def clipped_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    importance: Importance = "token",
    clip_low: Positive = 0.2,
    clip_high: Positive = 0.2,
    delta: Annotated[float, Field(gt=1, le=1e6)] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -min(ratio·A, clip(ratio, 1 - clip_low, 1 + clip_high)·A): PPO's clipped objective, GRPO's loss.

    GSPO takes one ratio per sequence, with the far narrower clip that such ratios need; so does LUSPO, whose reduction weighs a
    completion by its length.

    Args:
        importance: Ratios per token or per sequence.
        clip_low: Lower clipping distance of the ratio.
        clip_high: Upper clipping distance of the ratio.
        delta: Also caps the unclipped ratio itself (two-sided clipping, INTELLECT-2); above 1 + ``clip_high``.

    Source: PPO (1707.06347) eq. 7, GRPO (2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783),
    GSPO (2507.18071) eq. 5 and section 5.1, LUSPO (2602.05261) and its section 5.1.
    """
    ratio = ratio_of(log_probs, old_log_probs, mask, importance)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    free = (ratio if delta is None else ratio.clamp(max=delta)) * advantages
    return -free.minimum(clipped), _clip_metrics(ratio.detach(), advantages, mask, clip_low, clip_high)


def _clip_metrics(
    ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> dict[str, Tensor]:
    """Mark clipped tokens, under TRL's names: below with a negative, above with a positive advantage."""
    if ratio.shape[1] == 1:  # one ratio for a completion, and one number for it
        advantages = _row_mean(advantages, mask)[:, None]
    low = ((ratio < 1 - clip_low) & (advantages < 0)).to(ratio.dtype)
    high = ((ratio > 1 + clip_high) & (advantages > 0)).to(ratio.dtype)
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "clip_ratio/low_min": _row_mean(low, mask),
        "clip_ratio/high_max": _row_mean(high, mask),
    }


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over a completion's tokens, (B,), of values (B, T) or (B, 1)."""
    if values.shape[1] == 1:
        return values.squeeze(1)
    return masked_sum(values, mask, -1) / mask.sum(-1).clamp(min=1)


@_exact("nll", reduction="token-mean")
def negative_log_likelihood(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Return -A·log p: supervised fine-tuning with advantages of 1, else REINFORCE without a ratio."""
    return -advantages * log_probs


@_exact("cispo", reduction="token-mean")
def capped_reinforce(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    importance: Importance = "token",
    clip_high: Positive = 5.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -min(ratio, clip_high)·A·log p with the capped ratio as a constant weight.

    Args:
        importance: Ratios per token or per sequence.
        clip_high: The greatest weight itself, not a distance from 1, as in TRL.

    Source: CISPO (2506.13585) eq. 4.
    """
    ratio = ratio_of(log_probs, old_log_probs, mask, importance).detach()
    capped = ((ratio > clip_high) & (advantages > 0)).to(ratio.dtype)
    return -ratio.clamp(max=clip_high) * advantages * log_probs, {"cispo_clip_ratio": capped}


@_exact("sapo", reduction="seq-mean-token-mean")
def soft_clipped_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    importance: Importance = "token",
    temperature_pos: Positive = 1.0,
    temperature_neg: Positive = 1.05,
) -> Tensor:
    """Return -4/τ·sigmoid(τ·(ratio - 1))·A, τ by the sign of the advantage: a soft gate instead of the clip.

    Args:
        importance: Ratios per token or per sequence.
        temperature_pos: τ where the advantage is above 0.
        temperature_neg: τ elsewhere.

    Source: SAPO (2511.20347) eq. 6.
    """
    positive = (advantages > 0).to(log_probs.dtype)
    heat = positive * temperature_pos + (1 - positive) * temperature_neg
    ratio = ratio_of(log_probs, old_log_probs, mask, importance)
    return -(heat * (ratio - 1)).sigmoid() * 4 / heat * advantages


@loss("vespo", reduction="token-mean")
def gamma_weighted_reinforce(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    k_pos: Positive = 2.0,
    lambda_pos: Positive = 3.0,
    k_neg: Positive = 3.0,
    lambda_neg: Positive = 2.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -φ(w)·A·log p with φ(w) = e^λ·w^k·e^(-λw) of the sequence's ratio w as a constant weight.

    Args:
        k_pos: k where the advantage is not negative.
        lambda_pos: λ there.
        k_neg: k where the advantage is negative.
        lambda_neg: λ there.

    Source: VESPO (2602.10693), as in TRL.
    """
    least = math.log(1e-8)
    log_w = masked_sum(log_ratio(log_probs, old_log_probs, mask).clamp(-20.0, 20.0), mask, -1)
    log_w = log_w.detach().clamp(least, 20.0).unsqueeze(-1)
    positive = (advantages >= 0).to(log_probs.dtype)
    k = positive * k_pos + (1 - positive) * k_neg
    rate = (positive * lambda_pos + (1 - positive) * lambda_neg).clamp(min=1e-4)
    phi = (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return -phi * advantages * log_probs, {"vespo/phi_seq_mean": _row_mean(phi, mask)}


def token_losses(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss: Loss | LossFunction | str = "dapo",
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    beta: float = 0.0,
    unbiased_kl: bool = False,
    sampler_weights: Tensor | None = None,
    **parameters: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each token and the metrics of the loss.

    Args:
        log_probs: (B, T) under the policy, with gradient.
        advantages: (B,), (B, 1) or (B, T).
        mask: (B, T), true for the tokens that count.
        loss: A registered loss, its name, or a function.
        old_log_probs: (B, T) under the policy that sampled; None means exactly on-policy (ratio 1, with gradient).
        ref_log_probs: (B, T) under the reference, needed when ``beta`` is not 0.
        beta: Weight of the k3 penalty, added per token.
        unbiased_kl: Multiply the penalty by the ratio, so that its gradient is that of the true KL (DeepSeek-V3.2, 2512.02556).
        sampler_weights: (B, T) or (B, 1), the correction for the sampler (``ratios.sampler_weights``).
        **parameters: Parameters of the loss (``clip_low``, ``importance``, …), in place of those that it is set to.

    Returns:
        The loss (B, T), 0 outside the mask whatever the tensors hold there, and the metrics, ``kl`` among them with ``beta``.

    Raises:
        ConfigError: Unknown loss.
        ValueError: ``beta`` without ``ref_log_probs``.
    """
    entry = loss_named(loss)
    if beta and ref_log_probs is None:
        raise ValueError(f"beta is {beta} and ref_log_probs is missing; pass them, or set beta=0")
    mask = mask.bool()
    log_probs = log_probs.masked_fill(~mask, 0.0)  # a NaN in the padding must not reach the gradient
    values = {
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach() if old_log_probs is None else old_log_probs,
        "advantages": advantages.unsqueeze(1) if advantages.dim() == 1 else advantages,
        "mask": mask,
    }
    takes, settings = inspect.signature(entry.function).parameters, {**entry.settings, **parameters}
    result = entry.function(**{k: v for k, v in values.items() if k in takes}, **settings)
    per_token, metrics = _checked(entry, result, mask)
    metrics = {entry.prefix + name: value for name, value in metrics.items()}
    if sampler_weights is not None:
        per_token = per_token * sampler_weights
    if beta and ref_log_probs is not None:
        kl = k3(log_probs, ref_log_probs.masked_fill(~mask, 0.0))
        if unbiased_kl:
            level = replace(entry, settings=settings).importance
            kl = kl * ratio_of(log_probs, values["old_log_probs"], mask, level)
        per_token, metrics = per_token + beta * kl, metrics | {"kl": kl.detach()}
    return per_token.expand_as(log_probs).masked_fill(~mask, 0.0), metrics


def _checked(entry: Loss, result: Any, mask: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
    """Split a loss's result into loss per token and metrics; refuse another kind or shape (ConfigError)."""
    rows, width = mask.shape
    per_token, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    said = _kind(per_token)
    if said not in (f"shape {(rows, width)}", f"shape {(rows, 1)}"):
        raise ConfigError(
            f"the loss '{entry.name}' returned {said}; expected the loss per token, {(rows, width)} like log_probs, or "
            f"({rows}, 1), alone or with a dictionary of metrics: it is averaged afterwards (reduction {entry.reduction})"
        )
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"the loss '{entry.name}' returned metrics as {_kind(metrics)}; expected a dictionary of numbers and tensors by name"
        )
    for name, value in metrics.items():
        plain = isinstance(value, (int, float)) or _kind(value) in ("shape ()", "shape (1,)")
        if not plain and _kind(value) not in [f"shape {s}" for s in ((rows, width), (rows, 1), (rows,))]:
            raise ConfigError(
                f"the loss '{entry.name}' returned the metric '{name}' as {_kind(value)}; expected a number, one for each "
                f"completion ({rows},), or one for each token {(rows, width)}"
            )
    return per_token, metrics


def _kind(value: Any) -> str:
    """Return the shape of a tensor of real numbers, what another tensor holds, or the type of anything else."""
    if isinstance(value, tuple):
        return f"{len(value)} values"
    if not hasattr(value, "shape") or not hasattr(value, "is_complex"):
        return type(value).__name__
    return f"{value.dtype}".removeprefix("torch.") if value.is_complex() else f"shape {tuple(value.shape)}"


def policy_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss: Loss | LossFunction | str = "dapo",
    denominator: float | Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """Return the loss of a batch: ``token_losses`` reduced with ``token_weights``.

    Args:
        log_probs: (B, T) under the policy, with gradient.
        advantages: (B,), (B, 1) or (B, T).
        mask: (B, T), true for the tokens that count.
        loss: A registered loss, its name, or a function.
        denominator: See ``token_weights``.
        **settings: The other arguments of ``token_losses``.

    Returns:
        A scalar; 0 for a batch without tokens.
    """
    entry = loss_named(loss)
    per_token, _ = token_losses(log_probs, advantages, mask, loss=entry, **settings)
    weights = token_weights(mask, entry.reduction, denominator=denominator, like=per_token)
    return (per_token * weights).sum()
