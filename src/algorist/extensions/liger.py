"""Norms, rotary embeddings and gated MLPs by Liger Kernel's fused kernels (2410.10989) on GPUs. The only file that imports it."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any

from algorist.config.section import Section
from algorist.errors import is_out_of_memory
from algorist.models.loaders import Loader, loader
from algorist.training.extension import Extension, extension

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("algorist.extensions.liger")
LOOKED_AT, GAP, GAP_16_BIT = 32, 1e-3, 5e-2
"""Tokens of the comparison with the model's own forward and backward, and by how much they may differ, relative to the norm."""


class _Keys(Section):
    liger_kernel: bool = True
    """Fused norms, rotary embeddings and MLPs on GPUs, where ``liger-kernel`` is installed."""


@extension
class Liger(Extension):
    name, keys = "liger", {"model": _Keys}


@loader("liger")
class _Loader(Loader):
    def loaded(self, model: Any, section: Any) -> None:
        """Take the kernels where they compute what the model computes, forward and backward; else say why not, in one line."""
        from algorist.models.precision import HALF, compute_dtype, on_gpu
        from algorist.models.products import why_no_triton

        possible = section.liger_kernel and on_gpu(model.get_input_embeddings().weight.device)
        if not possible or find_spec("liger_kernel") is None or why_no_triton() or not _modules(model):
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
            except Exception as error:  # of the package, the compiler or the driver, as each likes
                if is_out_of_memory(error):
                    raise
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            log.warning("%s runs without Liger's kernels: %s", type(model).__name__, reason)


def _modules(model: Any) -> list[Any]:
    """Return the norms and the MLPs, by what they have; whether they are what they look like is seen in their numbers."""

    def is_gated(module: Any) -> bool:
        parts = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
        return parts and "silu" in type(getattr(module, "act_fn", None)).__name__.lower()

    return [m for m in model.modules() if hasattr(m, "variance_epsilon") or is_gated(m)]


def fuse(model: Any) -> Callable[[], None]:
    """Let the modules of a model run the kernels where their input is on a GPU; return what undoes it.

    The rotation is a function of the model's family, and so changes for all of its models in the process.
    """
    from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction

    from algorist.models.sharding import plain_class

    def norm(self: Any, x: Tensor) -> Any:
        return LigerRMSNormFunction.apply(x, self.weight, self.variance_epsilon)

    def mlp(self: Any, x: Tensor) -> Any:
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))

    def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return LigerRopeFunction.apply(q, k, cos, sin)

    family, modules = vars(sys.modules[plain_class(model).__module__]), _modules(model)
    before = {name: family[name] for name in ("apply_rotary_pos_emb",) if name in family}
    family.update({name: _either(rotation, getattr(own, "own", own)) for name, own in before.items()})
    for module in modules:
        fused = norm if hasattr(module, "variance_epsilon") else mlp
        module.forward = MethodType(_either(fused, type(module).forward), module)

    def undo() -> None:
        family.update(before)
        for module in modules:
            del module.forward

    return undo


def _either(fused: Any, own: Any) -> Any:
    from algorist.models.precision import on_gpu

    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = next(value.device for value in args if hasattr(value, "dtype"))
        return (fused if on_gpu(device) else own)(*args, **kwargs)

    run.own = own  # type: ignore[attr-defined]
    return run


def _look(model: Any) -> tuple[Tensor, Tensor]:
    """Return the logits of a few tokens, and the slopes of their log-sum-exps at the embeddings."""
    import torch

    from algorist.models.precision import compute_dtype, weight_dtype
    from algorist.rollouts.model_info import eval_mode

    embed, dtype = model.get_input_embeddings(), compute_dtype(model)
    device, mixed = embed.weight.device, dtype != weight_dtype(model)
    ids = torch.arange(LOOKED_AT, device=device)[None] % len(embed.weight)
    with (
        torch.enable_grad(),
        eval_mode(model),
        torch.autocast(device.type, dtype if mixed else None, enabled=mixed),
    ):
        inputs = embed(ids).detach().requires_grad_()
        logits = model(inputs_embeds=inputs, use_cache=False).logits.float()
        (slope,) = torch.autograd.grad(logits.logsumexp(-1).sum(), inputs)
    return logits.detach(), slope.float()
