"""The language-model head at completion positions only: log-probs and entropies without the (N, V) logits.

On the CPU, chunks of positions are multiplied and tiles of them scored, which stay in the processor's cache; their softmax is kept for
the backward pass when it fits a budget and recomputed from the hidden states when it does not. Elsewhere ``head_tiles.py`` does the
same in larger tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorist.models.products import row_bucket, times_transposed
from algorist.training.head_tiles import TiledHead

CHUNK_ELEMENTS = 32_000_000
"""Logits of one chunk (64 MB in bfloat16): 208 rows of 152k words are multiplied 1.5 times as fast as 52 on an Intel Xeon with AMX."""
CACHE_BYTES = 160_000_000
"""Probabilities kept for the backward pass; above it they are recomputed (one more product with the weights), and as many slopes
are multiplied at once: each product is added to the gradient of the whole vocabulary."""
_CACHED_ELEMENTS = 800_000
"""Logits of one tile on the CPU (3 MB in float32)."""


def altered_logits(config: Any) -> str | None:
    """Return the setting by which a model's logits differ from the plain product with its head, or None."""
    fields = "final_logit_softcapping attn_logit_softcapping logit_scale output_multiplier lm_head_multiplier"
    return next((field for field in fields.split() if getattr(config, field, None) is not None), None)


class _CompletionHead(torch.autograd.Function):
    in_place = False
    """Add the gradient to the one that the weights have, instead of returning another of the vocabulary's size."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        inverse_temperature: float,
        compute_entropy: bool,
        compute_top1: bool,
        sizes: tuple[int, int],
        cache: bool,
        compute_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows = hidden_NH.shape[0]
        log_probs = torch.empty(rows, dtype=torch.float32, device=hidden_NH.device)
        entropy = torch.empty_like(log_probs) if compute_entropy else None
        top1 = torch.empty_like(log_probs, dtype=torch.bool) if compute_top1 else None
        room = (rows, weight_VH.shape[0]) if cache and any(ctx.needs_input_grad[:3]) else None
        cached = None if room is None else torch.empty(room, dtype=torch.float32, device=hidden_NH.device)
        products_VH = weight_VH.to(compute_dtype)
        for chunk in parts(0, rows, sizes[0]):
            logits = head_logits(hidden_NH[chunk], products_VH, bias_V)
            for part, raw in _tiles(logits, chunk):
                kept = None if cached is None else cached[part]
                shifted, probs, log_sum = _softmax(raw, inverse_temperature, kept)
                log_probs[part] = shifted.gather(1, targets_N[part, None]).squeeze(1) - log_sum
                if top1 is not None:
                    top1[part] = shifted.argmax(1) == targets_N[part]
                if entropy is not None:
                    entropy[part] = log_sum - torch.linalg.vecdot(probs, shifted)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, entropy)
        ctx.cached, ctx.cast = cached, None if products_VH is weight_VH else products_VH
        ctx.inverse_temperature, ctx.sizes, ctx.compute_dtype = inverse_temperature, sizes, compute_dtype
        if top1 is not None:
            ctx.mark_non_differentiable(top1)
        return log_probs, entropy, top1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_log_probs, grad_entropy = grads[:2]
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        (chunk, span), inverse = ctx.sizes, ctx.inverse_temperature
        scale = torch.zeros_like(targets).float() if grad_log_probs is None else grad_log_probs * inverse
        # Sums over positions run in float32: rounding each part's product to bfloat16 biases the gradient.
        grad_hidden = torch.empty_like(hidden, dtype=torch.float32) if needs_hidden else None
        own = weight.grad if _CompletionHead.in_place and weight.dtype == torch.float32 else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight and own is None else own
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        cached, ctx.cached = ctx.cached, None
        products_VH, ctx.cast = weight.to(ctx.compute_dtype) if ctx.cast is None else ctx.cast, None

        def to_slope(slope: Tensor, part: slice) -> Tensor:
            """Turn the probabilities of some rows into the gradient in their logits, in float32."""
            if grad_entropy is not None:
                surprise = torch.xlogy(slope, slope) + slope * entropy[part, None]
                surprise *= grad_entropy[part, None] * inverse
            slope.mul_(-scale[part, None])
            slope.scatter_add_(1, targets[part, None], scale[part, None])
            if grad_entropy is not None:
                slope -= surprise
            if grad_bias is not None:
                grad_bias.add_(slope.sum(0))
            return slope

        in_place = cached is not None and cached.dtype == products_VH.dtype
        for whole in parts(0, len(hidden), span):
            slopes = cached[whole] if in_place else products_VH.new_empty(len(hidden[whole]), len(weight))
            for at in parts(whole.start, whole.stop, chunk):
                probs = head_logits(hidden[at], products_VH, bias) if cached is None else cached[at]
                for part, tile in _tiles(probs, at):
                    slope = to_slope(_softmax(tile, inverse)[1] if cached is None else tile, part)
                    if not in_place:
                        slopes[part.start - whole.start : part.stop - whole.start] = slope
            if grad_hidden is not None:
                grad_hidden[whole] = times_transposed(slopes, products_VH.t())
            if needs_weight and grad_weight is not None:
                inputs = hidden[whole].to(ctx.compute_dtype)
                if inputs.dtype == torch.float32:
                    grad_weight.addmm_(slopes.t(), inputs)
                else:
                    grad_weight.add_(slopes.t() @ inputs)
        return (
            grad_hidden.to(hidden.dtype) if grad_hidden is not None else None,
            grad_weight.to(weight.dtype) if grad_weight is not None and own is None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *([None] * 7),
        )


@contextmanager
def gradients_in_place(model: nn.Module, does: bool) -> Iterator[None]:
    """Make the gradients that a model lacks before its passes, which add to them: those of a large vocabulary exist once.

    For one process on a CPU. Made in the backward pass they would lie between its activations, whose memory the next part's do not fit
    into. The embeddings' own are sparse here, which autograd adds to the dense ones that are there.
    """
    lacking = [p for p in model.parameters() if does and p.requires_grad and p.grad is None]
    for parameter in lacking:
        parameter.grad = torch.zeros_like(parameter)
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight.grad is not None]
    for module in embeddings:
        module.sparse = does
    _CompletionHead.in_place = does
    try:
        yield
    finally:
        for module in embeddings:
            module.sparse = False
        _CompletionHead.in_place = False
    for parameter in lacking:
        if parameter.grad is not None and parameter.grad._version == 0:  # the loss does not depend on it
            parameter.grad = None


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the logits (N, V) of all tokens, in the type of ``weight``."""
    logits = times_transposed(hidden.to(weight.dtype), weight)
    return logits if bias is None else logits.add_(bias.to(weight.dtype))


def parts(start: int, stop: int, size: int) -> list[slice]:
    """Return slices of at most ``size`` places, and of one at least."""
    return [slice(at, min(at + max(1, size), stop)) for at in range(start, stop, max(1, size))]


def _tiles(rows_NV: Tensor, at: slice) -> Iterator[tuple[slice, Tensor]]:
    """Return tiles of the rows at ``at``: where each lies in the whole, and its part of ``rows_NV``."""
    size = _CACHED_ELEMENTS // rows_NV.shape[1] if rows_NV.is_cpu else len(rows_NV)
    for part in parts(at.start, at.stop, size):
        yield part, rows_NV[part.start - at.start : part.stop - at.start]


def _softmax(
    logits: Tensor, inverse_temperature: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (N, V) less the largest of their row, probabilities (N, V) and the log of the row's sum (N,), in float32.

    Logits in float32 are overwritten. The largest has the probability one through the sum, at least 1 / V.
    """
    shifted = logits.float()
    if inverse_temperature != 1.0:
        shifted *= inverse_temperature
    shifted -= shifted.amax(1, keepdim=True)
    probs = torch.softmax(shifted, 1, out=out)
    return shifted, probs, -probs.amax(1).log_()


class AtHead(NamedTuple):
    """Inputs of the head for M tokens; an extension may compute further numbers per token from them.

    Attributes:
        hidden_MH: States that predict the tokens; the logits themselves (M, V) where ``weight_VH`` is None.
        weight_VH: Weights of the head, or None.
        bias_V: Bias of the head, or None.
        targets_M: Token ids.
        places_M: Places of the tokens in the flattened (B, T) of the batch.
        temperature: Logits are divided by it.
    """

    hidden_MH: Tensor
    weight_VH: Tensor | None
    bias_V: Tensor | None
    targets_M: Tensor
    places_M: Tensor
    temperature: float = 1.0


OfHead = Callable[[AtHead], Tensor]
"""Returns numbers per token (M, …), with or without gradient."""


class Scores(NamedTuple):
    """Log-prob and entropy of each target (N,) in nats (float32, differentiable), and whether it is the most likely token."""

    log_probs: Tensor
    entropy: Tensor | None
    is_top1: Tensor | None


def completion_log_probs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    compute_entropy: bool = False,
    compute_top1: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
    cache_bytes: int = CACHE_BYTES,
) -> Scores:
    """Return log-probs of the targets and, if asked for, entropies and whether a target is the most likely token.

    Args:
        hidden_NH: Hidden states at the positions that predict the targets.
        weight_VH: Weights of the head.
        bias_V: Bias of the head or None.
        targets_N: Target token ids.
        temperature: Logits are divided by it.
        compute_entropy: Also return the entropy of each distribution.
        compute_top1: Also return where the target is the most likely token.
        chunk_elements: Logits that exist at one time.
        cache_bytes: Keep the probabilities for the backward pass up to this size; else multiply slopes of this size at once.
    """
    rows, vocab, device = len(hidden_NH), len(weight_VH), hidden_NH.device.type
    shapes_only = device == "meta"  # which knows no autocast
    mixed = not shapes_only and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if mixed else hidden_NH.dtype
    if device != "cpu" and not shapes_only:
        with torch.autocast(device, enabled=False):
            log_probs, entropy, top1 = TiledHead.apply(
                hidden_NH, weight_VH, bias_V, targets_N, 1.0 / temperature, dtype
            )
        return Scores(log_probs, entropy if compute_entropy else None, top1 if compute_top1 else None)
    cache, chunk = rows * vocab * 4 <= cache_bytes, max(1, chunk_elements // vocab)
    if device == "cpu":  # few distinct sizes, see ``row_bucket``
        fill = row_bucket(rows) - rows
        hidden_NH, targets_N = F.pad(hidden_NH, (0, 0, 0, fill)), F.pad(targets_N, (0, fill))
    with nullcontext() if shapes_only else torch.autocast(device, enabled=False):
        log_probs, entropy, top1 = _CompletionHead.apply(
            hidden_NH,
            weight_VH,
            bias_V,
            targets_N,
            1.0 / temperature,
            compute_entropy,
            compute_top1,
            (chunk, max(chunk, cache_bytes // 4 // vocab)),
            cache and torch.is_grad_enabled(),
            dtype,
        )
    return Scores(
        log_probs[:rows], None if entropy is None else entropy[:rows], None if top1 is None else top1[:rows]
    )
