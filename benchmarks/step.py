"""A whole GRPO step in completion tokens per second: algorist's trainer against stock TRL's, both with float32 weights.

    python benchmarks/step.py --size tiny       # 8 prompts × 16 completions a step
    python benchmarks/step.py --size small      # 2 prompts × 16 completions a step
    python benchmarks/step.py --model FOLDER --rows 16 --tokens 48    # a real model: prompts of about 60 tokens
    python benchmarks/step.py --size 1.5B --device cuda --bf16        # 4 prompts × 16 completions of up to 512 tokens

Both train for real (sampling, rewards, logging, AdamW) from the same weights; TRL in its faster setting: no gradient
checkpointing. One token of 70 ends a completion, so lengths are near geometric; the figure is tokens per second
because the sampled lengths differ between the two: a figure that hangs on the draw, so no page shows it. ``equal.py`` compares equal
work on a CPU; this file is for the GPU battery (``gpu.py``) and for one commit against another (``old_new.py``). algorist also grades every completion and writes it to the store.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import measure
import torch
from datasets import Dataset
from models import LONGEST, load_model, make_model, make_tokenizer, word_problems
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from algorist.config.schema import GRPOSection
from algorist.models.precision import set_compute
from algorist.prompts import get_format
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.store.write import RolloutWriter, rows_of
from algorist.training.grpo_setup import make_grpo_trainer
from algorist.types import Group, Problem

GROUP_SIZE = 16
MEAN_LENGTH = 70


@dataclass(frozen=True)
class Work:
    """One step: a size of ``models.py`` or a folder with a model, prompts a step, most tokens of a completion, and where it runs."""

    name: str
    prompts: int
    longest: int
    device: str = "cpu"
    bf16: bool = False
    """Products in bfloat16 over float32 weights (``bf16=True`` of TRL) on both sides."""

    @property
    def of_a_size(self) -> bool:
        return self.name in LONGEST

    def load(self) -> tuple[Any, Any]:
        """Return model and tokenizer."""
        if self.of_a_size:
            tokenizer = make_tokenizer()
            return calibrated_model(self.name, tokenizer), tokenizer
        return load_model(self.name)

    def rows(self) -> list[dict[str, str]]:
        """Return four steps' prompts."""
        count = self.prompts * 4
        if self.of_a_size:
            return prompts(count)
        return [{"prompt": text, "problem_id": f"p{i}"} for i, text in enumerate(word_problems(count))]


PROMPTS = {"tiny": 8, "small": 2, "0.5B": 4, "1.5B": 4}
WORK = {size: Work(size, count, LONGEST[size]) for size, count in PROMPTS.items()}


def prompts(count: int) -> list[dict[str, str]]:
    """Return prompts of 64–128 tokens (one token per character)."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(count):
        width = int(torch.randint(64, 129, (1,), generator=generator))
        digits = torch.randint(0, 16, (width,), generator=generator).tolist()
        rows.append({"prompt": "".join("0123456789+-*/=("[d] for d in digits), "problem_id": f"p{index}"})
    return rows


def calibrated_model(size: str, tokenizer: Any) -> Any:
    """Return a model that stops after about MEAN_LENGTH tokens: one token of MEAN_LENGTH ends a completion."""
    model = make_model(size, tokenizer)
    vocab = model.config.vocab_size
    stops = torch.linspace(100, vocab - 1, max(1, round(vocab / MEAN_LENGTH) - 1)).long().tolist()
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *stops]
    return model


class Stepper:
    """Trains one optimizer step per call and returns the completion tokens it has sampled and learned from."""

    def __init__(self, name: str, size: str | Work, folder: str, rounds: int) -> None:
        work = WORK[size] if isinstance(size, str) else size
        model, tokenizer = work.load()
        model.to(work.device)
        if work.bf16:
            set_compute(model, torch.bfloat16)
        self.tokens = 0

        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            self.tokens += sum(len(ids) for ids in completion_ids)
            return [float(sum(ids) % 7) for ids in completion_ids]

        make = self._stock if name.startswith("trl") else self._ours
        self.trainer = make(model, tokenizer, work.rows(), reward, work, folder, name)
        self.trainer.remove_callback(PrinterCallback)
        self.parts: list[dict[str, float]] = []

    def _stock(
        self, model: Any, tokenizer: Any, rows: list[Any], reward: Any, work: Work, folder: str, name: str
    ) -> Any:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=GROUP_SIZE,
            gradient_accumulation_steps=work.prompts,
            num_generations=GROUP_SIZE,
            max_completion_length=work.longest,
            max_steps=1,
            learning_rate=1e-6,
            logging_steps=1,
            bf16=work.bf16,
            gradient_checkpointing=False,
            use_cpu=work.device == "cpu",
            use_vllm=name == "trl+vllm",
            vllm_mode="colocate",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        return GRPOTrainer(
            model=model,
            reward_funcs=[reward],
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )

    def _ours(
        self, model: Any, tokenizer: Any, rows: list[Any], reward: Any, work: Work, folder: str, name: str
    ) -> Any:
        form = get_format("question_only")
        self.store = RolloutWriter(Path(folder) / "rollouts")
        section = GRPOSection(
            batch_size=GROUP_SIZE,
            gradient_accumulation_steps=work.prompts,
            group_size=GROUP_SIZE,
            max_completion_tokens=work.longest,
            max_steps=1,
            learning_rate=1e-6,
            lr_scheduler="linear",
            save_steps=10**9,
        )
        trainer = make_grpo_trainer(
            model=model,
            tokenizer=tokenizer,
            problems=[Problem(row["problem_id"], row["prompt"], "12") for row in rows],
            prompt_format=form,
            section=section,
            rewards=build_rewards([reward], form),
            engine=make_engine(name, model, tokenizer),
            output_dir=Path(folder),
            seed=42,
            device=torch.device(work.device),
            on_rollouts=self._keep,
        )
        trainer.args.save_strategy = "no"  # a run ends in a checkpoint, and here every step is a run
        return trainer

    def _keep(self, step: int, groups: list[Group], advantages_PG: torch.Tensor) -> None:
        """Store every graded rollout, as a run does."""
        for index, (group, advantages) in enumerate(zip(groups, advantages_PG.tolist(), strict=True)):
            self.store.write(rows_of(group, index=index, advantages=advantages))
        self.store.flush()

    def __call__(self) -> float:
        before, started = self.tokens, time.perf_counter()
        if isinstance(self.trainer, GRPOTrainer):
            self.trainer._buffered_inputs, self.trainer._step = None, 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.trainer.train()
        entry = next(e for e in reversed(self.trainer.state.log_history) if "reward" in e)
        part = {key: entry[key] for key in ("time/rollout_s", "time/update_s") if key in entry}
        self.parts.append({**part, "step/seconds": time.perf_counter() - started})
        if torch.cuda.is_available():
            self.parts[-1]["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        return float(self.tokens - before)


def time_steps(work: Work, engine: str, repeats: int, threads: int) -> dict[str, Any]:
    """Time both trainers in turns; with the engine ``vllm`` TRL samples with vLLM too."""
    torch.set_num_threads(threads)
    stock = "trl+vllm" if engine == "vllm" else "trl"
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Stepper(name, work, folder, repeats + 1) for name in (stock, engine)}
        result = measure.compare(dict(runs), repeats=repeats)
    per_cpu_second = {
        name: [work / cpu for work, cpu in zip(row["work"], row["cpu_seconds"], strict=True)]
        for name, row in result.items()
    }
    return {
        "size": Path(work.name).name,
        "threads": threads,
        "engine": engine,
        "device": work.device,
        "bf16": work.bf16,
        "rows": work.prompts * GROUP_SIZE,
        "speed_up": measure.ratio_with_interval(result[engine]["rates"], result[stock]["rates"]),
        "speed_up_cpu": measure.ratio_with_interval(per_cpu_second[engine], per_cpu_second[stock]),
        "parts": {name: run.parts[1:] for name, run in runs.items()},
        "variants": result,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(WORK), default="tiny")
    parser.add_argument("--model", help="folder or hub name of a model, instead of --size")
    parser.add_argument("--rows", type=int, default=GROUP_SIZE, help="completions a step, with --model")
    parser.add_argument("--tokens", type=int, default=48, help="longest completion, with --model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--bf16", action="store_true", help="bfloat16 products over float32 weights, on both sides"
    )
    parser.add_argument("--engine", default="native")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write benchmarks/baselines/step-*.json")
    options = parser.parse_args()
    work = replace(WORK[options.size], device=options.device, bf16=options.bf16)
    if options.model:
        work = replace(
            work, name=options.model, prompts=max(1, options.rows // GROUP_SIZE), longest=options.tokens
        )
    payload = time_steps(work, options.engine, options.repeats, options.threads)
    shown = {key: value for key, value in payload.items() if key not in ("variants", "parts")}
    print(json.dumps(shown, indent=2))
    for name, row in payload["variants"].items():
        print(name, "tokens/s", json.dumps(row["rate"]))
        print(name, "parts", json.dumps(payload["parts"][name][-1]))
    if options.save:
        print(
            measure.save_json(
                f"step-{payload['size']}{'-bf16' if work.bf16 else ''}-{options.threads}t", payload
            )
        )


if __name__ == "__main__":
    main()
