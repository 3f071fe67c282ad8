"""One update (forward, loss, backward, clipping, AdamW) of algorist against stock TRL on the same batch.

    python benchmarks/update.py --size tiny        # 8 prompts × 16 completions
    python benchmarks/update.py --size small       # 2 prompts × 16 completions
    python benchmarks/update.py --size wide --memory   # peak memory, each variant in a process of its own
    python benchmarks/update.py --size tiny --profile  # where the time of one update of algorist goes

TRL in its faster setting: no gradient checkpointing, float32. Every row has an advantage, so no group is dropped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import measure
import torch
from datasets import Dataset
from models import LONGEST, make_batch, make_model, make_tokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from algorist.objectives import ADVANTAGES, LOSSES, Objective
from algorist.training.batch import Batch
from algorist.training.extension import Extensions
from algorist.training.log_probs import LogProbs
from algorist.training.metrics import Metrics
from algorist.training.objective import LossInputs, loss_of, rows_to_compute, step_weights

PROMPTS = {"tiny": 8, "small": 2, "wide": 1}
GROUP_SIZE = 16


def stock(size: str, folder: str, seed: int) -> tuple[Any, Callable[[], None]]:
    """Return stock TRL's model and a function that computes its loss and gradient."""
    tokenizer, steps = make_tokenizer(), PROMPTS[size]
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=GROUP_SIZE,
        gradient_accumulation_steps=steps,
        num_generations=GROUP_SIZE,
        max_completion_length=LONGEST[size],
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model=make_model(size, tokenizer),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "1+1"}] * 64),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = steps
    trainer.model.train()
    whole = make_batch(size, steps, GROUP_SIZE, seed)

    def gradient() -> None:
        torch.manual_seed(seed)
        for batch in split_tensor_dict(shuffle_sequence_dict(whole), steps):
            trainer._compute_loss(trainer.model, batch).backward()
        trainer._metrics["train"].clear()

    return trainer.model, gradient


def ours(size: str, folder: str, seed: int) -> tuple[Any, Callable[[], None]]:
    """Return algorist's model and a function that computes its loss and gradient, by the pieces of its step."""
    model, steps = make_model(size, make_tokenizer()), PROMPTS[size]
    model.train()
    batch = as_batch(make_batch(size, steps, GROUP_SIZE, seed))
    objective = Objective(LOSSES.get("dapo"), ADVANTAGES.get("group_normalized"), longest=LONGEST[size])
    log_probs = LogProbs()
    tokens = float(batch.mask.sum())

    def gradient() -> None:
        weights = step_weights(batch, objective, tokens=tokens, micro_batch=GROUP_SIZE)
        for part in batch.parts(rows_to_compute(batch, objective, Extensions()), most_rows=GROUP_SIZE):
            piece = batch.take(part)
            found, entropy = log_probs(model, piece, compute_entropy=True)
            inputs = LossInputs(found, entropy, piece, weights[part, : piece.width], Metrics())
            loss_of(inputs, objective, Extensions()).backward()

    return model, gradient


def as_batch(inputs: dict[str, torch.Tensor]) -> Batch:
    """Return TRL's padded rows as a batch of groups."""
    prompts = [
        ids[m.bool()].tolist() for ids, m in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
    ]
    completions = [
        ids[m.bool()].tolist()
        for ids, m in zip(inputs["completion_ids"], inputs["completion_mask"], strict=True)
    ]
    mask = inputs["completion_mask"][:, : max(map(len, completions))].bool()
    groups = [row // GROUP_SIZE for row in range(len(prompts))]
    return Batch(prompts[::GROUP_SIZE], completions, groups, inputs["advantages"], mask)


def updater(make: Any, size: str, folder: str, seed: int = 0) -> Callable[[], float]:
    """Return a function that runs one update and returns its completion tokens."""
    model, gradient = make(size, folder, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=True)  # the Trainer's default
    tokens = float(make_batch(size, PROMPTS[size], GROUP_SIZE, seed)["completion_mask"].sum())

    def run() -> float:
        optimizer.zero_grad()
        gradient()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return tokens

    return run


VARIANTS: dict[str, Any] = {"trl": stock, "algorist": ours}


def time_updates(size: str, repeats: int, threads: int) -> dict[str, Any]:
    """Time both variants in turns."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: updater(make, size, folder) for name, make in VARIANTS.items()}
        result = measure.compare(runs, repeats=repeats)
    mine, theirs = result["algorist"], result["trl"]
    return {
        "size": size,
        "threads": threads,
        "rows": PROMPTS[size] * GROUP_SIZE,
        "speed_up": measure.ratio_with_interval(mine["rates"], theirs["rates"]),
        "speed_up_cpu": measure.ratio_with_interval(theirs["cpu_seconds"], mine["cpu_seconds"]),
        "variants": result,
    }


def profile_of(size: str, threads: int) -> str:
    """Return torch's profile table of one update of algorist."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        run = updater(ours, size, folder)
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run()
    return profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=22)


def peak_of(name: str, size: str, threads: int) -> dict[str, float]:
    """Run one update twice in this process; return its peak memory in MiB, before and after."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        run = updater(VARIANTS[name], size, folder)
        before = measure.peak_memory_mib()
        started = time.perf_counter()
        run()
        run()
        return {
            "before_mib": before,
            "peak_mib": measure.peak_memory_mib(),
            "seconds": time.perf_counter() - started,
        }


def compare_memory(size: str, threads: int) -> dict[str, Any]:
    """Measure the peak of both variants, each in its own process."""
    found: dict[str, Any] = {}
    for name in VARIANTS:
        command = [sys.executable, __file__, "--size", size, "--threads", str(threads), "--peak-of", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[name] = json.loads(done.stdout.strip().splitlines()[-1])
    mine, theirs = found["algorist"], found["trl"]
    return {
        "size": size,
        "peak_ratio": mine["peak_mib"] / theirs["peak_mib"],
        "above_model_ratio": (mine["peak_mib"] - mine["before_mib"])
        / (theirs["peak_mib"] - theirs["before_mib"]),
        "variants": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(PROMPTS), default="tiny")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--profile", action="store_true", help="profile instead of time")
    parser.add_argument("--save", action="store_true", help="write benchmarks/baselines/update-*.json")
    parser.add_argument("--peak-of", choices=sorted(VARIANTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        print(json.dumps(peak_of(options.peak_of, options.size, options.threads)))
        return
    if options.profile:
        print(profile_of(options.size, options.threads))
        return
    if options.memory:
        payload = compare_memory(options.size, options.threads)
    else:
        payload = time_updates(options.size, options.repeats, options.threads)
    shown = {key: value for key, value in payload.items() if key != "variants"}
    print(json.dumps(shown, indent=2))
    for name, row in payload["variants"].items():
        print(name, json.dumps(row.get("second", row)))
    if options.save:
        kind = "memory" if options.memory else f"{options.threads}t"
        print(measure.save_json(f"update-{options.size}-{kind}", payload))


if __name__ == "__main__":
    main()
