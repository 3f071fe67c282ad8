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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from algorist.models.products import row_bucket, times_transposed
from algorist.training.lm_head import CACHE_BYTES, CHUNK_ELEMENTS, AtHead, head_log_softmax

TeacherLogs = Callable[[int, int, Tensor], Tensor]
"""First and last token, the student's log-probs (n, R) → the teacher's (n, R)."""


class _Divergence(torch.autograd.Function):
    """Rows beyond R = ``rows`` of the student's head are left out, their gradient is 0."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor | None,
        bias_V: Tensor | None,
        targets_N: Tensor,
        teacher_logs: TeacherLogs,
        rows: int,
        beta: float,
        inverse_temperature: float,
        chunk: int,
        cache: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V)
        ctx.settings = teacher_logs, rows, beta, inverse_temperature, chunk, dtype
        ctx.slopes = []
        ctx.set_materialize_grads(False)
        size = hidden_NH.shape[0]
        values = torch.empty(size, dtype=torch.float32, device=hidden_NH.device)
        of_target, agree = torch.empty_like(values), torch.empty_like(values)
        head = _cut(weight_VH, bias_V, rows, dtype)
        for start in range(0, size, chunk):
            stop = min(start + chunk, size)
            student = _logs(hidden_NH[start:stop], *head, rows, inverse_temperature)
            teacher = teacher_logs(start, stop, student)
            values[start:stop], slope = divergence(student, teacher, beta)
            if cache:
                ctx.slopes.append(slope)
            of_target[start:stop] = teacher.gather(1, targets_N[start:stop, None]).squeeze(1)
            agree[start:stop] = (student.argmax(1) == teacher.argmax(1)).float()
        ctx.mark_non_differentiable(of_target, agree)
        return values, of_target, agree

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grads[0] is None:
            return (None,) * 11
        hidden, weight, bias = ctx.saved_tensors
        teacher_logs, rows, beta, inverse_temperature, chunk, dtype = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Sums over tokens run in float32, as in the head's own backward.
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        slopes, ctx.slopes = ctx.slopes, []
        head = products, _ = _cut(weight, bias, rows, dtype)
        for index, start in enumerate(range(0, hidden.shape[0], chunk)):
            part = hidden[start : start + chunk]
            if slopes:
                slope, slopes[index] = slopes[index], None
            else:
                student = _logs(part, *head, rows, inverse_temperature)
                slope = divergence(student, teacher_logs(start, start + len(part), student), beta)[1]
            slope *= grads[0][start : start + chunk, None] * inverse_temperature
            if grad_bias is not None:
                grad_bias[:rows] += slope.sum(0)
            if products is None:
                if grad_hidden is not None:
                    grad_hidden[start : start + chunk, :rows] = slope
                continue
            slope = slope.to(dtype)
            if grad_hidden is not None:
                grad_hidden[start : start + chunk] = times_transposed(slope, products.t())
            if grad_weight is not None:
                grad_weight[:rows] += (slope.t() @ part.to(dtype)).float()
        return (
            grad_hidden.to(hidden.dtype) if grad_hidden is not None else None,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *([None] * 8),
        )


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


def at_head(at: AtHead, teacher_logs: TeacherLogs, *, rows: int, beta: float) -> Tensor:
    """Return (M, 3): the divergence with its gradient, the teacher's log-prob of the target, 1 where both hold one token likeliest.

    Args:
        at: The student's head.
        teacher_logs: Gives the teacher's log-probs of a chunk; it is asked for up to ``row_bucket(M)`` tokens.
        rows: Rows R of the vocabulary that are compared.
        beta: 1 for the reverse KL, 0 for the forward one, between them the generalised JSD.
    """
    hidden, targets, size = at.hidden_MH, at.targets_M, len(at.targets_M)
    device = hidden.device.type
    mixed = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if mixed else hidden.dtype
    if device == "cpu":  # few distinct sizes of products
        fill = row_bucket(size) - size
        hidden, targets = F.pad(hidden, (0, 0, 0, fill)), F.pad(targets, (0, fill))
    with torch.autocast(device, enabled=False) if device != "meta" else nullcontext():
        values = _Divergence.apply(
            hidden,
            at.weight_VH,
            at.bias_V,
            targets,
            teacher_logs,
            rows,
            beta,
            1.0 / at.temperature,
            max(1, CHUNK_ELEMENTS // rows),
            torch.is_grad_enabled() and len(hidden) * rows * 4 <= CACHE_BYTES,
            dtype,
        )
    return torch.stack(values, 1)[:size]


def from_states(
    states_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, rows: int, temperature: float
) -> TeacherLogs:
    """Return the teacher's log-probs over the whole vocabulary, from its hidden states."""
    head = _cut(weight_VH, bias_V, rows, weight_VH.dtype)

    def logs(start: int, stop: int, student: Tensor) -> Tensor:
        part = states_NH[start:stop]
        part = F.pad(part, (0, 0, 0, stop - start - len(part)))
        return _logs(part, *head, rows, 1.0 / temperature)

    return logs


def from_top(top_NK: Tensor) -> TeacherLogs:
    """Return the teacher's log-probs from the rows of ``top_of``, the rest in the student's proportions."""
    k = (top_NK.shape[1] - 2) // 2

    def logs(start: int, stop: int, student: Tensor) -> Tensor:
        part = top_NK[start:stop]
        part = F.pad(part, (0, 0, 0, stop - start - len(part)))
        ids = part[:, 2 : 2 + k].long()
        rest = student.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True).clamp_min(LEAST)
        return (student + (part[:, :1] - rest)).scatter(1, ids, part[:, 2 + k :])

    return logs


LEAST = -80.0
"""Log-mass below which the rest of a vocabulary counts as so much."""


@torch.no_grad()
def top_of(at: AtHead, k: int, rows: int) -> Tensor:
    """Return (M, 2 + 2k) in float32: log-mass of all but the k likeliest tokens, log-prob of the target, their ids, their log-probs."""
    out = []
    head = _cut(at.weight_VH, at.bias_V, rows, at.hidden_MH.dtype)
    chunk = max(1, CHUNK_ELEMENTS // rows)
    for start in range(0, len(at.targets_M), chunk):
        logs = _logs(at.hidden_MH[start : start + chunk], *head, rows, 1.0 / at.temperature)
        best, ids = logs.topk(min(k, rows), 1)
        of_target = logs.gather(1, at.targets_M[start : start + chunk, None])
        rest = logs.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True).clamp_min(LEAST)
        out.append(torch.cat([rest, of_target, ids.float(), best], 1))  # ids below 2²⁴ are exact
    return torch.cat(out)


@torch.no_grad()
def mass_beyond(at: AtHead, rest_VH: Tensor, rest_bias_V: Tensor | None) -> Tensor:
    """Return (M,): the share of mass that a teacher puts on rows that its head was cut by."""
    assert at.weight_VH is not None
    out = []
    for part in at.hidden_MH.split(max(1, CHUNK_ELEMENTS // at.weight_VH.shape[0])):
        sums = [
            (F.linear(part.to(w.dtype), w, b).float() / at.temperature).logsumexp(1)
            for w, b in ((at.weight_VH, at.bias_V), (rest_VH.to(part.device), rest_bias_V))
        ]
        out.append((sums[1] - sums[0]).sigmoid())
    return torch.cat(out)


def _cut(
    weight_VH: Tensor | None, bias_V: Tensor | None, rows: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    weight = None if weight_VH is None else weight_VH[:rows].to(dtype)
    return weight, None if bias_V is None else bias_V[:rows]


def _logs(
    hidden: Tensor, weight: Tensor | None, bias: Tensor | None, rows: int, inverse_temperature: float
) -> Tensor:
    if weight is None:  # the logits themselves
        return torch.log_softmax(hidden[:, :rows].float() * inverse_temperature, -1)
    return head_log_softmax(hidden, weight, bias, inverse_temperature)
