"""The native engine: each distinct prompt computed once, rows leave when they finish, log-probs come back."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch

from algorist.errors import EngineError, is_out_of_memory, nearest
from algorist.models.precision import compute_dtype, on_gpu, unused_gpu_bytes, weight_dtype
from algorist.models.sharding import is_sharded, why_not_by_forward
from algorist.rollouts.base import Completions, Prompts, SamplingParams, Turns
from algorist.rollouts.model_info import ModelSetting
from algorist.rollouts.native.decoder import cache_dtype
from algorist.rollouts.native.decoder_tier import DecoderTier, disagreement
from algorist.rollouts.native.graph_tier import GraphTier, attention_kind
from algorist.rollouts.native.module_tier import ModuleTier, why_no_module_tier
from algorist.rollouts.native.weights import why_no_decoder
from algorist.system import available_memory

log = logging.getLogger("algorist.rollouts.native.engine")
TIERS = ("auto", "graph", "decoder", "module")
_compared: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
_GRAPHS_FROM = (8, 0)
CACHE_SHARE = 0.7
"""Of the free memory, for a cache that is set aside once; the rest is for logits, prompts on their way, and graphs."""


class NativeEngine:
    """Samples groups from a Hugging Face causal LM without a server.

    Args:
        model: The policy (a PreTrainedModel or a PeftModel); its weights are read as they are at each call.
        tokenizer: Needed for stop strings (a tokenizer or a function ids → text); gives end and pad tokens together with the model's generation config.
        token_budget: Most tokens held in the cache at a time; None takes what the memory allows.
        tier: ``graph`` (hand-written decode as CUDA graphs), ``decoder`` (the same, one kernel at a time), ``module`` (the
            model's own forward) or ``auto``: graphs on GPUs of compute capability 8.0 and more.

    Raises:
        EngineError: The model has no usable cache (take ``make_engine``, which falls back), or the tier does not fit.
    """

    name = "native"

    def __init__(
        self, model: Any, tokenizer: Any = None, *, token_budget: int | None = None, tier: str = "auto"
    ) -> None:
        self.model, self.token_budget = model, token_budget
        self.setting = ModelSetting(model, tokenizer)
        self.share, self.tokens = self.setting.share, self.setting.tokens
        if tier not in TIERS:
            raise EngineError(
                f"unknown tier '{tier}'.{nearest(tier, TIERS)} Expected one of {', '.join(TIERS)}"
            )
        self._wanted, self._said, self._keeps = tier, "", True
        reason = why_no_decoder(model)
        if reason and tier in ("graph", "decoder"):
            raise EngineError(
                f"the hand-written decoder cannot run {type(model).__name__}: {reason}; take tier='auto'"
            )
        self._graph: GraphTier | None = None
        self._module: ModuleTier | None = None
        if reason or tier == "module":
            self._module = self._module_tier(reason or "tier='module'")

    def generate(
        self, prompts: Prompts, group_size: int, params: SamplingParams, turns: Turns | None = None
    ) -> Completions:
        if not len(prompts):
            return []
        state = torch.get_rng_state()
        longest = max(len(p) for p in prompts) + params.max_new_tokens
        held = self._graph.nbytes if self._graph is not None else 0
        once = isinstance(self.tier_for(longest), GraphTier)
        budget = self.token_budget or affordable_tokens(
            self.model, self.setting.device, longest, held, once=once
        )
        while True:
            torch.set_rng_state(state)
            rows = self.setting.new_rows(prompts, group_size, params, turns)
            tier = self.tier_for(longest)
            # The module tier runs foreign code that may keep tensors (RoPE caches); these must not be inference tensors.
            by_hand = not isinstance(tier, ModuleTier)
            quiet = torch.inference_mode() if by_hand else torch.no_grad()
            try:
                with self.setting.generating(by_hand=by_hand), quiet:
                    tier.run(prompts, rows, group_size, budget)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                every = longest * group_size * len(prompts)
                tried = min(budget or every, every)
                if tried // 2 < longest:
                    raise EngineError(f"out of memory with one row of {longest} tokens: {error}") from error
            budget = self.token_budget = tried // 2
            log.warning(
                "out of memory while sampling; continuing with at most %d tokens in the cache%s",
                budget,
                ", same tokens" if self.setting.device.type == "cpu" else "",
            )
            self.release()
        if not self._keeps:
            self.release()
        return rows.completions()

    def spare_memory(self) -> bool:
        """Keep nothing between calls from now on; False where nothing was kept."""
        held, self._keeps = self._graph is not None and self._graph.nbytes > 0, False
        self.release()
        return held

    def release(self) -> None:
        """Give the memory back that is kept between calls, and what torch's allocator holds unused."""
        if self._graph is not None:
            self._graph.release()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def tier_for(self, longest: int) -> GraphTier | DecoderTier | ModuleTier:
        """Return the tier for rows of up to ``longest`` tokens; adapters and hooks may have changed meanwhile."""
        if self._wanted == "module":
            return self._module_tier("tier='module'")
        reason = why_no_decoder(self.model, longest) or self._disagreement()
        if reason is None:
            return self._by_hand()
        if self._wanted in ("graph", "decoder"):
            raise EngineError(f"the hand-written decoder cannot run this request: {reason}; take tier='auto'")
        if reason != self._said:
            log.info("rollouts of %s go through its own forward: %s", type(self.model).__name__, reason)
            self._said = reason
        return self._module_tier(reason)

    def _disagreement(self) -> str | None:
        """Compare each model once, whatever engines it has; a sharded one's forward would have to be called by every process."""
        if self.model not in _compared:
            own = ModelSetting(self.model)  # whose rows are not those of the running call
            _compared[self.model] = None if is_sharded(self.model) else disagreement(self.model, own)
        return _compared[self.model]

    def _by_hand(self) -> GraphTier | DecoderTier:
        if self._wanted == "decoder" or (self._wanted == "auto" and not _takes_graphs(self.setting.device)):
            return DecoderTier(self.model)
        self._graph = self._graph or GraphTier(self.model)
        return self._graph

    @staticmethod
    def on_gpu_by(model: Any, device: torch.device) -> str:
        """Describe the code path of ``model``'s rollouts on a GPU."""
        reason = why_no_decoder(model)
        if reason:
            return f"the model's own forward ({reason})"
        if not _takes_graphs(device):
            return "the native engine, one kernel at a time (CUDA graphs take compute capability 8.0)"
        return f"the native engine with CUDA graphs, attention in {attention_kind(device).name}"

    def _module_tier(self, why: str) -> ModuleTier:
        if is_sharded(self.model):
            raise EngineError(why_not_by_forward(self.model, why))
        if self._module is None:
            reason = why_no_module_tier(self.model)
            if reason:
                raise EngineError(
                    f"the native engine cannot run {type(self.model).__name__}: {reason}; take engine=transformers"
                )
            self._module = ModuleTier(self.model, self.setting.pad_token_id)
        return self._module


def _takes_graphs(device: torch.device) -> bool:
    return on_gpu(device) and torch.cuda.get_device_capability(device) >= _GRAPHS_FROM


def affordable_tokens(
    model: Any, device: torch.device, least: int = 0, held: int = 0, *, once: bool = False
) -> int | None:
    """Return the number of cache tokens that fit in free memory, or None where a token's size is unknown.

    Args:
        model: Its configuration and the type of its products give the size of a token.
        device: Where the cache lies.
        least: Tokens of the longest row: one row is tried in any case.
        held: Bytes of an earlier cache and copies of weights, which the new ones take over.
        once: The cache is set aside at its full size; else it doubles as it grows, in half of the memory.
    """
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    if not heads or not layers:
        return None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    free = held + (unused_gpu_bytes(device) if on_gpu(device) else available_memory())
    size = cache_dtype(compute_dtype(model), device).itemsize
    token = 2 * layers * heads * head_dim * size
    if not once:
        return max(least, free // 2 // (2 * token))
    if compute_dtype(model) != weight_dtype(model):
        free -= sum(p.numel() for p in model.parameters()) * compute_dtype(model).itemsize
    return max(least, int(CACHE_SHARE * free) // token)
