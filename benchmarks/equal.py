"""A GRPO step against stock TRL's on equal work: the same rendered prompts in the same order, completions of exactly the same length.

    python benchmarks/equal.py                                     # SmolLM2-135M where it is installed, one row of the table
    python benchmarks/equal.py --grid --out DIR                    # the whole table: hours; the same command continues
    python benchmarks/equal.py --prompt-tokens 250 --group 16 --dtype bfloat16 --repeats 3 --out DIR
    python benchmarks/equal.py --save --out DIR                    # the cells of DIR become benchmarks/baselines/equal.json

Nothing hangs on the draw: end tokens are switched off on both sides, so each completion has ``--tokens`` tokens. Both train for real
(sampling, rewards, logging, AdamW) from the same weights, each in a process of its own, in turns; TRL without gradient checkpointing,
which is its faster setting. algorist also grades every completion. ``--half`` leaves half of the groups without a signal.
Parts of a step: sampling; grading, which is all between sampling and update; update, which is forward and backward; rest (clipping,
AdamW, logging). Peak memory is that of the process (of the GPU's tensors on a GPU).
Beside each figure stands what this processor allows at most: the products at the rate of its best library, each prompt once for its
group, and for sampling the weights read once a token at its measured bandwidth, one after the other without overlap.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
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
from algorist.models.products import onednn_works
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
USUAL: Case = {"model": "smollm2", "threads": 1, "device": "cpu", "engine": "native"}
USUAL |= {name: values[0] for name, values in GRID.items()}


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
        self.spent: dict[str, float] = {}
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
        self.spent, self.began = dict.fromkeys(("sampling", "rollout", "work"), 0.0), time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.parts = {"step": time.perf_counter() - self.began}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        lengths = {logs["completions/min_length"], logs["completions/max_length"]}
        if lengths != {self.case["tokens"]}:
            self.error = AssertionError(f"completions of {lengths} tokens, not {self.case['tokens']}")
        parts, spent = self.parts, self.spent
        if "time/rollout_s" in logs:
            names = {"sampling": "time/rollout_s", "grading": "time/reward_s", "update": "time/update_s"}
            parts |= {part: logs[name] for part, name in names.items()}
        else:
            parts["sampling"], parts["grading"] = spent["sampling"], spent["rollout"] - spent["sampling"]
            parts["update"] = spent["work"] - spent["rollout"]
        parts["rest"] = parts["step"] - parts["sampling"] - parts["grading"] - parts["update"]
        parts["peak_mib"] = measure.peak_memory_mib()
        if torch.cuda.is_available():
            parts["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        self.done.release()

    def time(self, part: str, owner: Any, name: str) -> None:
        """Add the seconds of a method's calls to a part."""
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent[part] += time.perf_counter() - began

        setattr(owner, name, call)

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
        use_cpu=case["device"] == "cpu",
        use_vllm=case["engine"] == "vllm",
        vllm_mode="colocate",
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
    if case["engine"] == "vllm":
        steps.time("sampling", trainer.vllm_generation, "generate")
    else:
        steps.time("sampling", trainer.model, "generate")
    steps.time("rollout", trainer, "_generate_and_score_completions")
    steps.time("work", trainer, "training_step")
    return steps


def build_algorist(case: Case) -> Callable[[], float]:
    """Return algorist's trainer; every call is one step."""
    model, tokenizer = load(case["model"])
    model.to(case["device"])
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
        engine=make_engine(case["engine"], model, tokenizer),
        output_dir=folder,
        seed=SEED,
        device=torch.device(case["device"]),
    )
    trainer.args.save_strategy = "no"
    return StepByStep(trainer, case)


def limits(case: Case) -> dict[str, float]:
    """Return the most tokens per second that this machine allows, by products and bandwidth measured here.

    A product with the weights counts 2 operations for each weight and token; the backward pass twice as many again. The head is
    computed where a token is predicted, a prompt once for its group, and a group without a signal is not learned from.
    """
    model, _ = load(case["model"])
    head = model.get_output_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    blocks = sum(p.numel() for p in model.parameters()) - head * (1 if tied else 2)
    del model
    dtype = getattr(torch, case["dtype"])
    on = {"device": case["device"]}
    side = (
        1024 if case["device"] == "cpu" else 8192
    )  # an H100 gives 152 TFLOP/s for products of 1,024, 767 for 8,192
    a, b = (torch.randn(side, side, **on).to(dtype) for _ in range(2))
    big = torch.randn(64_000_000, **on)
    ways: list[Callable[[], Any]] = [lambda: a @ b]
    if case["device"] == "cpu" and onednn_works(dtype):
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise.default(a, b, None, "none", [], ""))
    rate = max(_rate(way) for way in ways for _ in range(3)) * 2 * side**3
    bandwidth = max(_rate(big.sum) for _ in range(3)) * big.nbytes
    done, prompts = case["rows"] * case["tokens"], case["rows"] // case["group"] * case["prompt_tokens"]
    useful = 0.5 if case["half"] else 1.0
    products = 2 * (done * (blocks + head) + prompts * blocks)
    return {
        "products_per_s": rate,
        "bytes_per_s": bandwidth,
        "sampling_s": case["tokens"] * (blocks + head) * dtype.itemsize / bandwidth + products / rate,
        "update_s": useful * 3 * products / rate,
    }


def _rate(action: Callable[[], Any], seconds: float = 0.3) -> float:
    """Return calls per second of the processor's (or, on a GPU, of the clock's) time; the best of short series."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    action()
    best, began = 0.0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        start = clock()
        for _ in range(8):
            result = action()
        result.flatten()[0].item()
        best = max(best, 8 / (clock() - start))
    return best


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
    parts = {name: side.parts[-repeats:] for name, side in sides.items()}
    middle = {
        who: {part: statistics.median(row[part] for row in rows) for part in rows[0]}
        for who, rows in parts.items()
    }
    most = limits(case)
    return {
        **case,
        "speed_up": measure.ratio_with_interval(result["trl"]["seconds"], result["algorist"]["seconds"]),
        "speed_up_cpu": measure.ratio_with_interval(
            result["trl"]["cpu_seconds"], result["algorist"]["cpu_seconds"]
        ),
        "memory": middle["algorist"]["peak_mib"] / middle["trl"]["peak_mib"],
        "share_of_limit": {
            part: most[f"{part}_s"] / middle["algorist"][part] for part in ("sampling", "update")
        },
        "limits": most,
        "medians": middle,
        "parts": parts,
        "first": {name: side.parts[0] for name, side in sides.items()},
        "variants": result,
    }


def name_of(case: Case) -> str:
    """Return the name of a cell's file."""
    words = [
        Path(case["model"]).name,
        f"{case['prompt_tokens']}x{case['tokens']}x{case['rows']}",
        f"g{case['group']}",
    ]
    words += [case["dtype"], *(["half"] if case["half"] else [])]
    words += [str(case[key]) for key in ("threads", "device", "engine") if case[key] != USUAL[key]]
    return "-".join(words)


def cells(grid: dict[str, list[Any]], **rest: Any) -> list[Case]:
    """Return the combinations that can be: whole groups, and two of them where half carry no signal."""
    every = [
        {**USUAL, **rest, **dict(zip(grid, values, strict=True))}
        for values in itertools.product(*grid.values())
    ]
    return [case for case in every if case["rows"] >= case["group"] * (2 if case["half"] else 1)]


def line(found: Case) -> str:
    """Return what a cell says, in a line for each side."""
    ratio, cpu = found["speed_up"], found["speed_up_cpu"]
    lines = [
        f"{name_of(found)}: {ratio['ratio']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}] by seconds, "
        f"{cpu['ratio']:.2f}x [{cpu['low']:.2f}, {cpu['high']:.2f}] by processor seconds, n = {ratio['n']}, "
        f"{found['memory']:.2f} of the memory, "
        + ", ".join(f"{part} at {share:.2f} of the limit" for part, share in found["share_of_limit"].items())
    ]
    for who, parts in found["medians"].items():
        shown = ", ".join(f"{part} {value:.2f}" for part, value in parts.items() if part != "peak_mib")
        lines.append(
            f"  {who:9}{shown} s, {parts['peak_mib']:.0f} MiB, first step {found['first'][who]['step']:.2f} s"
        )
    return "\n".join(lines)


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
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, help="folder that keeps each cell; cells that are there are not measured again"
    )
    parser.add_argument(
        "--save", action="store_true", help="write the cells of --out to benchmarks/baselines/equal.json"
    )
    options = parser.parse_args()
    if options.save:
        if options.out is None:
            parser.error("--save takes the cells of --out FOLDER")
        found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(options.out.glob("*.json"))]
        print(measure.save_json("equal", {"results": found}))
        return
    chosen = {name: getattr(options, name) for name in GRID if name != "half"} | {"half": [options.half]}
    rest = {"model": options.model, "threads": options.threads, "device": options.device}
    for case in cells(GRID if options.grid else chosen, **rest):
        file = options.out and options.out / f"{name_of(case)}.json"
        if file and file.is_file():
            print(line(json.loads(file.read_text(encoding="utf-8"))), flush=True)
            continue
        try:
            result = time_case(case, options.repeats)
        except ChildProcessError as error:
            print(f"{name_of(case)}: left out: {error}", flush=True)
            continue
        print(line(result), flush=True)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_text(
                json.dumps({"environment": measure.environment(), **result}, indent=1), encoding="utf-8"
            )
            partial.replace(file)


if __name__ == "__main__":
    main()
