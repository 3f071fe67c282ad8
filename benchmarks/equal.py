"""A GRPO step against stock TRL's on equal work: the same rendered prompts in the same order, completions of exactly the same length.

    python benchmarks/equal.py                                     # SmolLM2-135M where it is installed, one row of the table
    python benchmarks/equal.py --grid                              # the whole table: hours
    python benchmarks/equal.py --model small --prompt-tokens 60 --tokens 48 --rows 16 --group 8 --dtype float32 bfloat16

Nothing hangs on the draw: end tokens are switched off on both sides, so each completion has ``--tokens`` tokens. Both train for real
(sampling, rewards, logging, AdamW) from the same weights, each in a process of its own, in turns; TRL without gradient checkpointing,
which is its faster setting. algorist also grades every completion. ``--half`` leaves half of the groups without a signal.
Beside each figure stands what this processor allows at most: the products at the rate of its best library, and for sampling the weights
read once a token at its measured bandwidth, one after the other without overlap.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch
from datasets import Dataset
from models import LONGEST, load_model, make_model, make_tokenizer
from transformers.trainer_callback import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from algorist.config.schema import GRPOSection
from algorist.config.section import ModelSection
from algorist.models.load import make_policy
from algorist.models.precision import set_compute
from algorist.prompts import get_format
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.training.grpo_setup import make_grpo_trainer
from algorist.types import Problem

SEED = 42
GRID: dict[str, list[Any]] = {
    "prompt_tokens": [60, 250, 1000],
    "tokens": [48, 256],
    "rows": [16, 64],
    "group": [8, 16],
    "dtype": ["float32", "bfloat16"],
    "half": [False, True],
}
Case = dict[str, Any]


def load(name: str) -> tuple[Any, Any]:
    """Return model and tokenizer: a size of ``models.py``, or a folder, hub name or ``smollm2``."""
    if name in LONGEST:
        tokenizer = make_tokenizer()
        return make_model(name, tokenizer), tokenizer
    if name == "smollm2":
        policy = make_policy(ModelSection(name=name, dtype="float32"), device=torch.device("cpu"), seed=0)
        policy.tokenizer.chat_template = None
        return policy.model, policy.tokenizer
    return load_model(name)


def prompts_of(case: Case, tokenizer: Any, count: int) -> list[str]:
    """Return texts of exactly ``prompt_tokens`` tokens that differ in their numbers."""
    texts = []
    for number in range(count):
        sentence = f"A farmer has {20 + number} boxes with {3 + number} apples in each and sells some of them every day. "
        ids = tokenizer(sentence * (1 + case["prompt_tokens"] // 8))["input_ids"]
        texts.append(tokenizer.decode(ids[: case["prompt_tokens"]]))
    return texts


def reward_of(case: Case) -> Callable[..., list[float]]:
    """Return a reward that differs within groups; with ``half`` it is the same for every second group."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        values = [float(sum(ids) % 7) for ids in completion_ids]
        dead = [case["half"] and (row // case["group"]) % 2 for row in range(len(values))]
        return [0.0 if none else value for none, value in zip(dead, values, strict=True)]

    return reward


class StepByStep(TrainerCallback):
    """A trainer in a thread that does one optimizer step for each call: what ``train()`` sets up is not counted."""

    def __init__(self, trainer: Any, case: Case) -> None:
        self.trainer, self.case = trainer, case
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.parts: dict[str, float] = {}
        self.sampling = 0.0
        self.error: BaseException | None = None
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)
        threading.Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        torch.set_num_threads(self.case["threads"])
        try:
            self.trainer.train()
        except BaseException as error:
            self.error = error
            self.done.release()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.go.acquire()
        self.sampling, self.began = 0.0, time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.parts = {"step": time.perf_counter() - self.began, "sampling": self.sampling}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        lengths = {logs["completions/min_length"], logs["completions/max_length"]}
        if lengths != {self.case["tokens"]}:
            self.error = AssertionError(f"completions of {lengths} tokens, not {self.case['tokens']}")
        if "time/rollout_s" in logs:
            self.parts |= {
                "sampling": logs["time/rollout_s"],
                "update": logs["time/update_s"],
                "grading": logs["time/reward_s"],
            }
        self.done.release()

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method with its seconds added to those of sampling."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.sampling += time.perf_counter() - began

        return call

    def __call__(self) -> float:
        self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise self.error
        return float(self.case["rows"] * self.case["tokens"])


def build_trl(case: Case) -> Callable[[], float]:
    """Return stock TRL; every call is one step."""
    model, tokenizer = load(case["model"])
    torch.set_num_threads(case["threads"])
    problems = case["rows"] // case["group"]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=case["group"],
        gradient_accumulation_steps=problems,
        num_generations=case["group"],
        max_completion_length=case["tokens"],
        generation_kwargs={"min_new_tokens": case["tokens"]},
        max_steps=10**6,
        learning_rate=1e-6,
        logging_steps=1,
        bf16=case["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=SEED,
    )
    rows = [{"prompt": text} for text in prompts_of(case, tokenizer, problems)]
    trainer = GRPOTrainer(
        model, [reward_of(case)], config, Dataset.from_list(rows), processing_class=tokenizer
    )
    steps = StepByStep(trainer, case)
    trainer.model.generate = steps.timed(trainer.model.generate)
    return steps


def build_algorist(case: Case) -> Callable[[], float]:
    """Return algorist's trainer; every call is one step."""
    model, tokenizer = load(case["model"])
    torch.set_num_threads(case["threads"])
    if case["dtype"] == "bfloat16":
        set_compute(model, torch.bfloat16)
    texts = prompts_of(case, tokenizer, case["rows"] // case["group"])
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token, tokenizer.eos_token = tokenizer.eos_token, None
    model.generation_config.eos_token_id = None
    form, folder = get_format("question_only"), Path(tempfile.mkdtemp())
    section = GRPOSection(
        batch_size=case["group"],
        gradient_accumulation_steps=len(texts),
        group_size=case["group"],
        max_completion_tokens=case["tokens"],
        max_steps=10**6,
        learning_rate=1e-6,
        lr_scheduler="linear",
        save_steps=10**9,
    )
    trainer = make_grpo_trainer(
        model=model,
        tokenizer=tokenizer,
        problems=[Problem(f"p{number}", text, "12") for number, text in enumerate(texts)],
        prompt_format=form,
        section=section,
        rewards=build_rewards([reward_of(case)], form),
        engine=make_engine("native", model, tokenizer),
        output_dir=folder,
        seed=SEED,
        device=torch.device("cpu"),
    )
    trainer.args.save_strategy = "no"
    return StepByStep(trainer, case)


def limits(case: Case, weights: int) -> dict[str, float]:
    """Return the most tokens per second that this processor allows, by products and bandwidth measured here.

    A product of two weights' matrices counts 2 operations for each weight and token; the backward pass twice as many again.
    """
    dtype = getattr(torch, case["dtype"])
    a, b = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    big = torch.randn(64_000_000)
    rate = max(_rate(lambda: a @ b) for _ in range(3)) * 2 * 1024**3
    bandwidth = max(_rate(lambda: big.sum()) for _ in range(3)) * big.numel() * 4
    rows, tokens = case["rows"], case["tokens"]
    read = tokens * weights * dtype.itemsize / bandwidth
    products = rows * tokens * 2 * weights / rate
    learned = (rows * tokens + rows // case["group"] * case["prompt_tokens"]) * 6 * weights / rate
    done = float(rows * tokens)
    return {
        "products_per_s": rate,
        "bytes_per_s": bandwidth,
        "sampling_tokens_per_s": done / (read + products),
        "update_tokens_per_s": done / learned,
    }


def _rate(action: Callable[[], Any], seconds: float = 0.3) -> float:
    action()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        action()
        count += 1
    return count / (time.perf_counter() - began)


def time_case(case: Case, repeats: int) -> dict[str, Any]:
    """Time both sides in turns, each in its own process."""
    sides = {
        name: measure.InOwnProcess(build, case)
        for name, build in (("trl", build_trl), ("algorist", build_algorist))
    }
    try:
        result = measure.compare(dict(sides), repeats=repeats)
    finally:
        for side in sides.values():
            side.close()
    torch.set_num_threads(case["threads"])
    model, _ = load(case["model"])
    weights = sum(p.numel() for p in model.parameters())
    return {
        **case,
        "speed_up": measure.ratio_with_interval(result["trl"]["seconds"], result["algorist"]["seconds"]),
        "speed_up_cpu": measure.ratio_with_interval(
            result["trl"]["cpu_seconds"], result["algorist"]["cpu_seconds"]
        ),
        "limits": limits(case, weights),
        "parts": {name: side.parts[-repeats:] for name, side in sides.items()},
        "variants": result,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, a size of models.py, a folder or a hub name"
    )
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[60])
    parser.add_argument("--tokens", type=int, nargs="+", default=[48])
    parser.add_argument("--rows", type=int, nargs="+", default=[16])
    parser.add_argument("--group", type=int, nargs="+", default=[8])
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument("--half", action="store_true", help="half of the groups carry no signal")
    parser.add_argument("--grid", action="store_true", help="every combination of the table")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/baselines/equal.json")
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in GRID if name != "half"} | {"half": [options.half]}
    grid = GRID if options.grid else chosen
    results = []
    for values in itertools.product(*grid.values()):
        case = {"model": options.model, "threads": options.threads, **dict(zip(grid, values, strict=True))}
        if case["rows"] < case["group"]:
            continue
        result = time_case(case, options.repeats)
        results.append(result)
        shown = {name: case[name] for name in grid}
        print(
            f"{shown}: {result['speed_up']} by seconds, {result['speed_up_cpu']} by processor seconds",
            flush=True,
        )
        print(json.dumps({"limits": result["limits"], "parts": result["parts"]}), flush=True)
    if options.save:
        print(measure.save_json("equal", {"results": results}))


if __name__ == "__main__":
    main()
