"""Planned against measured: what preflight plans for each recipe for GPUs, and what torch's own allocator holds at the peak on the stub.

``python -m tests.cuda_host.memory FOLDER [RECIPE …]`` tries the recipe's stages as preflight does, each in a process of its own on a card
of the recipe's size (FOLDER is that of ``make test-cuda-host``), and prints a line per stage; exit 1 where a plan is off by more than 10 %.
Kernels do nothing: the longest prompts, completions and demonstrations that the recipe allows, weights without values. A teacher's 4 bit
are those of bitsandbytes. SFT is measured where every batch fits: its plan does not ask how large the card is.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
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
    "math-sft": (90, 80),
    "math-sft-correct-full": (90, 80),
    "oneshot-gsm8k": (89, 24),
    "qwen2.5-0.5b-from-7b": (89, 24),
    "qwen2.5-1.5b-from-3b": (89, 24),
    "qwen2.5-1.5b-python": (89, 24),
    "qwen3-1.7b-from-4b": (89, 24),
    "r1-zero-numina": (89, 24),
    "sft-grpo-dapo": (89, 24),
}
"""Compute capability and memory in GB of the card that a recipe is for."""
WITHIN = 0.1
ROOMY = 4000
"""Gigabytes of a card on which every batch of SFT fits."""
LONGEST = 2048
"""Tokens of a demonstration where the recipe names no limit; its plan takes as many."""
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
    "Qwen/Qwen2.5-3B-Instruct": ("Qwen2", (36, 2048, 11008, 16, 2, 128), _QWEN),
    "Qwen/Qwen2.5-7B-Instruct": ("Qwen2", (28, 3584, 18944, 28, 4, 128), {"vocab_size": 152064, "tie_word_embeddings": False}),
    "Qwen/Qwen3-0.6B-Base": ("Qwen3", (28, 1024, 3072, 16, 8, 128), _QWEN),
    "Qwen/Qwen3-1.7B-Base": ("Qwen3", (28, 2048, 6144, 16, 8, 128), _QWEN),
    "Qwen/Qwen3-4B": ("Qwen3", (36, 2560, 9728, 32, 8, 128), _QWEN),
    "Qwen/Qwen3-4B-Base": ("Qwen3", (36, 2560, 9728, 32, 8, 128), _QWEN),
    "meta-llama/Llama-3.2-1B-Instruct": ("Llama", (16, 2048, 8192, 32, 8, 64), _QWEN | {"vocab_size": 128256}),
}  # fmt: skip
"""By name: kind, shape, and what else its configuration has."""
TOKENS = 151_665
"""Of the vocabularies of Qwen's models; their heads have more rows."""


def config_of(name: str, **settings: Any) -> Any:
    """Return the configuration of a model of ``MODELS``."""
    import transformers

    kind, sizes, more = MODELS[name]
    settings |= dict(zip(_NAMES, sizes, strict=True)) | more
    return getattr(transformers, f"{kind}Config")(
        max_position_embeddings=32768, bos_token_id=None, **settings
    )


def policy_of(section: Any, device: Any, trained: bool = True, fused: bool = False) -> Any:
    """Return a model as ``make_policy`` makes it, its weights taken on the card and never written; ``fused``: with Liger's kernels."""
    import torch
    import transformers

    from algorist.extensions.liger import fuse
    from algorist.models.attention import set_attention
    from algorist.models.load import Policy, _set_up, add_lora
    from algorist.models.precision import pick_precision, set_compute
    from benchmarks.models import make_tokenizer

    precision = pick_precision(section, device, trained=trained)
    tokenizer = make_tokenizer()
    words = tokenizer.get_vocab() | {"the last one": TOKENS - 1}
    tokenizer.get_vocab = lambda: words  # of which the teacher's head keeps as many rows
    config = config_of(section.name, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    _set_up(device)
    torch.set_default_dtype(precision.master)
    with torch.device(device):
        model = getattr(transformers, f"{MODELS[section.name][0]}ForCausalLM")(config)
    torch.set_default_dtype(torch.float32)
    if section.quantization is not None:
        quantize(model, section, device, precision.compute)
    set_attention(model, section, device, precision.compute)
    set_compute(model, precision.compute)
    if fused:
        fuse(model)
    return Policy(model if section.lora is None else add_lora(model, section.lora), tokenizer)


def quantize(model: Any, section: Any, device: Any, compute: Any) -> None:
    """Keep the layers' weights in bitsandbytes' 4 bit, as ``from_pretrained`` does."""
    import bitsandbytes
    import torch
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    from algorist.models.loaders import LOADERS

    settings = LOADERS.get("quantization").arguments(section, device, compute)["quantization_config"]
    weights = dict(model.named_parameters())
    replace_with_bnb_linear(model, ["lm_head"], settings)
    for name, made in list(model.named_parameters()):
        inside, _, own = name.rpartition(".")
        given = weights.pop(name)
        if made.is_meta and own == "weight":
            given = bitsandbytes.nn.Params4bit(given.data, requires_grad=False, **vars(made)).to(device)
        setattr(model.get_submodule(inside), own, given)
    torch.cuda.empty_cache()


@contextmanager
def without_numbers() -> Iterator[None]:
    """Rows end at their length, every completion is computed, gradients are finite: what the host would read from the card."""
    from algorist.training import faults, step
    from tests.cuda_host.stub import rows_end_at_their_length

    def every(batch: Any, *_: Any) -> list[int]:
        return batch.in_group_order(range(len(batch)))  # type: ignore[no-any-return]

    with (
        rows_end_at_their_length(),
        patch.object(step, "rows_to_compute", every),
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


@contextmanager
def teachers() -> Iterator[None]:
    """Teachers are of ``MODELS``."""
    import transformers

    from algorist.extensions.teacher import model

    def make(section: Any, *, device: Any, trained: bool, **_: Any) -> Any:
        return policy_of(section, device, trained)

    with (
        patch.object(model, "make_policy", make),
        patch.object(transformers.AutoConfig, "from_pretrained", lambda name, **_: config_of(name)),
    ):
        yield


def measure(
    name: str, *overrides: str, stage: str = "grpo", steps: int = 4, fused: bool = False
) -> dict[str, Any]:
    """Return planned and measured peak of a recipe's stage, in this process."""
    import torch

    from algorist.config import load_recipe

    recipe = load_recipe(name, overrides).recipe
    device = torch.device("cuda")
    with patch.multiple("algorist.preflight.trial", STEPS=steps, ENOUGH_S=0.0):
        policy = policy_of(recipe.model, device, fused=fused)
        memory, phases = (sft if stage == "sft" else grpo)(recipe, policy, device)
    measured = max(phases.values())
    return {
        "recipe": name,
        "stage": stage,
        "planned_gb": memory["peak"] / 1e9,
        "measured_gb": measured / 1e9,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        "ratio": memory["peak"] / measured,
        "phases_gb": {phase: size / 1e9 for phase, size in phases.items()},
        "plan_gb": {part: size / 1e9 for part, size in memory.items() if size},
    }


def grpo(recipe: Any, policy: Any, device: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return the plan of GRPO and the peak of each phase, in bytes."""
    from algorist.types import Problem

    prompt = recipe.data.train.max_prompt_tokens or 256
    count = max(64, 2 * recipe.grpo.rows)
    problems = [Problem(f"p{i}", f"{i}=".rjust(prompt - BESIDE, "1"), "1") for i in range(count)]
    phases = Phases()
    with without_numbers(), teachers(), phases.counted():
        memory = planned_and_tried("grpo", recipe, policy, problems, device)
    return memory, phases.peaks


def sft(recipe: Any, policy: Any, device: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return the plan of SFT and its peak, in bytes; labels and masks have numbers, on which shapes depend."""
    from algorist.types import Problem
    from tests.cuda_host.emulate import Integers

    prompt, longest = recipe.data.train.max_prompt_tokens or 256, recipe.sft.max_length or LONGEST
    solution = "1" * (longest - prompt - BESIDE)
    count = 4 * recipe.sft.batch_size * recipe.sft.gradient_accumulation_steps
    problems = [
        Problem(f"p{i}", f"{i}=".rjust(prompt - BESIDE, "1"), "1", solution[i % 2 :]) for i in range(count)
    ]
    with without_numbers(), Integers():
        memory = planned_and_tried("sft", recipe, policy, problems, device)
    return memory, {"update": memory["measured_peak"]}


def planned_and_tried(stage: str, recipe: Any, policy: Any, problems: Any, device: Any) -> dict[str, int]:
    """Return the plan of a stage as preflight makes it, and the peak of its tried steps, in bytes."""
    from algorist.config.schema import Recipe
    from algorist.data.problems import Problems
    from algorist.models.memory import memory_now
    from algorist.preflight.memory import plan_step
    from algorist.preflight.time import Sizes, batch_arithmetic
    from algorist.preflight.trial import try_stage
    from algorist.prompts import get_format
    from algorist.rewards import build_rewards
    from algorist.training.extension import Extensions

    form, section, data = (
        get_format("question_only"),
        getattr(recipe, stage),
        Problems(problems, problems, []),
    )
    sizes = Sizes.of(recipe, data, policy, form, sft=stage == "sft")
    extensions = Extensions.of(Recipe(grpo=recipe.grpo, model=recipe.model))
    plan = plan_step(
        policy.model, sizes.shape(recipe, stage), section, base_bytes=memory_now(), extensions=extensions
    )
    steps = batch_arithmetic(recipe, len(problems), len(problems))[stage]["steps"]
    rewards = build_rewards(recipe.rewards, form, matcher=recipe.matcher)
    whole: Any = SimpleNamespace(
        recipe=recipe, form=form, problems=data, device=device, rewards=rewards, extensions=extensions
    )
    tried = try_stage(stage, whole, policy, steps=steps, until=math.inf)
    return plan.as_dict() | {"measured_peak": tried["measured_peak"]}


def stages(name: str) -> Iterator[tuple[str, int, int]]:
    """Yield a recipe's stages, each with the capability and the gigabytes of the card it is measured on."""
    from algorist.config import load_recipe

    recipe, (capability, size) = load_recipe(name).recipe, CARDS[name]
    if recipe.sft.enabled:
        yield "sft", capability, ROOMY
    if recipe.grpo.enabled:
        yield "grpo", capability, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of: {', '.join(CARDS)}")
    options = parser.parse_args()
    off = 0
    for name in options.recipes or CARDS:
        for stage, capability, size in stages(name):
            code = f"import json; from tests.cuda_host.memory import measure; print(json.dumps(measure({name!r}, stage={stage!r})))"
            command = [options.folder.resolve() / "python", str(capability), str(size), "-W", "ignore", "-c"]
            done = subprocess.run([*command, code], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name}, {stage}: {done.stderr[-1000:]}")
            row = json.loads(done.stdout.splitlines()[-1])
            off += abs(row["ratio"] - 1) > WITHIN
            print(
                f"{name:27} {CARDS[name][1]:2} GB, {stage:4}: planned {row['planned_gb']:6.2f}, measured {row['measured_gb']:6.2f} GB "
                f"({row['ratio']:.3f})",
                flush=True,
            )
    raise SystemExit(1 if off else 0)


if __name__ == "__main__":
    main()
