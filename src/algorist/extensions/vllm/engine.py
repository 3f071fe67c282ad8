"""vLLM as a rollout engine, colocated: one vLLM in this process, given the policy's weights before each generation.

``server.py`` does the same with a server. The only file that imports vLLM. Tested with vLLM 0.32 on CPU (``make test-vllm``).
"""

from __future__ import annotations

import copy
import logging
import math
import os
import random
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from algorist.errors import ConfigError, EngineError, MissingExtraError
from algorist.extensions.vllm.section import INSTALL, ColocatedVLLMSection
from algorist.extensions.vllm.sleep import why_no_sleep
from algorist.models.precision import HALF, compute_dtype, round_stochastically
from algorist.models.sharding import unwrap
from algorist.rollouts.base import Completion, Completions, Prompts, SamplingParams, Turns
from algorist.rollouts.model_info import ModelSetting
from algorist.rollouts.row_state import check_request
from algorist.rollouts.sampling import StopStrings
from algorist.rollouts.turns import continued

log = logging.getLogger("algorist.extensions.vllm.engine")

# ``grpo.vllm``'s keys → the names of vLLM's ``LLM``, where they differ.
_VLLMS_NAMES = {"max_model_length": "max_model_len"}
_FOR_VLLM = (
    "gpu_memory_utilization", "kv_cache_memory_bytes", "max_model_length", "max_num_seqs", "max_num_batched_tokens",
    "enable_sleep_mode", "enforce_eager", "model_impl",
)  # fmt: skip
_CPU_CACHE_SHARE, _CPU_CACHE_MOST = 4, 1 << 30
_SCORED_TOKENS = 4096

_running: list[_Running] = []


class VLLMRollouts(ABC):
    """Base of the engines for colocated vLLM and a vLLM server.

    The seeds are vLLM's: rollouts repeat with the same seed, but differ from those of the other engines. Log-probs of
    requests with top-k, top-p, min-p or min_new_tokens are computed by one forward of the policy, because vLLM gives those
    of the filtered distribution.

    Args:
        model: The policy; adapters are merged into the copies that vLLM gets.
        tokenizer: Needed for stop strings; gives end tokens together with the model's generation config.
    """

    name = "vllm"

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.setting = ModelSetting(model, tokenizer)
        _check_not_quantised(model)
        self._dtype = compute_dtype(model)

    def generate(
        self, prompts: Prompts, group_size: int, params: SamplingParams, turns: Turns | None = None
    ) -> Completions:
        """Sample ``group_size`` completions per prompt with the present weights; see ``RolloutEngine.generate``."""
        if not len(prompts):
            return []
        if turns is not None:
            return continued(self.generate, prompts, group_size, params, turns, self.setting.decode)
        check_request(prompts, group_size, self.setting.context, self.setting.vocabulary)
        strings = StopStrings(params.stop_strings, self.setting.decode) if params.stop_strings else None
        stops = sorted({*self.setting.eos_token_ids, *params.stop_token_ids})
        seed = int(torch.randint(2**62, ())) if params.seed is None else params.seed
        count = group_size if params.temperature > 0 else 1
        groups = self._sample(prompts, count, params, stops, seed)
        if params.temperature == 0:
            groups = [group * group_size for group in groups]
        if strings is not None:
            groups = [[_cut(c, strings, params.min_new_tokens) for c in group] for group in groups]
        if is_filtered(params):
            groups = self._with_own_log_probs(prompts, groups, params.temperature or 1.0)
        if not all(math.isfinite(math.fsum(c.log_probs)) for group in groups for c in group):
            raise not_finite()
        return groups

    @abstractmethod
    def _sample(
        self, prompts: Prompts, count: int, params: SamplingParams, stops: Sequence[int], seed: int
    ) -> Completions:
        """Give vLLM the present weights and return its ``count`` completions per prompt, with its log-probs.

        Completion c of prompt p draws with ``seed + p × count + c``; ``stops`` end a completion.
        """

    def _with_own_log_probs(self, prompts: Prompts, groups: Completions, temperature: float) -> Completions:
        """Replace the log-probs by those of the unfiltered distribution at ``temperature``."""
        result = []
        with self.setting.generating(), torch.no_grad():
            for prompt, group in zip(prompts, groups, strict=True):
                width = len(prompt) + max(len(c.token_ids) for c in group)
                step, rows = max(1, _SCORED_TOKENS // width), []
                for begin in range(0, len(group), step):
                    rows += self._score(prompt, group[begin : begin + step], temperature)
                result.append(rows)
        return result

    def _score(
        self, prompt: Sequence[int], group: Sequence[Completion], temperature: float
    ) -> list[Completion]:
        longest = max(len(c.token_ids) for c in group)
        rows = [
            [*prompt, *c.token_ids] + [self.setting.pad_token_id] * (longest - len(c.token_ids))
            for c in group
        ]
        ids_BT = torch.tensor(rows, device=self.setting.device)
        # Padding is on the right, where causal attention does not look.
        logits_BTV = self.model(input_ids=ids_BT).logits[:, len(prompt) - 1 : -1].float() / temperature
        chosen_BT = logits_BTV.gather(-1, ids_BT[:, len(prompt) :, None]).squeeze(-1)
        log_prob_BT = (chosen_BT - logits_BTV.logsumexp(-1)).tolist()
        return [
            Completion(c.token_ids, row[: len(c.token_ids)], c.finish_reason)
            for c, row in zip(group, log_prob_BT, strict=True)
        ]


class VLLMEngine(VLLMRollouts):
    """Samples groups through vLLM's ``LLM`` in this process.

    Args:
        settings: ``grpo.vllm``. A vLLM that already runs in this process for a model of this shape is taken over, unless it
            has other settings than those given here. The others: see ``VLLMRollouts``.

    Raises:
        MissingExtraError: vLLM cannot be imported.
        ConfigError: Sleep mode where vLLM cannot sleep.
        EngineError: vLLM cannot run the model.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, settings: ColocatedVLLMSection | None = None
    ) -> None:
        self.settings = settings
        _import_vllm()
        super().__init__(model, tokenizer)
        if settings is not None and (reason := why_no_sleep(settings, self.setting.device)):
            raise ConfigError(reason)

    def _sample(
        self, prompts: Prompts, count: int, params: SamplingParams, stops: Sequence[int], seed: int
    ) -> Completions:
        on_cpu = self.setting.device.type == "cpu"
        requests = _requests(len(prompts), count, params, stops, None if on_cpu else seed)
        running = self._vllm()
        check_lengths(prompts, running.context, "set grpo.vllm.max_model_length")
        with _random_state_kept():
            running.load(named_weights(self.model))
            if on_cpu:
                # vLLM 0.32 fails with a seed per request when prompts fill more than one step (generators of the CPU have
                # no offset to set back). Without one it draws from the global generator.
                torch.manual_seed(seed)
            outputs = running.llm.generate(
                [{"prompt_token_ids": [int(i) for i in prompt]} for prompt in prompts],
                requests,
                use_tqdm=False,
            )
            running.sleep()
        return [[_completion(o, stops) for o in output.outputs] for output in outputs]

    def _vllm(self) -> _Running:
        """Return the vLLM of this process, made for this model's shape at the first use."""
        base = unwrap(self.model)
        shape = f"{type(base).__name__} {self._dtype} {base.config.to_json_string(use_diff=False)}"
        section = self.settings or ColocatedVLLMSection()
        other = self.settings is not None and _running and _running[0].settings != section
        if _running and (other or _running[0].shape != shape):
            log.info("vLLM starts again for %s with %s", type(base).__name__, section)
            _running.pop().close()
        if not _running:
            _running.append(_Running(base, self.tokenizer, self._dtype, shape, section))
        return _running[0]


class _Running:
    """vLLM's ``LLM`` for one model shape."""

    def __init__(
        self, base: Any, tokenizer: Any, dtype: torch.dtype, shape: str, settings: ColocatedVLLMSection
    ) -> None:
        self.shape, self.settings = shape, settings
        device = base.get_input_embeddings().weight.device.type
        arguments = llm_arguments(settings, device, dtype)
        self._sleeps = arguments["enable_sleep_mode"]
        if device == "cpu":
            _check_head_size(base)
        LLM = _import_vllm().LLM
        with tempfile.TemporaryDirectory() as folder, _random_state_kept(), _thread_setter_kept():
            _write_model_folder(Path(folder), base, tokenizer)
            try:
                self.llm = LLM(model=folder, **arguments)
            except (RuntimeError, ValueError, TypeError) as error:
                raise EngineError(
                    f"vLLM cannot run {type(base).__name__} with {arguments}: {error}; take another grpo.vllm setting, or "
                    "engine=native"
                ) from error
        self._asleep = False
        self.context = int(self.llm.llm_engine.model_config.max_model_len)

    def close(self) -> None:
        """Stop vLLM and free its memory."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Give vLLM these weights and drop what it has cached of the old ones; one asleep has room for its cache after them only."""
        self._wake("weights")
        with torch.no_grad():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._wake("kv_cache")
        self._asleep = False
        self.llm.reset_prefix_cache()

    def _wake(self, part: str) -> None:
        if self._asleep:
            self.llm.wake_up(tags=[part])

    def sleep(self) -> None:
        """Give the memory back until the next generation, which brings new weights anyway."""
        if self._sleeps:
            self.llm.sleep(level=2)
            self._asleep = True


def llm_arguments(settings: ColocatedVLLMSection, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of vLLM's ``LLM``, beside the model's folder.

    Args:
        settings: ``grpo.vllm``; what is left out there is vLLM's own default.
        device: Type of the device, such as ``cuda``.
        dtype: Of the policy's products.
    """
    values = settings.model_dump(include=set(_FOR_VLLM), exclude_none=True)
    arguments: dict[str, Any] = {_VLLMS_NAMES.get(key, key): value for key, value in values.items()}
    if device == "cpu":
        # vLLM's default is most of the machine's memory.
        cache = min(_CPU_CACHE_MOST, psutil.virtual_memory().available // _CPU_CACHE_SHARE)
        arguments.setdefault("kv_cache_memory_bytes", cache)
        arguments.setdefault("enforce_eager", True)
    return {
        **arguments,
        "runner": "generate",
        "load_format": "dummy",
        "dtype": str(dtype).removeprefix("torch."),
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "enable_sleep_mode": settings.enable_sleep_mode and device == "cuda",
        "seed": 0,
    }


def check_lengths(prompts: Prompts, context: int, how: str) -> None:
    """Refuse prompts that leave no room for a completion; ``how`` says how to get a larger ``context`` (EngineError)."""
    for index, prompt in enumerate(prompts):
        if len(prompt) >= context:
            raise EngineError(
                f"prompt {index} has {len(prompt)} tokens, but vLLM holds {context} with the completion; {how} above "
                f"{len(prompt)}, or leave the prompt out"
            )


def not_finite() -> EngineError:
    """Return the error of a model whose log-probs are no numbers."""
    return EngineError(
        "the model's outputs are not finite numbers (NaN or infinite): its weights are broken. Continue from an "
        "earlier checkpoint with a lower learning rate, or check the model's files"
    )


def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a policy's weights by their checkpoint names, active adapters merged into copies.

    Merged in float32 and rounded to a 16-bit base's type at random: rounded to the nearest, an adapter's first updates, which
    are smaller than the distance to the next number, would be lost. A weight is always rounded with the same random number.
    """
    yield from _weights_of(unwrap(model), "")


def _weights_of(module: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if hasattr(module, "modules_to_save"):
        own = module.modules_to_save
        module = module.original_module if module.disable_adapters else own[module.active_adapter]
    if hasattr(module, "base_layer") and hasattr(module, "merge"):
        base = module.get_base_layer()
        if not (module.disable_adapters or module.merged):
            module = copy.deepcopy(module).float()
            module.merge()
            for index, (name, parameter) in enumerate(
                module.get_base_layer().named_parameters(recurse=False)
            ):
                weight, dtype = parameter.detach(), getattr(base, name).dtype
                seed = zlib.crc32(prefix.encode()) + index
                yield prefix + name, round_stochastically(weight, seed, dtype) if dtype in HALF else weight
            return
        module = base
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter.detach()
    for name, child in module.named_children():
        yield from _weights_of(child, f"{prefix}{name}.")


def _requests(
    prompts: int, count: int, params: SamplingParams, stops: Sequence[int], seed: int | None
) -> list[Any]:
    from vllm import SamplingParams as VLLMSamplingParams

    seeds = [None if seed is None else seed + index * count for index in range(prompts)]
    return [VLLMSamplingParams(**request(count, params, stops, s), detokenize=False) for s in seeds]


def request(count: int, params: SamplingParams, stops: Sequence[int], seed: int | None) -> dict[str, Any]:
    """Return the settings of a prompt that vLLM and its server call alike; completion i draws with ``seed`` + i."""
    return {
        "n": count,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": seed,
        "max_tokens": params.max_new_tokens,
        "min_tokens": params.min_new_tokens,
        "stop_token_ids": list(stops),
        "ignore_eos": True,
        "logprobs": 0,
    }


def _completion(output: Any, stops: Sequence[int]) -> Completion:
    ids = [int(i) for i in output.token_ids]
    log_probs = [float(step[i].logprob) for i, step in zip(ids, output.logprobs, strict=True)]
    return Completion(ids, log_probs, "stop" if ids and ids[-1] in stops else "length")


def _cut(completion: Completion, strings: StopStrings, least: int) -> Completion:
    """End a completion at the first token that completes a stop string."""
    ids = completion.token_ids
    for end in range(max(1, least + 1), len(ids) + 1):
        if strings.may_end(ids[end - 1]) and strings.just_ended(ids[max(0, end - strings.window) : end]):
            return Completion(ids[:end], completion.log_probs[:end], "stop")
    return completion


def is_filtered(params: SamplingParams) -> bool:
    """Whether vLLM's log-probs are those of a filtered distribution."""
    filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return params.min_new_tokens > 0 or (filters and params.temperature > 0)


def _check_not_quantised(model: Any) -> None:
    base = unwrap(model)
    dtypes = {p.dtype for p in base.parameters() if p.dim() > 1 and not p.dtype.is_floating_point}
    if dtypes:
        raise EngineError(
            f"the weights of this {type(base).__name__} are quantised ({', '.join(sorted(map(str, dtypes)))}), which this "
            "engine cannot hand to vLLM; take engine=transformers"
        )


def _check_head_size(base: Any) -> None:
    """Refuse heads on which vLLM's CPU attention fails in the middle of the first generation."""
    config = base.config.get_text_config(decoder=True)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    try:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    except ImportError:
        return
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise EngineError(
            f"vLLM's attention on CPU has no heads of {size} numbers, only of {', '.join(map(str, sizes))}; take "
            f"engine=native, or for a model from scratch a hidden size of {sizes[0]} × heads"
        )


def _write_model_folder(folder: Path, base: Any, tokenizer: Any) -> None:
    """Write the files that vLLM reads before it gets weights: config and tokenizer."""
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__]
    config.save_pretrained(folder)
    if not hasattr(tokenizer, "save_pretrained"):  # vLLM wants one, though only token ids go in and out
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), pad_token="a"
        )
    tokenizer.save_pretrained(folder)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """vLLM seeds the generators of the process it starts in."""
    import numpy

    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def _thread_setter_kept() -> Iterator[None]:
    """On CPU vLLM replaces ``torch.set_num_threads`` by a function that does nothing."""
    setter, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = setter
        torch.set_num_threads(threads)


def _import_vllm() -> Any:
    # One process: the weights are handed over as they lie. Threads and cores stay as the process has them.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
    except Exception as error:  # a mismatched torchvision raises RuntimeError at import
        raise MissingExtraError(
            f"engine is vllm, but vLLM cannot be imported ({type(error).__name__}: {error}). {INSTALL}"
        ) from error
    return vllm
