"""What each shipped recipe costs by its own numbers: steps, completions, tokens, FLOPs, memory. Nothing is measured here.

    python benchmarks/recipe_cost.py

Memory: preflight's plan of each stage from the model's shape, the larger stage counts.
FLOPs: 6·N per token that is trained on and 2·N per token that is sampled, with N parameters; attention's own part, which
grows with the square of the length, is left out. With an adapter, 6·N is an upper bound (no gradient of frozen weights).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from algorist.config.load import load_recipe, recipe_names
from algorist.config.schema import DatasetSection, Recipe
from algorist.data.problems import Problems, tokenizer_texts
from algorist.models.load import add_lora, make_policy
from algorist.models.precision import DTYPES
from algorist.preflight.memory_advice import plan_from_config
from algorist.preflight.run import batch_arithmetic
from algorist.prompts.chat import encode_prompt
from algorist.runs.asking import recipe_format
from algorist.store.stages import STAGES

_QWEN_HALF = (
    Qwen2Config,
    {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
    },
    494_032_768,
)
_QWEN_1_5 = (
    Qwen2Config,
    {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
    },
    1_543_714_304,
)
MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, int], int]] = {
    "Qwen/Qwen2.5-0.5B": _QWEN_HALF,
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN_HALF,
    "qwen-coder-0.5b": _QWEN_HALF,
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN_1_5,
    "Qwen/Qwen2.5-Math-1.5B-Instruct": _QWEN_1_5,
    "meta-llama/Llama-3.2-1B-Instruct": (
        LlamaConfig,
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "vocab_size": 128256,
        },
        1_235_814_400,
    ),
    "smollm2": (
        LlamaConfig,
        {
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "vocab_size": 49152,
        },
        134_515_008,
    ),
    "Qwen/Qwen3-0.6B-Base": (
        Qwen3Config,
        {
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
        },
        596_049_920,
    ),
    "Qwen/Qwen3-1.7B-Base": (
        Qwen3Config,
        {
            "hidden_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 6144,
            "vocab_size": 151936,
        },
        1_720_574_976,
    ),
    "Qwen/Qwen3-4B-Base": (
        Qwen3Config,
        {
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 9728,
            "vocab_size": 151936,
        },
        4_022_468_096,
    ),
}
"""Hub models: class, published shape, published parameter count (all with tied embeddings). The count of the shape is
compared with the published one."""

ROWS = {
    "gsm8k train": 7473,
    "gsm8k test": 1319,
    "math test": 5000,
    "numina_tir train": 72441,
    "numina_tir test": 99,
    "openmath_reasoning cot": 59,
    "svamp_300 test": 300,
    "MATH/sft.jsonl": 1767,
    "MATH/sft_correct.jsonl": 1408,
}
"""Rows of datasets that are not shipped. GSM8K and MATH: counted (baselines/grading.json, tests/unit/data/test_load.py).
OpenMathReasoning-mini: what is left of it after the filters, 118 steps in 2 epochs.
Files of one's own (with a slash): the rows of the original's file."""


@dataclass(frozen=True)
class Cost:
    """One row of the table. ``None`` where a recipe sets no limit; ``rows`` are those of a file of one's own."""

    recipe: str
    parameters: int
    trained: int
    sft_steps: int | None
    rows: int | None
    grpo_steps: int | None
    sampled: int
    evaluated: int
    longest: int
    tokens: int | None
    unlimited_prompts: bool
    flops: float
    fixed: int
    peak: int


def cost(name: str) -> Cost:
    """Return what a shipped recipe costs by its numbers."""
    recipe = load_recipe(name).recipe
    model, prompt_tokens, counts = _tiny(recipe) if recipe.model.name == "tiny" else _hub(recipe)
    numbers = list(model.parameters())
    trained = [p for p in numbers if p.requires_grad]
    parameters = sum(p.numel() for p in numbers)
    trains = recipe.sft.enabled or recipe.grpo.enabled
    batch = batch_arithmetic(recipe, counts["train"], counts["sft"])
    sft, grpo = batch.get("sft"), batch.get("grpo")
    sft_rows = sft["steps"] * sft["demonstrations_per_step"] if sft else 0
    if sft and recipe.sft.max_steps is None:
        sft_rows = math.ceil(recipe.sft.epochs * counts["sft"])
    sft_tokens = sft_rows * (recipe.sft.max_length or 0)
    completions = grpo["steps"] * grpo["completions_per_step"] if grpo else 0
    grpo_tokens = completions * recipe.grpo.max_completion_tokens
    grpo_tokens += completions // recipe.grpo.group_size * (prompt_tokens or 0)
    unlimited = bool(sft) and recipe.sft.max_length is None
    training = 6 * parameters * ((sft_rows if unlimited else sft_tokens) + grpo_tokens)
    sampling = 2 * parameters * grpo_tokens // recipe.grpo.num_iterations
    fixed, peak = _memory(recipe, model, prompt_tokens)
    return Cost(
        recipe=name,
        parameters=parameters,
        trained=sum(p.numel() for p in trained) if trains else 0,
        sft_steps=sft["steps"] if sft else None,
        rows=sft_rows if unlimited else None,
        grpo_steps=grpo["steps"] if grpo else None,
        sampled=grpo["rollouts"] if grpo else 0,
        evaluated=_evaluations(recipe, batch) * counts["eval"] * (1 + recipe.eval.samples),
        longest=recipe.grpo.max_completion_tokens if grpo else recipe.eval.max_completion_tokens or 0,
        tokens=None if unlimited else sft_tokens + grpo_tokens,
        unlimited_prompts=bool(grpo) and prompt_tokens is None,
        flops=training + sampling,
        fixed=fixed,
        peak=peak,
    )


def _memory(recipe: Recipe, model: Any, prompt_tokens: int | None) -> tuple[int, int]:
    """Return what stays during a stage (weights, gradients, optimizer states) and the least peak, as preflight plans them: bytes.

    Models of the hub as on a GPU, tiny ones in float32, as on a CPU; without what an allocator loses in holes. The least peak: the
    update one row at a time, sampling as the recipe has it.
    """
    smallest = {"sft": {"batch_size": 1}, "grpo": {"micro_batch_tokens": 16}}
    changed = {stage: getattr(recipe, stage).model_copy(update=keys) for stage, keys in smallest.items()}
    recipe = recipe.model_copy(update=changed)
    tiny = recipe.model.name == "tiny"
    compute = torch.float32 if tiny else torch.bfloat16
    trains = recipe.sft.enabled or recipe.grpo.enabled
    own = torch.float32 if trains and recipe.model.lora is None else compute
    plans = [
        replace(
            plan_from_config(
                recipe,
                stage,
                model.config,
                dtype=DTYPES.get(recipe.model.dtype, own),
                compute=compute,
                prompt_tokens=prompt_tokens or 256,
            ),
            allocator=0,
        )
        for stage in STAGES
        if getattr(recipe, stage).enabled
    ]
    if not plans:
        return sum(p.numel() for p in model.parameters()) * own.itemsize, 0
    return max(p.base + p.gradients + p.optimizer for p in plans), max(p.peak for p in plans)


def _tiny(recipe: Recipe) -> tuple[Any, int | None, dict[str, int]]:
    """Make the model from scratch on its real data; float32, as on a CPU."""
    data, form = Problems.load(recipe), recipe_format(recipe)
    texts = tokenizer_texts([*data.sft[:4000], *data.train[:4000]], form)
    policy = make_policy(
        recipe.model, device=torch.device("cpu"), seed=recipe.seed, texts=texts, tags=form.tags.all()
    )
    longest = max(len(encode_prompt(form, policy.tokenizer, p.question)) for p in data.train)
    return (
        policy.model,
        longest,
        {"train": len(data.train), "sft": len(data.sft), "eval": len(data.held_out)},
    )


def _hub(recipe: Recipe) -> tuple[Any, int | None, dict[str, int]]:
    """Build the published shape without weights; bfloat16, as on a GPU.

    Raises:
        ValueError: The shape has another number of parameters than was published.
    """
    config, shape, published = MODELS[recipe.model.name]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config(**shape, tie_word_embeddings=True), dtype=torch.bfloat16
        )
    found = sum(p.numel() for p in model.parameters())
    if found != published:
        raise ValueError(f"{recipe.model.name}: the shape has {found} parameters, published are {published}")
    if recipe.model.lora is not None:
        model = add_lora(model, recipe.model.lora)
    train = _rows(recipe.data.train)
    counts = {
        "train": train,
        "sft": _rows(recipe.data.sft) if recipe.data.sft else train,
        "eval": _rows(recipe.data.eval),
    }
    return model, recipe.data.train.max_prompt_tokens, counts


def _rows(section: DatasetSection) -> int:
    """Return the rows of a dataset, at most; 1 where ``max_steps`` makes them irrelevant and they are not known."""
    known = ROWS.get(section.path or f"{section.name} {section.split}")
    known = known or section.params.get("count")  # a generator's
    return min(known or section.limit or 1, section.limit or math.inf)


def _evaluations(recipe: Recipe, batch: dict[str, Any]) -> int:
    """Return how often the held-out problems are answered: before, during and after the stages."""
    during = sum(
        (batch[stage]["steps"] - 1) // section.eval_every
        for stage, section in (("sft", recipe.sft), ("grpo", recipe.grpo))
        if stage in batch and section.eval_every
    )
    return during + len(batch) + recipe.eval.baseline


def table() -> str:
    """Return the table of all shipped recipes but ``reasoning-gym``, whose problems need an extra."""
    lines = [
        "| recipe | parameters (trained) | steps: SFT / GRPO | completions: training / evaluation | longest | "
        "tokens | FLOPs | memory: what stays | least peak |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_line(cost(name)) for name in sorted({*recipe_names()} - {"reasoning-gym"}, key=_order)),
    ]
    return "\n".join([*lines, ""])


def _order(name: str) -> tuple[str, str]:
    """Small models first."""
    return ("" if load_recipe(name).recipe.model.name == "tiny" else "hub", name)


def _line(found: Cost) -> str:
    trained = found.trained == found.parameters
    share = "all" if trained else _short(found.trained) if found.trained else "none"
    tokens = "–"
    if found.rows is not None:
        tokens = f"{found.rows:,} rows × L"
    elif found.tokens:
        tokens = _short(found.tokens) + (" + prompts" if found.unlimited_prompts else "")
    flops = _power(found.flops) + (" × L" if found.rows is not None else "") if found.flops else "–"
    cells = (
        f"`{found.recipe}`",
        f"{_short(found.parameters)} ({share})",
        " / ".join(f"{steps:,}" if steps else "–" for steps in (found.sft_steps, found.grpo_steps)),
        f"{found.sampled:,} / {found.evaluated:,}",
        f"{found.longest:,}",
        tokens,
        flops,
        _bytes(found.fixed),
        _bytes(found.peak) if found.peak else "–",
    )
    return f"| {' | '.join(cells)} |"


def _short(number: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _bytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**29 else f"{number / 2**20:.1f} MiB"


def _power(number: float) -> str:
    exponent = math.floor(math.log10(number))
    return f"{number / 10**exponent:.1f}e{exponent}"


if __name__ == "__main__":
    print(table(), end="")
