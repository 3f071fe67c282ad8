"""The exact divergence of two next-token distributions at the language-model head, chunk by chunk: (tokens × V) is never held.

With p the student's and q the teacher's probabilities, m = (1 - β)·p + β·q, and z the student's logits:

    β = 1   reverse KL   D = Σ p·(log p - log q)                        ∂D/∂z_v = p_v·(log p_v - log q_v - D)
    β = 0   forward KL   D = Σ q·(log q - log p)                        ∂D/∂z_v = p_v - q_v
    else    JSD(β)       D = β·KL(q ‖ m) + (1 - β)·KL(p ‖ m)            ∂D/∂z_v = (1 - β)·p_v·(log p_v - log m_v - KL(p ‖ m))

``top_k`` compares k + 1 outcomes: the teacher's k likeliest tokens, and one for all others. Spreading the teacher's remaining mass over
these in the student's proportions gives that divergence and its gradient in the formulas above.

Source: GKD (2306.13649), eq. 1 for the generalised JSD; β as in TRL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from algorist.models.products import row_bucket, times_transposed
from algorist.training.lm_head import CACHE_BYTES, CHUNK_ELEMENTS, AtHead, head_logits, parts

TeacherLogs = Callable[[Tensor, Tensor], Tensor]
"""Numbers of the teacher for n tokens (``Batch.extra``), the student's log-probs (n, R) → the teacher's (n, R)."""


class Divergence(NamedTuple):
    """Comparison of the student's states with a teacher.

    Attributes:
        targets_N: The sampled tokens.
        numbers_N: The teacher's numbers for them.
        teacher_logs: Makes its log-probs from these.
        rows: Rows R of the vocabulary that are compared; those of the student's head beyond them have no gradient.
        beta: 1 for the reverse KL, 0 for the forward one, between them the generalised JSD.
        inverse_temperature: Factor of the student's logits.
        dtype: Of the products.
        cache: Keep each chunk's slope for the backward pass; else it is computed again.
    """

    targets_N: Tensor
    numbers_N: Tensor
    teacher_logs: TeacherLogs
    rows: int
    beta: float
    inverse_temperature: float
    dtype: torch.dtype
    cache: bool

    def logs(self, hidden: Tensor, head: Head, part: slice) -> tuple[Tensor, Tensor]:
        """Return the log-probs (n, R) of student and teacher."""
        student = _logs(hidden[part], *head, self.rows, self.inverse_temperature)
        return student, self.teacher_logs(self.numbers_N[part], student)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor | None, bias_V: Tensor | None, compared: Divergence
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V)
        ctx.compared, ctx.slopes = compared, []
        ctx.set_materialize_grads(False)
        head, columns = _cut(weight_VH, bias_V, compared.rows, compared.dtype), []
        for part in _chunks(len(hidden_NH), compared.rows):
            student, teacher = compared.logs(hidden_NH, head, part)
            same = (student.argmax(1) == teacher.argmax(1)).float()
            value, slope = divergence(student, teacher, compared.beta)
            if compared.cache:
                ctx.slopes.append(slope)
            columns.append((value, teacher.gather(1, compared.targets_N[part, None])[:, 0], same))
        values, of_target, agree = (torch.cat(column) for column in zip(*columns, strict=True))
        ctx.mark_non_differentiable(of_target, agree)
        return values, of_target, agree

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grads[0] is None:
            return None, None, None, None
        hidden, weight, bias = saved = ctx.saved_tensors
        compared: Divergence = ctx.compared
        rows, dtype = compared.rows, compared.dtype
        # Sums over tokens run in float32, as in the head's own backward.
        grad_hidden, grad_weight, grad_bias = sums = [
            torch.zeros_like(tensor, dtype=torch.float32) if needed else None
            for tensor, needed in zip(saved, ctx.needs_input_grad, strict=False)
        ]
        slopes, ctx.slopes = ctx.slopes, []
        head = products, _ = _cut(weight, bias, rows, dtype)
        for index, part in enumerate(_chunks(len(hidden), rows)):
            if slopes:
                slope, slopes[index] = slopes[index], None
            else:
                slope = divergence(*compared.logs(hidden, head, part), compared.beta)[1]
            slope *= grads[0][part, None] * compared.inverse_temperature
            if grad_bias is not None:
                grad_bias[:rows] += slope.sum(0)
            if products is None:  # hidden are logits
                grad_hidden[part, :rows] = slope  # type: ignore[index]
                continue
            slope = slope.to(dtype)
            if grad_hidden is not None:
                grad_hidden[part] = times_transposed(slope, products.t())
            if grad_weight is not None:
                grad_weight[:rows] += (slope.t() @ hidden[part].to(dtype)).float()
        return (*(None if s is None else s.to(of.dtype) for s, of in zip(sums, saved, strict=True)), None)


def divergence(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the divergence (n,) of log-probs (n, R) and its slope (n, R) in the student's logits."""
    p = student.exp()
    if beta == 1:
        gap = student - teacher
        value = (p * gap).sum(1)
        return value, p.mul_(gap.sub_(value[:, None]))
    if beta == 0:
        q = teacher.exp()
        return (q * (teacher - student)).sum(1), p.sub_(q)
    middle = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
    to_middle = (p * (student - middle)).sum(1)
    value = beta * (teacher.exp() * (teacher - middle)).sum(1) + (1 - beta) * to_middle
    return value, (1 - beta) * p * (student - middle - to_middle[:, None])


def at_head(at: AtHead, numbers_M: Tensor, teacher_logs: TeacherLogs, *, rows: int, beta: float) -> Tensor:
    """Return (M, 3): the divergence with its gradient, the teacher's log-prob of the target, 1 where both hold one token likeliest.

    Args:
        at: The student's head.
        numbers_M: What the teacher said of the M tokens: states (M, H), or rows of ``top_of``.
        teacher_logs: ``from_states`` or ``from_top``.
        rows: Rows R of the vocabulary that are compared.
        beta: 1 for the reverse KL, 0 for the forward one, between them the generalised JSD.
    """
    size, device = len(at.targets_M), at.hidden_MH.device.type
    mixed = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if mixed else at.hidden_MH.dtype
    fill = row_bucket(size) - size if device == "cpu" else 0  # few distinct sizes of products
    hidden, numbers = (F.pad(tensor, (0, 0, 0, fill)) for tensor in (at.hidden_MH, numbers_M))
    targets, factor = F.pad(at.targets_M, (0, fill)), 1.0 / at.temperature
    cache = torch.is_grad_enabled() and len(hidden) * rows * 4 <= CACHE_BYTES
    compared = Divergence(targets, numbers, teacher_logs, rows, beta, factor, dtype, cache)
    with torch.autocast(device, enabled=False) if device != "meta" else nullcontext():
        values = _Divergence.apply(hidden, at.weight_VH, at.bias_V, compared)
    return torch.stack(values, 1)[:size]


def from_states(weight_VH: Any, bias_V: Tensor | None, rows: int, temperature: float) -> TeacherLogs:
    """Return the ``TeacherLogs`` of the teacher's hidden states, over the whole vocabulary."""
    head = _cut(weight_VH, bias_V, rows, weight_VH.dtype)
    return lambda states_NH, _: _logs(states_NH, *head, rows, 1.0 / temperature)


def from_top(top_NK: Tensor, student: Tensor) -> Tensor:
    """Return the teacher's log-probs from the rows of ``top_of``, the rest in the student's proportions."""
    k = (top_NK.shape[1] - 2) // 2
    ids = top_NK[:, 2 : 2 + k].long()
    rest = student.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True).clamp_min(LEAST)
    return (student + (top_NK[:, :1] - rest)).scatter(1, ids, top_NK[:, 2 + k :])


LEAST = -80.0
"""Log-mass below which the rest of a vocabulary counts as so much."""


Head = tuple[Tensor | None, Tensor | None]
"""Weight and bias; none where the logits themselves are given."""


@torch.no_grad()
def top_of(at: AtHead, k: int, rows: int) -> Tensor:
    """Return (M, 2 + 2k) in float32: log-mass of all but the k likeliest tokens, log-prob of the target, their ids, their log-probs."""
    head = _cut(at.weight_VH, at.bias_V, rows, at.hidden_MH.dtype)

    def top(part: slice) -> Tensor:
        logs = _logs(at.hidden_MH[part], *head, rows, 1.0 / at.temperature)
        best, ids = logs.topk(min(k, rows), 1)
        of_target = logs.gather(1, at.targets_M[part, None])
        rest = logs.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True).clamp_min(LEAST)
        return torch.cat([rest, of_target, ids.float(), best], 1)  # ids below 2²⁴ are exact

    return torch.cat([top(part) for part in _chunks(len(at.targets_M), rows)])


@torch.no_grad()
def mass_beyond(at: AtHead, rest: Head, rows: int) -> Tensor:
    """Return (M,): the share of mass that a teacher puts on rows that its head was cut by."""

    def log_mass(part: slice, weight: Any, bias: Tensor | None) -> Tensor:
        hidden = at.hidden_MH[part].to(weight.dtype)
        return (F.linear(hidden, weight.to(hidden.device), bias).float() / at.temperature).logsumexp(1)

    chunks = _chunks(len(at.targets_M), rows)
    return torch.cat([log_mass(c, *rest) - log_mass(c, at.weight_VH, at.bias_V) for c in chunks]).sigmoid()


def _chunks(size: int, rows: int) -> list[slice]:
    """Return parts of ``size`` tokens whose logits may be held at once."""
    return parts(0, size, CHUNK_ELEMENTS // rows)


def _cut(weight_VH: Tensor | None, bias_V: Tensor | None, rows: int, dtype: torch.dtype) -> Head:
    weight = None if weight_VH is None else weight_VH[:rows].to(dtype)
    return weight, None if bias_V is None else bias_V[:rows]


def _logs(
    hidden: Tensor, weight: Tensor | None, bias: Tensor | None, rows: int, inverse_temperature: float
) -> Tensor:
    logits = hidden[:, :rows] if weight is None else head_logits(hidden, weight, bias)
    return torch.log_softmax(logits.float() * inverse_temperature, -1)
