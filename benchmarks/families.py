"""Sampling and update of a small model by hand and packed, against its own forward and the padded pass: processor seconds, in turns.

    python benchmarks/families.py gemma3 [--bfloat16] [--tokens 24]     # random weights: gemma3 lfm2 smollm3 granite olmo3
    python benchmarks/families.py MODEL --bfloat16                      # a folder, or a GGUF file
    python benchmarks/families.py smollm3 --generate                    # sampling against transformers' ``generate``

32 rows of four prompts, one thread. Where the model's own forward is what the engine takes (lfm2), it stands against ``generate``, too.
``ALGORIST_CPU_PRODUCTS=mkl`` and ``onednn`` tell the libraries of the products apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

from algorist.config.schema import ModelSection
from algorist.models.host_memory import keep_freed_memory
from algorist.models.load import make_policy
from algorist.models.precision import set_compute
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native.engine import NativeEngine
from algorist.rollouts.native.weights import why_no_decoder
from algorist.rollouts.transformers import TransformersEngine
from algorist.training.batch import Batch
from algorist.training.log_probs import LogProbs

LENGTHS, GROUP, PART, TURNS = (90, 110, 100, 120), 8, 8, 3
"""Tokens of the prompts, rows of each, rows of a forward and backward, turns of which the first is thrown away."""
SHAPES: dict[str, dict[str, Any]] = {
    "Gemma3": {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 4,
               "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512},
    "Lfm2": {"hidden_size": 512, "intermediate_size": 2304, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
             "layer_types": ["conv", "conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "SmolLM3": {"hidden_size": 1024, "intermediate_size": 5504, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
                "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
    "Granite": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
                "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625, "logits_scaling": 8.0},
    "Olmo3": {"hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 4, "num_attention_heads": 16,
              "num_key_value_heads": 16, "sliding_window": 128},
}  # fmt: skip
"""Family → shape of its layers; few of them, and 32k words."""


def make_model(name: str) -> Any:
    """Return a family's model of random weights, or the model of a folder or file, in float32."""
    family = next((family for family in SHAPES if family.lower() == name), None)
    if family is None:
        section = ModelSection(name=name, dtype="float32")
        return make_policy(section, device=torch.device("cpu"), seed=0).model
    torch.manual_seed(0)
    kind = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, kind)(vocab_size=32000, **SHAPES[family])
    return getattr(transformers, f"{family}ForCausalLM")(config)


def in_turns(what: str, ways: dict[str, Callable[[], Any]]) -> None:
    """Run two ways in turns and print their processor seconds and the ratio of the medians."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS):
        for name, run in ways.items():
            began = time.process_time()
            run()
            if turn:
                seconds[name].append(time.process_time() - began)
    before, after = (statistics.median(values) for values in seconds.values())
    first, second = ways
    print(f"{what}: {first} {before:.2f} s, {second} {after:.2f} s, {before / after:.2f} times", flush=True)


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--bfloat16", action="store_true", help="products in bfloat16 over float32 weights")
    parser.add_argument("--generate", action="store_true", help="sample against transformers' generate")
    parser.add_argument("--tokens", type=int, default=24)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    model = make_model(arguments.model)
    model.generation_config.eos_token_id = None
    if arguments.bfloat16:
        set_compute(model, torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 30000, (length,), generator=draw).tolist() for length in LENGTHS]
    params = SamplingParams(temperature=1.0, max_new_tokens=arguments.tokens, seed=1)
    reason = why_no_decoder(model)
    engines: dict[str, Any] = (
        {"own forward": NativeEngine(model, tier="module"), "by hand": NativeEngine(model, tier="decoder")}
        if reason is None
        else {"generate": TransformersEngine(model), "own forward, prompts once": NativeEngine(model)}
    )
    if arguments.generate:
        engines = {"generate": TransformersEngine(model), "algorist": NativeEngine(model)}
    ways = {name: partial(engine.generate, prompts, GROUP, params) for name, engine in engines.items()}
    in_turns(f"sampling {len(prompts) * GROUP} rows of {arguments.tokens} tokens", ways)

    groups = engines[next(iter(engines))].generate(prompts, GROUP, params)
    completions = [completion.token_ids for group in groups for completion in group]
    rows = len(completions)
    ones = torch.ones(rows, arguments.tokens, dtype=torch.bool)
    batch = Batch(prompts, completions, [row // GROUP for row in range(rows)], torch.zeros(rows), ones)
    autocast: Any = partial(torch.autocast, "cpu", torch.bfloat16) if arguments.bfloat16 else nullcontext
    model.train()

    def update(log_probs: LogProbs) -> None:
        model.zero_grad()
        for first in range(0, rows, PART):
            values, _ = log_probs(model, batch.take(list(range(first, first + PART))), autocast=autocast)
            values.sum().backward()

    in_turns(
        "an update",
        {"padded": partial(update, LogProbs(packed=False)), "packed": partial(update, LogProbs())},
    )


if __name__ == "__main__":
    main()
