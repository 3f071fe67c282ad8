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
from models import LONGEST, make_batch, make_model, make_tokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from algorist.training.batches import regroup, trim
from algorist.training.grpo import AlgoristGRPOTrainer

PROMPTS = {"tiny": 8, "small": 2, "wide": 1}
GROUP_SIZE = 16


def make_trainer(cls: type[Any], size: str, folder: str, steps: int) -> Any:
    """Return a trainer around a fresh model of ``size``; the model's weights are the same each time."""
    from datasets import Dataset

    tokenizer = make_tokenizer()
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
    trainer = cls(
        model=make_model(size, tokenizer),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "1+1"}] * 64),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = steps
    trainer.model.train()
    return trainer


def updater(cls: type[Any], size: str, folder: str, seed: int = 0) -> Callable[[], float]:
    """Return a function that runs one update and returns its completion tokens."""
    steps = PROMPTS[size]
    trainer = make_trainer(cls, size, folder, steps)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-7, fused=True)  # the Trainer's default
    whole = make_batch(size, PROMPTS[size], GROUP_SIZE, seed)

    def run() -> float:
        torch.manual_seed(seed)
        batches = split_tensor_dict(shuffle_sequence_dict(whole), steps)
        if cls is AlgoristGRPOTrainer:
            batches = [trim(batch) for batch in regroup(batches, steps)]
        optimizer.zero_grad()
        for batch in batches:
            trainer._compute_loss(trainer.model, batch).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        trainer._metrics["train"].clear()
        return float(whole["completion_mask"].sum())

    return run


VARIANTS: dict[str, type[Any]] = {"trl": GRPOTrainer, "algorist": AlgoristGRPOTrainer}


def time_updates(size: str, repeats: int, threads: int) -> dict[str, Any]:
    """Time both variants in turns."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: updater(cls, size, folder) for name, cls in VARIANTS.items()}
        result = measure.compare(runs, repeats=repeats)
    ours, theirs = result["algorist"], result["trl"]
    return {
        "size": size,
        "threads": threads,
        "rows": PROMPTS[size] * GROUP_SIZE,
        "speed_up": measure.ratio_with_interval(ours["rates"], theirs["rates"]),
        "speed_up_cpu": measure.ratio_with_interval(theirs["cpu_seconds"], ours["cpu_seconds"]),
        "variants": result,
    }


def profile_of(size: str, threads: int) -> str:
    """Return torch's profile table of one update of algorist."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        run = updater(AlgoristGRPOTrainer, size, folder)
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
    ours, theirs = found["algorist"], found["trl"]
    return {
        "size": size,
        "peak_ratio": ours["peak_mib"] / theirs["peak_mib"],
        "above_model_ratio": (ours["peak_mib"] - ours["before_mib"])
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
