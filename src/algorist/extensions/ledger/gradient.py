"""The gradient of a step told apart by term, on a bounded part of it.

Of the completions of one prompt, up to ``TOKENS`` tokens, with g_j the gradient of term j of the loss alone and g = Σ_j g_j:

    share of term j    g_j·g / g·g      adds up to 1
    norm of term j     ‖g_j‖
    cosine             of g with the gradient of the advantages of ``correct`` alone
    counted            share of the tokens of a completion that the loss reaches to which its gradient comes

Terms are ``rewards`` (the advantages as rewards made them), ``added`` (what extensions changed of these), ``entropy`` and each extension
that adds to the loss, by name. Nothing is left in the parameters' gradients, and no random number is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from algorist.extensions.ledger import BY_REWARD, CORRECT
from algorist.models.precision import on_gpu
from algorist.models.sharding import is_sharded
from algorist.objectives import token_losses
from algorist.training.batch import Batch
from algorist.training.extension import Extension
from algorist.training.metrics import Metrics
from algorist.training.objective import LossInputs, of_heads

TOKENS = 256
"""Tokens of the part: a step of a small model has some thousands."""
WEIGHTS = 1 << 21
"""Weights whose gradient is computed, the last ones of the model before its head where it has more."""


def last_weights(model: Any, most: int = WEIGHTS) -> list[Any]:
    """Return the trained parameters from the last on, up to so many elements; one that is larger alone is left out."""
    last, left = [], most
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
        if parameter.numel() <= left:
            last.append(parameter)
            left -= parameter.numel()
    return last


def measured(batch: Batch, trainer: Any) -> dict[str, float]:
    """Return shares of terms and the cosine with ``correct``; empty where there is one term and one reward, or they cannot be measured.

    Args:
        batch: The completions of the step, with ``ledger/by_reward`` and ``ledger/correct`` where these differ from the advantages.
        trainer: Has the policy, the objective and the extensions.
    """
    rows = [row for row in range(len(batch)) if bool(batch.mask[row].any())]
    parts = batch.parts(batch.in_group_order(rows), most_rows=len(rows), most_tokens=TOKENS)
    parameters = last_weights(trainer.model)
    if not parts or not parameters:
        return {}
    weights = trainer.weights_of(batch)[parts[0]]
    piece = batch.take(parts[0])
    device = parameters[0].device
    with torch.random.fork_rng(devices=[device] if on_gpu(device) else []), torch.enable_grad():
        terms, correct, counted = _terms(piece, trainer, weights[:, : piece.width])
        if len(terms) < 2 and correct is None:
            return counted
        named = terms if correct is None else {**terms, CORRECT: correct}
        gradients = {name: _gradient(term, parameters) for name, term in named.items()}
    return numbers_of(gradients) | counted


def numbers_of(gradients: dict[str, Tensor]) -> dict[str, float]:
    """Return ``share/NAME`` and ``norm/NAME`` of each term, and ``cosine`` of the whole with ``correct``, of flat gradients in float64."""
    correct = gradients.pop(CORRECT, None)
    whole = torch.stack([*gradients.values()]).sum(0)
    size, values = float(whole @ whole), {}
    if size > 0 and len(gradients) > 1:
        values = {f"share/{name}": float(term @ whole) / size for name, term in gradients.items()}
        values |= {f"norm/{name}": float(term.norm()) for name, term in gradients.items()}
    if size > 0 and correct is not None and float(correct.norm()) > 0:
        values["cosine"] = float(whole @ correct / (whole.norm() * correct.norm()))
    return values


def _gradient(term: Tensor, parameters: Sequence[Any]) -> Tensor:
    parts = torch.autograd.grad(term, parameters, retain_graph=True, allow_unused=True)
    filled = (torch.zeros_like(p) if g is None else g for p, g in zip(parameters, parts, strict=True))
    return torch.cat([part.detach().double().flatten() for part in filled])


def why_not(trainer: Any) -> str:
    """Return the reason the gradient of a trainer is not told apart, or an empty string."""
    if trainer.processes > 1 or is_sharded(trainer.model_wrapped):
        return "several processes share the step"
    if trainer.section.gradient_checkpointing:
        return "layers are recomputed"
    if trainer.args.fp16:
        return "float16 gradients are scaled"
    foreign = [
        e.name
        for e in trainer.extensions
        if type(e).loss is not Extension.loss and not type(e).__module__.startswith("algorist.")
    ]
    return f"the extension {foreign[0]} may count what its loss is called for" if foreign else ""


def _terms(
    piece: Batch, trainer: Any, weights: Tensor
) -> tuple[dict[str, Tensor], Tensor | None, dict[str, float]]:
    """Return the loss of each term alone and that of ``correct``, with one graph; and ``counted`` of the loss alone."""
    by_reward = piece.extra.get(BY_REWARD, piece.advantages)
    objective, extensions = trainer.objective, trainer.extensions
    log_probs, entropy = trainer.passes.log_probs(
        trainer.model_wrapped, piece, compute_entropy=True, of_head=of_heads(extensions, piece)
    )
    inputs = LossInputs(log_probs, entropy, piece, weights, Metrics())
    terms: dict[str, Tensor] = {}

    def put(name: str, per_token: Tensor) -> None:
        terms[name] = (per_token.masked_fill(~piece.mask, 0.0) * weights).sum()

    for extension in extensions:
        before = len(inputs.terms)
        extension.loss(inputs)
        if added := inputs.terms[before:]:
            put(extension.name, torch.stack([term.expand_as(log_probs) for term in added]).sum(0))
    factors = piece.policy_weights
    for factor in inputs.factors:
        factors = factor if factors is None else factors * factor

    def policy(advantages: Tensor) -> Tensor:
        return token_losses(
            log_probs, advantages, piece.mask, loss=objective.loss, old_log_probs=piece.old_log_probs,
            sampler_weights=factors,
        )[0]  # fmt: skip

    rewards = policy(by_reward)
    put("rewards", rewards)
    total = rewards.sum() if rewards.requires_grad else log_probs.sum() * 0
    (slope,) = torch.autograd.grad(total, log_probs, retain_graph=True, allow_unused=True)
    reached = torch.zeros_like(piece.mask) if slope is None else slope != 0
    paid = piece.mask & (by_reward != 0) & reached.any(1, keepdim=True)
    paid = paid if factors is None else paid & (factors != 0)
    counted = {"counted": float(reached[paid].double().mean())} if bool(paid.any()) else {}
    if not torch.equal(by_reward[piece.mask], piece.advantages[piece.mask]):
        put("added", policy(piece.advantages) - rewards)
    bonus = objective.entropy_bonus + sum(e.entropy_bonus for e in extensions)
    if bonus and entropy is not None:
        put("entropy", -bonus * entropy)
    if (right := piece.extra.get(CORRECT)) is None or not bool(right.any()):
        return terms, None, counted
    put(CORRECT, policy(right))
    return terms, terms.pop(CORRECT), counted
