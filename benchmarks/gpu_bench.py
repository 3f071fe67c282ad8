"""What the sections of ``gpu.py`` run on: random models in Qwen2.5's shapes, timing by CUDA events, peak memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    # layers, hidden, intermediate, heads, key-value heads, vocabulary
    "0.5B": (24, 896, 4864, 14, 2, 151936),
    "1.5B": (28, 1536, 8960, 12, 2, 151936),
    "4B": (36, 2560, 9728, 32, 8, 151936),
    "8B": (36, 4096, 12288, 32, 8, 151936),
    "smoke": (2, 64, 128, 4, 2, 512),
}
PROMPT = 200


class Skipped(Exception):
    """A section cannot run on this machine; the text says why."""


class Bench:
    """Where and how large the sections run."""

    def __init__(self, smoke: bool, device: str) -> None:
        self.cuda = device == "cuda"
        self.smoke, self.device = smoke, torch.device("cuda:0" if self.cuda else device)
        self.dtype = torch.bfloat16 if self.cuda else torch.float32

    def shape(self, name: str) -> str:
        """The shape to build: tiny in a smoke run."""
        return "smoke" if self.smoke else name

    def model(self, name: str, dtype: torch.dtype | None = None) -> Qwen2ForCausalLM:
        """A random model of a shape, with keys biased as in Qwen2.5's first and last layers."""
        layers, hidden, inner, heads, kv_heads, vocab = SHAPES[self.shape(name)]
        config = Qwen2Config(
            num_hidden_layers=layers,
            hidden_size=hidden,
            intermediate_size=inner,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocab,
            max_position_embeddings=32768,
            tie_word_embeddings=name == "0.5B",
            eos_token_id=None,
            bos_token_id=None,
        )
        torch.manual_seed(0)
        with self.device:
            was = torch.get_default_dtype()
            torch.set_default_dtype(dtype or self.dtype)
            try:
                model = Qwen2ForCausalLM(config)
            finally:
                torch.set_default_dtype(was)
        with torch.no_grad():
            for layer in (model.model.layers[0], model.model.layers[-1]):
                layer.self_attn.k_proj.bias.normal_(0, 20.0)
        return model.eval()

    def prompts(self, count: int, vocab: int, size: int = PROMPT) -> list[list[int]]:
        """Random prompts of one size."""
        size = 12 if self.smoke else size
        generator = torch.Generator().manual_seed(1)
        return torch.randint(3, vocab, (count, size), generator=generator).tolist()

    def seconds(self, run: Callable[[], Any], repeats: int = 5, warmup: int = 2) -> float:
        """Median time of ``run``, by CUDA events where there are any."""
        for _ in range(1 if self.smoke else warmup):
            run()
        times = []
        for _ in range(1 if self.smoke else repeats):
            if not self.cuda:
                began = time.perf_counter()
                run()
                times.append(time.perf_counter() - began)
                continue
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            run()
            last.record()
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last) / 1000)
        return statistics.median(times)

    @contextmanager
    def peak(self, into: dict[str, Any]) -> Iterator[None]:
        """Note the largest memory that tensors took."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        yield
        into["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 if self.cuda else None

    @contextmanager
    def smaller_card(self, size: float) -> Iterator[float]:
        """Leave ``size`` bytes of the card by taking the others, in GB: the driver's free memory is what parts are made for."""
        self.free()
        total = torch.cuda.get_device_properties(self.device).total_memory if self.cuda else 0
        taken = torch.empty(max(0, int(total - size)), dtype=torch.uint8, device=self.device)
        yield taken.nbytes / 1e9

    def free(self) -> None:
        """Give back what the last model took."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def need_trl() -> None:
    """Raise where TRL is missing."""
    for library in ("trl", "datasets"):
        if find_spec(library) is None:
            raise Skipped(f"{library} is not installed; CONTRIBUTING.md says which wheels to carry")
