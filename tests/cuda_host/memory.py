"""Planned against measured: what preflight plans for each recipe for GPUs, and what torch's own allocator holds at the peak on the stub.

``python -m tests.cuda_host.memory FOLDER [RECIPE …]`` tries GRPO as preflight does, in a process of its own on a card of the
recipe's size (FOLDER is that of ``make test-cuda-host``), and prints a line per recipe; exit 1 where a plan is off by more than
10 %. Kernels do nothing: the longest prompts and completions that the recipe allows, weights without values. SFT is left out,
its loss reads the labels on the card; so are teachers, whose 4 bit need bitsandbytes' own kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

CARDS = {
    "gist-gsm8k": (89, 24),
    "gist-gsm8k-llama": (89, 24),
    "gsm8k-qwen2.5-0.5b": (89, 24),
    "gsm8k-qwen2.5-0.5b-8gb": (89, 8),
    "gsm8k-qwen2.5-1.5b": (89, 24),
    "gsm8k-qwen2.5-1.5b-16gb": (89, 16),
    "gsm8k-qwen3-0.6b-base": (89, 24),
    "gsm8k-qwen3-0.6b-base-16gb": (89, 16),
    "math-grpo": (90, 80),
    "math-qwen2.5-1.5b-16gb": (89, 16),
    "oneshot-gsm8k": (89, 24),
    "qwen2.5-1.5b-python": (89, 24),
    "r1-zero-numina": (89, 24),
    "sft-grpo-dapo": (89, 24),
}
"""Compute capability and memory in GB of the card that a recipe is for."""
WITHIN = 0.1
BESIDE = 16
"""Tokens left for what a format and a template put around a question and its solution."""
_QWEN = {"vocab_size": 151936, "tie_word_embeddings": True}
_NAMES = (
    "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim".split()
)
MODELS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "Qwen/Qwen2.5-0.5B": ("Qwen2", (24, 896, 4864, 14, 2, 64), _QWEN),
    "Qwen/Qwen2.5-0.5B-Instruct": ("Qwen2", (24, 896, 4864, 14, 2, 64), _QWEN),
    "Qwen/Qwen2.5-1.5B-Instruct": ("Qwen2", (28, 1536, 8960, 12, 2, 128), _QWEN),
    "Qwen/Qwen2.5-Math-1.5B-Instruct": ("Qwen2", (28, 1536, 8960, 12, 2, 128), _QWEN),
    "Qwen/Qwen3-0.6B-Base": ("Qwen3", (28, 1024, 3072, 16, 8, 128), _QWEN),
    "Qwen/Qwen3-4B-Base": ("Qwen3", (36, 2560, 9728, 32, 8, 128), _QWEN),
    "meta-llama/Llama-3.2-1B-Instruct": ("Llama", (16, 2048, 8192, 32, 8, 64), _QWEN | {"vocab_size": 128256}),
}  # fmt: skip
"""By name: kind, shape, and what else its configuration has."""


def policy_of(recipe: Any, device: Any) -> Any:
    """Return the recipe's model as ``make_policy`` makes it, its weights taken on the card and never written."""
    import torch
    import transformers

    from algorist.models.attention import set_attention
    from algorist.models.load import Policy, _settle, add_lora
    from algorist.models.precision import pick_precision, set_compute
    from benchmarks.models import make_tokenizer

    kind, sizes, more = MODELS[recipe.model.name]
    precision = pick_precision(recipe.model, device)
    tokenizer = make_tokenizer()
    settings = dict(zip(_NAMES, sizes, strict=True)) | more
    config = getattr(transformers, f"{kind}Config")(
        max_position_embeddings=32768,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **settings,
    )
    _settle(device)
    torch.set_default_dtype(precision.master)
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    torch.set_default_dtype(torch.float32)
    set_attention(model, recipe.model, device, precision.compute)
    set_compute(model, precision.compute)
    return Policy(model if recipe.model.lora is None else add_lora(model, recipe.model.lora), tokenizer)


@contextmanager
def without_numbers() -> Iterator[None]:
    """Rows end at their length, every completion is computed, gradients are finite: what the host would read from the card."""
    from algorist.training import faults, grpo, step
    from tests.cuda_host.stub import rows_end_at_their_length

    def every(batch: Any, *_: Any) -> list[int]:
        return batch.in_group_order(range(len(batch)))  # type: ignore[no-any-return]

    with (
        rows_end_at_their_length(),
        patch.object(step, "rows_to_compute", every),
        patch.object(grpo, "rows_to_compute", every),
        patch.object(faults.FiniteSteps, "on_pre_optimizer_step", lambda *_, **__: None),
    ):
        yield


class Phases:
    """The peak of each phase of a step: rollout, update, and the optimizer's step, which ends with the next rollout."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.now = "optimizer"

    def begin(self, name: str) -> None:
        import torch

        self.peaks[self.now] = max(self.peaks.get(self.now, 0), torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        self.now = name

    @contextmanager
    def counted(self) -> Iterator[None]:
        from algorist.training import step

        def phase(name: str, then: str, function: Any) -> Any:
            def run(*args: Any) -> Any:
                self.begin(name)
                try:
                    return function(*args)
                finally:
                    self.begin(then)

            return run

        with (
            patch.object(step, "roll_out", phase("rollout", "update", step.roll_out)),
            patch.object(step, "update", phase("update", "optimizer", step.update)),
        ):
            yield
        self.begin("end")


def measure(name: str, *overrides: str, steps: int = 4) -> dict[str, Any]:
    """Return planned and measured peak of a recipe's GRPO, in this process."""
    import torch

    from algorist.config import load_recipe
    from algorist.preflight import trial
    from algorist.prompts import get_format
    from algorist.types import Problem

    recipe = load_recipe(name, overrides).recipe
    device = torch.device("cuda")
    policy, form = policy_of(recipe, device), get_format("question_only")
    prompt, longest = recipe.data.train.max_prompt_tokens or 256, recipe.grpo.max_completion_tokens
    count = max(64, 2 * recipe.grpo.rows)
    problems = [Problem(f"p{i}", f"{i}=".rjust(prompt - BESIDE, "1"), "1") for i in range(count)]
    lengths, phases = [longest] * count, Phases()
    with without_numbers(), phases.counted(), patch.multiple(trial, STEPS=steps, ENOUGH_S=0.0):
        memory = trial.try_grpo(recipe, policy, problems, form, device, lengths=lengths, until=math.inf)[
            "memory"
        ]
    measured = max(phases.peaks.values())
    return {
        "recipe": name,
        "planned_gb": memory["peak"] / 1e9,
        "measured_gb": measured / 1e9,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        "ratio": memory["peak"] / measured,
        "phases_gb": {phase: size / 1e9 for phase, size in phases.peaks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of: {', '.join(CARDS)}")
    options = parser.parse_args()
    off = 0
    for name in options.recipes or CARDS:
        capability, size = CARDS[name]
        code = (
            f"import json; from tests.cuda_host.memory import measure; print(json.dumps(measure({name!r})))"
        )
        command = [
            options.folder.resolve() / "python",
            str(capability),
            str(size),
            "-W",
            "ignore",
            "-c",
            code,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-1000:]}")
        row = json.loads(done.stdout.splitlines()[-1])
        off += abs(row["ratio"] - 1) > WITHIN
        print(
            f"{name:27} {size:2} GB: planned {row['planned_gb']:5.2f}, measured {row['measured_gb']:5.2f} GB ({row['ratio']:.3f})",
            flush=True,
        )
    raise SystemExit(1 if off else 0)


if __name__ == "__main__":
    main()
