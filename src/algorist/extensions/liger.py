"""Norms, rotary embeddings and gated MLPs by Liger Kernel's fused kernels (2410.10989) on GPUs. The only file that imports it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any

from algorist.config.section import Section
from algorist.models.loaders import Loader, loader
from algorist.training.extension import Extension, extension

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("algorist.extensions.liger")
LOOKED_AT, GAP, GAP_16_BIT = 32, 1e-3, 5e-2
"""Tokens of the comparison with the model's own forward and backward, and by how much they may differ, relative to the norm."""
_ROTATES: ContextVar[bool] = ContextVar("algorist_liger_rotates", default=False)


class _Keys(Section):
    liger_kernel: bool = True
    """Fused norms, rotary embeddings and MLPs on GPUs, where ``liger-kernel`` is installed."""


@extension
class Liger(Extension):
    name, keys = "liger", {"model": _Keys}


@loader("liger")
class _Loader(Loader):
    everywhere = ("liger_kernel",)

    def loaded(self, model: Any, section: Any) -> None:
        """Take the kernels where they compute what the model computes, forward and backward; else say why not, in one line."""
        from algorist.models.precision import HALF, compute_dtype, on_gpu
        from algorist.models.products import why_no_triton

        possible = section.liger_kernel and on_gpu(model.get_input_embeddings().weight.device)
        if not possible or find_spec("liger_kernel") is None or why_no_triton() or not _parts(model):
            return
        most = GAP_16_BIT if compute_dtype(model) in HALF else GAP
        with ExitStack() as undo:
            try:
                own = _look(model)
                undo.callback(fuse(model))
                gaps = [float((a - b).norm() / b.norm()) for a, b in zip(_look(model), own, strict=True)]
                reason = "logits and slopes differ by {:.1e} and {:.1e}".format(*gaps)
                if all(gap <= most for gap in gaps):
                    undo.pop_all()
                    model.algorist_kernels = ", Liger's kernels"
                    return
            except Exception as error:  # of package, compiler or driver, as each likes; memory for the look
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            log.warning("%s runs without Liger's kernels: %s", type(model).__name__, reason)


def _parts(model: Any) -> list[tuple[Any, str]]:
    """Return the modules that may run the kernels, by what they have; whether they are what they look like is seen in their numbers."""

    def kind(module: Any) -> str:
        gated = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
        if gated and "silu" in type(getattr(module, "act_fn", None)).__name__.lower():
            return "mlp"
        rotates = type(module).__name__.endswith("Attention")
        return "norm" if hasattr(module, "variance_epsilon") else "attention" if rotates else ""

    parts = [(module, name) for module in model.modules() if (name := kind(module))]
    return parts if any(name != "attention" for _, name in parts) else []


def fuse(model: Any) -> Callable[[], None]:
    """Let the modules of a model run the kernels where their input is on a GPU; return what undoes it."""
    from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction

    from algorist.models.precision import on_gpu
    from algorist.models.sharding import plain_class

    def norm(self: Any, x: Tensor) -> Any:
        if not on_gpu(x.device):
            return type(self).forward(self, x)
        return LigerRMSNormFunction.apply(x, self.weight, self.variance_epsilon)

    def mlp(self: Any, x: Tensor) -> Any:
        if not on_gpu(x.device):
            return type(self).forward(self, x)
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))

    def attention(self: Any, *args: Any, **named: Any) -> Any:
        before = _ROTATES.set(True)
        try:
            return type(self).forward(self, *args, **named)
        finally:
            _ROTATES.reset(before)

    def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **named: Any) -> Any:
        if args or named or not _ROTATES.get() or not on_gpu(q.device):
            return own(q, k, cos, sin, *args, **named)
        return LigerRopeFunction.apply(q, k, cos, sin)

    # It is a function of the family, which for other models stays what it is.
    family, name = vars(sys.modules[plain_class(model).__module__]), "apply_rotary_pos_emb"
    own: Any = family.get(name)
    if own and own.__module__ != __name__:
        family[name] = rotation
    parts = _parts(model)
    for module, kind in parts:
        module.forward = MethodType({"norm": norm, "mlp": mlp, "attention": attention}[kind], module)

    def undo() -> None:
        for module, _ in parts:
            del module.forward

    return undo


def _look(model: Any) -> tuple[Tensor, Tensor]:
    """Return the logits of a few tokens, and the slopes of their log-sum-exps at the embeddings."""
    import torch
    from torch.nn.functional import embedding

    from algorist.models.modes import eval_mode
    from algorist.models.precision import compute_dtype, weight_dtype
    from algorist.training.distributed import whole_weights

    dtype = compute_dtype(model)
    mixed = dtype != weight_dtype(model)
    with torch.enable_grad(), eval_mode(model), whole_weights(model):
        weight = model.get_input_embeddings().weight
        ids = torch.arange(LOOKED_AT, device=weight.device)[None] % len(weight)
        inputs = embedding(ids, weight).detach().requires_grad_()
        with torch.autocast(weight.device.type, dtype if mixed else None, enabled=mixed):
            logits = model(inputs_embeds=inputs, use_cache=False).logits.float()
            (slope,) = torch.autograd.grad(logits.logsumexp(-1).sum(), inputs)
    return logits.detach(), slope.float()
