"""The policy's weights in a model of mlx-lm, handed over whenever they have changed: only those that have.

A weight is compared by its numbers, since no counter tells what ``.data`` did; comparing stops at the first that differs.
"""

from __future__ import annotations

import math
import os
from typing import Any
from weakref import WeakKeyDictionary

# Float32 stays float32 on Apple's matrix units too, as in the update. Before mlx is imported.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx
import numpy as np
import torch
from mlx_lm import utils
from mlx_lm.models.cache import make_prompt_cache
from torch import Tensor
from transformers import DynamicCache

from algorist.errors import EngineError
from algorist.extensions.vllm.engine import named_weights
from algorist.models.precision import compute_dtype, weight_dtype
from algorist.models.sharding import unwrap

OTHERWISE = "take grpo.engine=native (eval.engine, if that names mlx)"
_copies: WeakKeyDictionary[Any, Mirror] = WeakKeyDictionary()


def why_unknown(config: dict[str, Any]) -> str:
    """Explain why mlx-lm has no model for a configuration, or return an empty text; one without a ``model_type`` is not judged."""
    kind = config.get("model_type")
    if kind is None or any(
        _is_known({**config, "model_type": k}) for k in (kind, kind.removesuffix("_text"))
    ):
        return ""
    return f"mlx-lm has no model of the type '{kind}'"


def _is_known(config: dict[str, Any]) -> bool:
    try:
        return bool(utils._get_classes(config))
    except ValueError:
        return False


def mirror_of(model: Any) -> Mirror:
    """Return the one copy of a policy that all its engines share.

    Raises:
        EngineError: mlx-lm cannot take the model.
    """
    base = unwrap(model)
    if base not in _copies:
        _copies[base] = Mirror(model)
    return _copies[base]


class Mirror:
    """A model of mlx-lm with a policy's weights, in the type of the policy's products; active adapters are merged into it."""

    def __init__(self, model: Any) -> None:
        base, self.dtype = unwrap(model), compute_dtype(model)
        self.kind = type(base).__name__
        config = config_for_mlx(base.config)
        if reason := why_unknown(config):
            raise EngineError(f"{self.kind} cannot be sampled by MLX: {reason}; {OTHERWISE}")
        if not all(p.dtype.is_floating_point for p in base.parameters() if p.dim() > 1):
            raise EngineError(
                f"the weights of this {self.kind} are quantised, which MLX cannot be given; {OTHERWISE}"
            )
        self.agrees = False
        self._given: dict[str, mx.array] = {}
        self._place: dict[str, str] = {}
        try:
            kind, arguments = utils._get_classes(config)
            self.model = kind(arguments.from_dict(config))
            self.refresh(model)
            self.window = _other_window(self.model, base.config)
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"mlx-lm cannot make its {config['model_type']} of this {self.kind} ({first_line(error)}); {OTHERWISE}"
            ) from error

        rounds = config["model_type"] == "gemma3_text" and weight_dtype(model) == torch.float32
        root = math.sqrt(config["hidden_size"]) if rounds else 1.0
        self._scale = root / mx.array(root, mx.bfloat16).item()

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        """Return the logits (S, T, V) of ids (S, T) after what the caches hold, not computed yet."""
        if self._scale == 1:
            return self.model(ids, cache=cache)
        # mlx-lm rounds this family's scale of the embeddings to bfloat16.
        embedded = self.model.model.embed_tokens(ids) * self._scale
        return self.model(ids, cache=cache, input_embeddings=embedded)

    @torch.no_grad()
    def refresh(self, model: Any) -> int:
        """Hand over the weights that have changed since the last time; return their bytes."""
        base = unwrap(model)
        embedding, tied, changed = base.get_input_embeddings().weight, False, {}
        for name, weight in named_weights(model):
            if weight.data_ptr() == embedding.data_ptr():
                if tied:  # the head, the same weight by its second name
                    continue
                tied = True
            value = weight.to("cpu", self.dtype)
            if name not in self._given or not torch.equal(to_torch(self._given[name]), value):
                changed[name] = to_mlx(value)
        if changed:
            self._given |= changed
            self._put(changed)
        return sum(value.nbytes for value in changed.values())

    def _put(self, changed: dict[str, mx.array]) -> None:
        """Put weights in their places; where mlx-lm makes its own of some (transposed, stacked), from all of them anew."""
        some = changed.keys() <= self._place.keys()
        if some:
            weights = {self._place[name]: value for name, value in changed.items()}
        else:
            clean = getattr(self.model, "sanitize", dict)
            weights = clean(dict(self._given))
            names = {id(value): name for name, value in self._given.items()}
            self._place = {names[id(v)]: place for place, v in weights.items() if id(v) in names}
        self.model.load_weights(list(weights.items()), strict=not some)
        mx.eval(self.model.parameters())


def first_line(error: Exception) -> str:
    """Return an error of mlx-lm in a line: it lists every weight."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _other_window(model: Any, config: Any) -> int | None:
    """Return the length from which mlx-lm's layers attend to other tokens than the policy's; None where they never do."""
    ours = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
    theirs = [getattr(layer, "max_size", None) for layer in make_prompt_cache(model)]
    pairs = zip(ours, theirs, strict=False)
    return min((size for pair in pairs if pair[0] != pair[1] for size in pair if size), default=None)


def config_for_mlx(config: Any) -> dict[str, Any]:
    """Return a configuration as mlx-lm reads it: the names that transformers 4 had, and what transformers 5 leaves out."""
    values: dict[str, Any] = config.to_dict()
    if values.get("head_dim") is None and "num_attention_heads" in values:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    values = {"block_dim": values.get("hidden_size"), **values}
    kinds = values.get("layer_types") or []
    if "full_attention" in kinds:
        every = kinds.index("full_attention") + 1
        values = {"sliding_window_pattern": every, "full_attention_interval": every, **values}
    rope = values.get("rope_parameters") or {}
    whole = rope.get("full_attention", rope)
    if "rope_theta" in whole:
        near = rope.get("sliding_attention", whole)
        scaled = whole.get("rope_type", "default") != "default"
        values |= {"rope_theta": whole["rope_theta"], "rope_local_base_freq": near.get("rope_theta")}
        values["rope_scaling"] = {**whole, "type": whole["rope_type"]} if scaled else None
        values |= {k: v for k, v in whole.items() if k == "partial_rotary_factor"}
    kind = values["model_type"]
    if kind.endswith("_text") and not _is_known(values):  # the text part of a model that sees, too
        values = {**values, "model_type": kind.removesuffix("_text"), "text_config": values}
    return values


def to_mlx(value: Tensor) -> mx.array:
    """Return a copy of a tensor on the CPU."""
    if value.dtype == torch.bfloat16:  # numpy has none
        return mx.array(value.contiguous().view(torch.uint16).numpy()).view(mx.bfloat16)
    return mx.array(value.contiguous().numpy())


def to_torch(value: mx.array) -> Tensor:
    """Return a tensor on the memory of an array, which is not to be written to."""
    if value.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(value.view(mx.uint16), copy=False)).view(torch.bfloat16)
    return torch.from_numpy(np.array(value, copy=False))
