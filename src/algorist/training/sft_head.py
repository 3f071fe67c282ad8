"""SFT's loss without the head's work at prompt and padding: on the CPU TRL scores every position of the batch."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import Tensor, nn

from algorist.training.lm_head import altered_logits, completion_log_probs
from algorist.training.trl_seam import FusedCausalLMOutput


def score_labels_only(base: nn.Module) -> None:
    """Let TRL's fused forward of ``base`` score only positions that have a label, where this gives the same numbers.

    Covered: CPU, plain logits (no scale, no soft-capping), labels that are not shifted yet. Everything else, and every
    call without ``fused_lm_head``, goes to the forward that is there.
    """
    original = base.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if (
            not fused_lm_head
            or labels is None
            or labels.device.type != "cpu"
            or kwargs.get("shift_labels") is not None
            or kwargs.get("output_router_logits")
            or getattr(self.config.get_text_config(), "output_router_logits", False)
            or not bool((labels[:, 1:] != -100).any())
            or altered_logits(self.config.get_text_config()) is not None
        ):
            return original(*args, **kwargs, **({"fused_lm_head": True} if fused_lm_head else {}))
        kwargs.pop("num_items_in_batch", None)
        return _score(self, kwargs.pop("labels"), *args, **kwargs)

    base.forward = types.MethodType(forward, base)  # type: ignore[method-assign]


def _score(base: Any, labels_BT: Tensor, *args: Any, **kwargs: Any) -> FusedCausalLMOutput:
    hidden_BTH = base.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
    mask = labels_BT[:, 1:] != -100
    head = base.get_output_embeddings()
    found = completion_log_probs(
        hidden_BTH[:, :-1][mask],
        head.weight,
        getattr(head, "bias", None),
        labels_BT[:, 1:][mask],
        compute_entropy=True,
        compute_top1=True,
    )

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(mask.shape).masked_scatter(mask, values)

    log_probs, entropy, is_top1 = (spread(value) for value in found if value is not None)
    return FusedCausalLMOutput(
        loss=-log_probs.sum() / mask.sum(),
        log_probs=log_probs,
        entropy=entropy,
        log_sum_sq_probs=None,
        mean_logits=None,
        is_top1=is_top1,
        label_mask=mask,
        aux_loss=None,
    )
