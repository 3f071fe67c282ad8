"""Memory on a CPU, planned and measured: models × all weights, LoRA × float32, bfloat16 × prompts of 100 and 1,000 tokens.

Each case is a process of its own: it loads the model, plans a GRPO step of eight completions, takes two real steps, writes a checkpoint, and
says the peak of each phase. ``python benchmarks/memory_table.py MODEL… [--save]``; MODEL is anything that ``model.name`` takes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import BASELINES, save_json

GROUPS, GROUP_SIZE, COMPLETION = 2, 4, 32
TEXT = "Tom has 17 coins. He loses 2 of them on Monday and gives 3 to Lea, who had 8 before. How many coins has each of them now? "
PHASES = ("sampling", "update", "optimizer", "checkpoint")


def case(name: str, way: str, dtype: str, prompt_tokens: int) -> dict[str, Any]:
    """Plan and take two steps; return bytes by phase."""
    import torch
    from transformers import TrainerCallback

    from algorist import system
    from algorist.config.schema import GRPOSection
    from algorist.config.section import LoraSection, ModelSection
    from algorist.models.load import make_policy
    from algorist.models.memory import memory_now
    from algorist.preflight.memory import Shape, plan_step
    from algorist.prompts import get_format
    from algorist.prompts.chat import encode_prompt
    from algorist.rewards import build_rewards
    from algorist.rollouts import make_engine
    from algorist.training.grpo_setup import make_grpo_trainer
    from algorist.types import Problem

    began = memory_now()
    device = torch.device("cpu")
    section = ModelSection(name=name, compute_dtype=dtype, lora=LoraSection() if way == "LoRA" else None)  # type: ignore[arg-type]
    system.reset_peak()
    policy = make_policy(section, device=device, seed=0)
    gc.collect()
    weights = sum(p.nbytes for p in policy.model.parameters())
    row: dict[str, Any] = {"weights": weights, "began": began, "loading": system.own_memory(peak=True)}
    form = get_format("question_only")
    words = prompt_tokens
    while True:
        question = " ".join((TEXT * words).split()[:words])
        length = len(encode_prompt(form, policy.tokenizer, question))
        if length <= prompt_tokens or words < 2:
            break
        words -= max(1, (length - prompt_tokens) // 2)
    grpo = GRPOSection(
        max_steps=2, batch_size=GROUPS * GROUP_SIZE, group_size=GROUP_SIZE, max_completion_tokens=COMPLETION, save_steps=2, logging_steps=1
    )  # fmt: skip

    class Watch(TrainerCallback):
        def note(self, phase: str) -> None:
            row[phase] = max(row.get(phase, 0), system.own_memory(peak=True))
            system.reset_peak()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.note("update")

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.note("optimizer")

        def on_save(self, *_: Any, **__: Any) -> None:
            self.note("checkpoint")

    watch = Watch()

    def varied(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 7) + index % 2 for index, ids in enumerate(completion_ids)]

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_grpo_trainer(
            model=policy.model,
            tokenizer=policy.tokenizer,
            problems=[Problem(str(n), f"{n} {question}", "1") for n in range(16)],
            prompt_format=form,
            section=grpo,
            rewards=build_rewards([varied], form),
            engine=make_engine("auto", policy.model, policy.tokenizer, section=grpo, together=True),
            output_dir=Path(folder),
            seed=0,
            device=device,
            callbacks=[watch],
        )
        row["before"] = memory_now()
        shape = Shape(GROUPS * GROUP_SIZE, GROUPS, length + 2, COMPLETION)
        row["plan"] = plan_step(trainer.model, shape, grpo).as_dict()
        sample = trainer.sample

        def sampled(problems: Any) -> Any:
            system.reset_peak()
            groups = sample(problems)
            watch.note("sampling")
            return groups

        trainer.sample = sampled  # type: ignore[method-assign]
        trainer.train()
        row["part_tokens"] = trainer.passes.part_tokens
    row["peak"] = max(row[phase] for phase in PHASES)
    return row


def main() -> None:
    """Print and save the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--ways", nargs="+", default=["LoRA", "all"], choices=["LoRA", "all"])
    parser.add_argument("--types", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[100, 1000])
    parser.add_argument("--one", action="store_true", help="one case, in this process, as JSON")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    cases = list(itertools.product(options.models, options.ways, options.types, options.prompts))
    if options.one:
        print(json.dumps(case(*cases[0])))
        return
    rows = []
    for name, way, dtype, tokens in cases:
        words = [name, "--ways", way, "--types", dtype, "--prompts", str(tokens), "--one"]
        done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
        label = f"{Path(name).stem:>14} {way:4} {dtype:8} {tokens:4}"
        if done.returncode:
            print(f"{label}: {done.stderr.strip().splitlines()[-1][:300]}", flush=True)
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append({"model": Path(name).stem, "way": way, "type": dtype, "prompt": tokens, **row})
        phases = ", ".join(f"{phase} {row[phase] / 1e9:.2f}" for phase in PHASES)
        print(
            f"{label}: planned {row['plan']['peak'] / 1e9:.2f}, peak {row['peak'] / 1e9:.2f} GB "
            f"({row['plan']['peak'] / row['peak']:.2f}); {phases}; weights {row['weights'] / 1e9:.2f}, loading {row['loading'] / 1e9:.2f}, "
            f"before {row['before'] / 1e9:.2f}",
            flush=True,
        )
    if options.save:
        save_json("memory-table", {"cases": rows}, BASELINES)


if __name__ == "__main__":
    main()
