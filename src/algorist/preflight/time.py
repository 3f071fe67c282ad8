"""Estimate of a recipe's time on this machine: a prompt, a few decode steps, one forward and backward are measured; the rest is arithmetic.

Nothing is sampled for it: tokens of a step times seconds of a token, by the products of the layers.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, dropwhile, islice
from statistics import mean, pstdev
from typing import Any

import torch

from algorist.config.schema import GRPOSection, Recipe, SFTSection
from algorist.data.problems import Problems
from algorist.diagnosis.settings import Settings
from algorist.models.load import Policy
from algorist.models.modes import eval_mode
from algorist.models.precision import autocast_of, on_gpu
from algorist.models.sharding import unwrap
from algorist.preflight.memory import Shape
from algorist.prompts import PromptFormat
from algorist.prompts.chat import encode_prompt
from algorist.rollouts import make_engine
from algorist.rollouts.engines import ENGINES
from algorist.rollouts.native.decoder_tier import rows_at_a_time
from algorist.store.run_log import duration
from algorist.store.stages import STAGES
from algorist.training.batch import Batch
from algorist.training.grpo_setup import sampling_params
from algorist.training.log_probs import LogProbs
from algorist.types import Problem
from algorist_grader.system import waited

SHORT_S, LONG_S = 0.3, 2.0
"""Shorter measurements are repeated, without what is made once; a forward and backward grows until it takes about ``LONG_S``."""
LEAST_S = 1e-6
"""What any work takes: on a busy machine the time waited for may round to more than the time that passed."""
FEW, SHORT, LONG = 4, 4, 256
"""Rows of a small batch; tokens of a short prompt and at most of a long one."""
COMPLETION = 64
"""Tokens of a measured completion: enough for each kind of work that its products are as fast as in a step."""
MANY = 1 << 20
"""Rows, more than anybody asks for."""
LOOKED_AT = 100
"""Prompts and demonstrations whose length is measured."""
SWEEPS = 8
"""Reads and writes of float32 that AdamW makes per weight, in those of a gradient's norm, which makes one."""
EVENING_S = 3 * 3600.0
"""Length proposed for a run that lasts longer than its user waits."""
AT_LEAST = 5e9
"""Products a second that any machine does, model and Python included: what cannot last an hour then is not measured before a run."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts and tokens that the time of a recipe follows from.

    Attributes:
        train, sft, held_out: Problems; of SFT those whose demonstrations fit.
        prompt: Mean tokens of a prompt.
        longest_prompt: Of those looked at.
        held_out_prompt, longest_held_out: The same two of held-out prompts.
        demonstration: Mean tokens of what a demonstration adds to its prompt; 0 without SFT.
        longest_demonstration: With its prompt.
        completions: Lengths of what GRPO samples: of demonstrations where these are imitated first, as sampled, else the limit.
        start: Lengths of what the model writes before any training.
    """

    train: int
    sft: int
    held_out: int
    prompt: float
    longest_prompt: int
    held_out_prompt: float
    longest_held_out: int
    demonstration: float
    longest_demonstration: int
    completions: Sequence[int]
    start: Sequence[int]

    @classmethod
    def of(
        cls, recipe: Recipe, problems: Problems, policy: Policy, form: PromptFormat, *, sft: bool
    ) -> Sizes:
        """Return the sizes of a recipe's problems; without ``sft`` that stage is done."""
        prompts, others = (
            [len(encode_prompt(form, policy.tokenizer, p.question)) for p in part]
            for part in (_some(problems.train), problems.held_out[:2000])
        )
        limit, lengths, fitting = recipe.grpo.max_completion_tokens, [], len(problems.sft)
        if sft:
            from algorist.training.sft import demonstrations, tokenize_demonstrations

            some = _some(problems.sft)
            demos = demonstrations(some, form, policy.tokenizer, recipe.sft.source)
            rows, _ = tokenize_demonstrations(demos, policy.tokenizer, max_length=recipe.sft.max_length)
            # A tool's replies are not learned, and part of the completion.
            lengths = [len([*dropwhile((-100).__eq__, row["labels"])]) for row in rows]
            fitting = round(fitting * len(rows) / max(1, len(some)))
        return cls(
            len(problems.train),
            fitting,
            len(problems.held_out),
            mean(prompts or [0]),
            max(prompts, default=0),
            mean(others or [0]),
            max(others, default=0),
            mean(lengths or [0]),
            max(prompts, default=0) + max(lengths, default=0),
            [min(limit, length) for length in lengths] or [limit],
            [limit],
        )

    def shape(self, recipe: Recipe, stage: str) -> Shape:
        """Return the largest batch of a stage."""
        if stage == "sft":
            return Shape(
                recipe.sft.batch_size, 0, 0, min(recipe.sft.max_length or 2048, self.longest_demonstration)
            )
        grpo, lengths = recipe.grpo, self.completions
        rows, prompts = grpo.batch_size, max(1, grpo.batch_size // grpo.group_size)
        tokens = rows * mean(lengths) + 2 * rows**0.5 * pstdev(lengths)
        return Shape(rows, prompts, self.longest_prompt, max(lengths), int(tokens))


def _some(problems: Sequence[Problem]) -> Sequence[Problem]:
    return problems[:: max(1, len(problems) // LOOKED_AT)][:LOOKED_AT]


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of each kind of work with one model on one machine.

    Attributes:
        call: A call of the engine before its first token: weights are laid out.
        prompt: A prompt token, without the head.
        step: A decode step, however few rows it has.
        row: Each row of a decode step.
        product: A product (one weight, one token) forward and backward.
        optimizer: A step of the optimizer.
        token, head: Products of a token, and those of the head, which completions need alone.
        together: Most rows of a decode step.
        free: Share of the time in which there was a processor for this process; the seconds are those of a free machine.
    """

    call: float
    prompt: float
    step: float
    row: float
    product: float
    optimizer: float
    token: float
    head: float
    together: int
    free: float = 1.0

    def sampling(self, prompt_tokens: float, lengths: Sequence[int]) -> float:
        """Return the seconds of one call: rows leave as they end, and those that wait take their place."""
        steps = max(max(lengths), sum(lengths) / self.together)
        return self.call + self.prompt * prompt_tokens + self.step * steps + self.row * sum(lengths)

    def update(self, tokens: float, completions: float, passes: float = 1.0) -> float:
        """Return the seconds of an optimizer step: ``tokens`` in all, ``completions`` of them at the head."""
        return passes * self.product * (tokens * self.token + completions * self.head) + self.optimizer


def products(model: Any) -> tuple[float, float]:
    """Return the products of a token, without the head's, and those of the head."""
    base = unwrap(model)
    embedding, head = base.get_input_embeddings().weight, base.get_output_embeddings().weight
    every = sum(p.numel() for p in base.parameters() if p.dim() > 1)
    return every - embedding.numel() - (0 if head is embedding else head.numel()), head.numel()


def free_clock() -> float:
    """Return seconds without those in which this thread waits for a processor: as on a machine that does nothing else."""
    return time.perf_counter() - waited(os.getpid()).get(str(threading.get_native_id()), 0.0)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of some work; of short work the least of three times."""
    best = math.inf
    for _ in range(3):
        began = free_clock()
        work()
        if on_gpu(device):
            torch.cuda.synchronize()
        best = min(best, max(LEAST_S, free_clock() - began))
        if best > SHORT_S:
            break
    return best


def measure(
    recipe: Recipe, policy: Policy, prompt: Sequence[int], device: torch.device, *, backward: bool = True
) -> Speed:
    """Measure the speed of a policy, which stays as it is, as does the state of random numbers.

    Args:
        recipe: Sampling settings, rows of a step.
        policy: Model and tokenizer.
        prompt: A prompt of the recipe.
        device: Of the policy.
        backward: There is memory for gradients; else a forward alone counts as a third.
    """
    began, began_free = time.perf_counter(), free_clock()
    token, head = products(policy.model)
    with torch.random.fork_rng(devices=[device] if on_gpu(device) else []):
        call, of_prompt, step, row = _sampling(recipe, policy, list(prompt[:LONG]), device)
        product, optimizer = _update(recipe, policy, list(prompt[:LONG]), device, backward)
    free = min(1.0, (free_clock() - began_free) / (time.perf_counter() - began))
    return Speed(call, of_prompt, step, row, product, optimizer, token, head, _together(policy, device), free)


def _together(policy: Policy, device: torch.device) -> int:
    width = policy.model.config.get_text_config(decoder=True).hidden_size
    return rows_at_a_time(width, device, MANY)


def _sampling(
    recipe: Recipe, policy: Policy, prompt: list[int], device: torch.device
) -> tuple[float, float, float, float]:
    """Return the seconds of a call, a prompt token, a decode step and a row in it."""
    section = recipe.grpo
    if not (section.enabled or recipe.eval.enabled):
        return 0.0, 0.0, 0.0, 0.0
    engine = make_engine(
        "auto" if ENGINES.get(section.engine).own_device else section.engine, policy.model, policy.tokenizer
    )
    params = replace(sampling_params(section, recipe.seed), stop_strings=())
    rows = section.rows if section.enabled else recipe.eval.batch_size
    rows = max(FEW + 1, min(rows, _together(policy, device)))

    def took(prompt: list[int], rows: int, tokens: int) -> float:
        exact = replace(params, max_new_tokens=tokens, min_new_tokens=tokens)
        return _seconds(lambda: engine.generate([prompt], rows, exact), device)

    took(prompt[:SHORT], FEW, 1)  # what is made once
    few = took(prompt[:SHORT], FEW, 2)
    more = 4 if few > SHORT_S else min(32, section.max_completion_tokens)
    step_of_few = max(0.0, took(prompt[:SHORT], FEW, 2 + more) - few) / more
    call = max(0.0, few - 2 * step_of_few)
    start = took(prompt, rows, 2)
    steps = took(prompt, rows, 2 + more) - start
    # Not above what differs between two calls:
    while steps < start / 2 and 2 * more < section.max_completion_tokens:
        more *= 2
        steps = took(prompt, rows, 2 + more) - start
    step_of_all = max(step_of_few, steps / more)
    row = (step_of_all - step_of_few) / (rows - FEW)
    beyond = len(prompt) - SHORT
    of_prompt = max(0.0, start - call - 2 * step_of_all) / beyond if beyond > 0 else row
    return call, of_prompt, max(0.0, step_of_few - FEW * row), row


def _update(
    recipe: Recipe, policy: Policy, prompt: list[int], device: torch.device, backward: bool
) -> tuple[float, float]:
    """Return the seconds of a product forward and backward, and of a step of the optimizer."""
    model, log_probs = policy.model, LogProbs(temperature=recipe.grpo.temperature or 1.0, verify=False)
    completion = (prompt * COMPLETION)[: min(COMPLETION, recipe.grpo.max_completion_tokens)]

    def once(rows: int, prompt: list[int] = prompt) -> None:
        ones = torch.ones(rows, len(completion), dtype=torch.bool, device=device)
        batch = Batch([prompt], [completion] * rows, [0] * rows, torch.ones(rows, device=device), ones)
        autocast = partial(autocast_of, model, device)
        values, _ = log_probs(model, batch, compute_entropy=True, autocast=autocast)
        if backward:
            values.sum().backward()

    most, rows, norm = max(1, recipe.grpo.batch_size), 1, 0.0
    with eval_mode(model), torch.set_grad_enabled(backward):
        once(1, prompt[:SHORT])  # what is made once
        seconds = _seconds(partial(once, rows), device)
        while seconds < LONG_S / 2 and rows < most:
            rows = min(most, 2 * rows)
            seconds = _seconds(partial(once, rows), device)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if gradients:
            norm = _seconds(lambda: torch.nn.utils.get_total_norm(gradients), device)
        model.zero_grad(set_to_none=True)
    token, head = products(model)
    done = (len(prompt) + rows * len(completion)) * token + rows * len(completion) * head
    return seconds / done * (1 if backward else 3), SWEEPS * norm


# ---- how many steps, and what each takes


def batch_arithmetic(recipe: Recipe, train: int, demonstrations: int) -> dict[str, Any]:
    """Count the completions, problems and steps that the settings amount to (one process)."""
    sft, grpo = recipe.sft, recipe.grpo
    numbers: dict[str, Any] = {}
    if sft.enabled and demonstrations:
        per_step = sft.batch_size * sft.gradient_accumulation_steps
        steps = sft_steps(sft, demonstrations)
        once = sft_steps(sft.model_copy(update={"max_steps": None, "epochs": 1}), demonstrations)
        numbers["sft"] = {
            "demonstrations": demonstrations,
            "demonstrations_per_step": per_step,
            "steps": steps,
            "passes": round(steps / once, 3),
        }
    if grpo.enabled and train:
        per_step = grpo.batch_size * grpo.gradient_accumulation_steps
        problems = per_step / grpo.group_size / grpo.num_iterations
        steps = grpo_steps(grpo, train)
        numbers["grpo"] = {
            "problems": train,
            "completions_per_step": per_step,
            "problems_per_step": problems,
            "completions_per_problem": grpo.group_size,
            "steps": steps,
            "rollouts": int(steps * per_step / grpo.num_iterations),
            "passes": round(steps * problems / train, 3),
        }
    return numbers


def seconds_of(
    recipe: Recipe, sizes: Sizes, speed: Speed, batch: Mapping[str, Any], more_s: float = 0.0
) -> dict[str, Any]:
    """Return the time of each stage and of the evaluations of a recipe.

    Args:
        recipe: The resolved recipe.
        sizes: What it works on.
        speed: What the machine does.
        batch: ``batch_arithmetic`` of the stages that are to be done.
        more_s: Seconds that extensions add to a step of GRPO.
    """
    times: dict[str, Any] = {}
    if "sft" in batch:
        rows = batch["sft"]["demonstrations_per_step"]
        tokens = sizes.prompt + sizes.demonstration
        times["sft"] = _stage(
            batch["sft"]["steps"], {"update_s": speed.update(rows * tokens, rows * sizes.demonstration)}
        )
    if "grpo" in batch:
        section, rows = recipe.grpo, batch["grpo"]["completions_per_step"]
        lengths = list(islice(cycle(sizes.completions), section.rows))
        completions, prompts = rows * mean(lengths), rows / section.group_size * sizes.prompt
        # A forward pass is a third of forward and backward: of the policy that sampled, of the reference.
        passes = 1 + (section.num_iterations > 1) / 3 + (getattr(section, "beta", 0) > 0) / 3
        sampling = speed.sampling(section.rows / section.group_size * sizes.prompt, lengths)
        parts = {
            "sampling_s": sampling * rows / section.rows / section.num_iterations,
            "update_s": speed.update(prompts + completions, completions, passes),
        }
        parts |= {"more_s": more_s} if more_s else {}
        times["grpo"] = _stage(batch["grpo"]["steps"], parts) | {"completion_tokens": mean(lengths)}
    if recipe.eval.enabled:
        times["evaluations"] = _evaluations(recipe, sizes, speed, batch)
    return times


def _stage(steps: int, parts: dict[str, float]) -> dict[str, Any]:
    return {
        "seconds_per_step": sum(parts.values()),
        **parts,
        "steps": steps,
        "seconds": steps * sum(parts.values()),
    }


def _evaluations(recipe: Recipe, sizes: Sizes, speed: Speed, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Count the evaluations, and estimate the time of all: before training, after each stage, and between steps."""
    section, each = recipe.eval, 1 + recipe.eval.samples
    after = len(batch) + sum(
        (batch[stage]["steps"] - 1) // every
        for stage in batch
        if (every := getattr(recipe, stage).eval_every)
    )
    limit = section.max_completion_tokens or recipe.grpo.max_completion_tokens
    at_once = min(section.batch_size, sizes.held_out)

    def seconds(lengths: Sequence[int]) -> float:
        rows = [min(limit, length) for length in islice(cycle(lengths), at_once * each)]
        return speed.sampling(at_once * sizes.held_out_prompt, rows) * sizes.held_out / at_once

    return {
        "evaluations": section.baseline + after,
        "problems": sizes.held_out,
        "completions": each,
        "seconds": section.baseline * seconds(sizes.start) + after * seconds(sizes.completions),
    }


def total(times: Mapping[str, Any]) -> float:
    """Return the seconds of all parts."""
    return float(sum(part["seconds"] for part in times.values()))


def might_last(recipe: Recipe, model: Any, sizes: Sizes, batch: Mapping[str, Any], seconds: float) -> bool:
    """Return whether a recipe could last so long on a slow machine: only then is the machine worth measuring before a run."""
    token, head = products(model)
    slow = Speed(0.0, token / AT_LEAST, 0.0, (token + head) / AT_LEAST, 3 / AT_LEAST, 0.0, token, head, 1)
    return total(seconds_of(recipe, sizes, slow, batch)) > seconds


def within(recipe: Recipe, times: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the keys with which a recipe takes about so long: fewer problems are evaluated, in a quarter of it, and fewer steps trained."""
    change: dict[str, Any] = {}
    evaluating = times.get("evaluations", {"seconds": 0.0})["seconds"]
    if evaluating > seconds / 4:
        problems = times["evaluations"]["problems"]
        change["data.eval.limit"] = max(1, int(problems * seconds / 4 / evaluating))
        evaluating = seconds / 4
    stages = {stage: times[stage] for stage in STAGES if stage in times}
    share = (seconds - evaluating) / max(1e-9, sum(part["seconds"] for part in stages.values()))
    if share < 1:
        change |= {f"{stage}.max_steps": max(1, int(part["steps"] * share)) for stage, part in stages.items()}
    return change


def long_facts(recipe: Recipe, times: Mapping[str, Any], *, laptop: bool) -> dict[str, Any]:
    """Return the facts of the rule ``takes_too_long``; ``laptop``: a smaller model would do on this machine."""
    seconds = total(times)
    names = {"sft": "SFT", "grpo": "GRPO", "evaluations": "evaluations"}
    parts = ", ".join(f"{names[name]} {duration(part['seconds'])}" for name, part in times.items())
    half = Settings(recipe.model_dump()).changed(within(recipe, times, seconds / 2))[0]
    return {
        "lasts_s": seconds,
        "lasts": f"{duration(seconds)} ({parts})",
        "half_of_it": " ".join(half),
        "evening": within(recipe, times, EVENING_S),
        "laptop": laptop,
    }


def sft_steps(section: SFTSection, demonstrations: int) -> int:
    """Return the optimiser steps of SFT (one process); the last, smaller batch of an epoch counts."""
    if section.max_steps:
        return section.max_steps
    per_epoch = math.ceil(
        math.ceil(demonstrations / section.batch_size) / section.gradient_accumulation_steps
    )
    return max(1, math.ceil(section.epochs * per_epoch))


def grpo_steps(section: GRPOSection, problems: int) -> int:
    """Return the optimiser steps of GRPO (one process); problems that fill no rollout batch are left out of an epoch."""
    if section.max_steps:
        return section.max_steps
    batches = problems // max(1, section.rows // section.group_size)
    per_step = section.batch_size * section.gradient_accumulation_steps
    per_epoch = batches * section.num_iterations * section.rows / per_step
    return max(1, math.ceil(section.epochs * per_epoch))
