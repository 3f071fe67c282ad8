"""Sections of ``gpu.py`` on the update: its time and its memory beside preflight's plan, its types, a smaller card, sharded weights."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_bench import PROMPT, Bench, Skipped, need_trl
from measure import ROOT

from algorist.models.precision import set_compute
from algorist.store.run_log import kept_records

CARD = 24e9
"""Memory of the card that ``card`` imitates, in bytes."""


# ---- one gradient ----------------------------------------------------------------------------------------------------


def update(bench: Bench, lengths: tuple[int, ...] = (256, 1024)) -> dict[str, Any]:
    """Seconds and peak memory of one gradient of 16 completions, packed and padded: float32 masters, bare bfloat16, an adapter."""
    need_trl()
    cases = []
    for length in (8,) if bench.smoke else lengths:
        for kind in ("float32 masters", "bfloat16", "adapter"):
            for checkpointing in (False,) if bench.smoke else (False, True):
                case: dict[str, Any] = {"length": length, "kind": kind, "checkpointing": checkpointing}
                for way in ("packed", "plain"):
                    try:
                        case[way] = _update_case(bench, kind, length, checkpointing, way)
                    except torch.OutOfMemoryError:
                        case[way] = {"error": "out of memory"}
                    bench.free()
                cases.append(case)
                print("  ", json.dumps(case), flush=True)
                bench.free()
    return {"shape": bench.shape("1.5B"), "rows": 16, "prompt_tokens": PROMPT, "cases": cases}


def memory(bench: Bench) -> dict[str, Any]:
    """Peak memory of updates up to 16,384 tokens a completion beside preflight's plan: the share by which the plan is off."""
    found = update(bench, (1024, 4096, 16384))
    ran = [c["packed"] for c in found["cases"] if "peak_gb" in c["packed"]]
    return found | {"worst_plan": max(abs(c["planned_over_peak"] - 1) for c in ran) if ran else None}


def _policy(bench: Bench, shape: str, kind: str) -> Any:
    """A random model whose weights are trained in one of three ways."""
    masters = kind == "float32 masters"
    model: Any = bench.model(shape, torch.float32 if masters else torch.bfloat16)
    if masters:
        set_compute(model, torch.bfloat16)
    if kind == "adapter":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    return model.train()


def _update_case(bench: Bench, kind: str, length: int, checkpointing: bool, way: str) -> dict[str, Any]:
    from algorist.config.schema import GRPOSection
    from algorist.models.memory import memory_now, peak, reset_peak
    from algorist.preflight.memory import Shape, plan_step
    from algorist.training.batch import Batch
    from algorist.training.log_probs import LogProbs

    model = _policy(bench, "1.5B", kind)
    if checkpointing:
        newer = getattr(
            model, "activation_checkpointing_enable", None
        )  # transformers 5.23; 5.17 has the other
        (newer or model.gradient_checkpointing_enable)()
        model.enable_input_require_grads()
    vocab = model.config.vocab_size
    rows = bench.prompts(16, vocab, length) if not bench.smoke else [[5] * length] * 16
    mask = torch.ones(16, length, dtype=torch.bool, device=bench.device)
    batch = Batch(bench.prompts(1, vocab), rows, [0] * 16, torch.ones(16, device=bench.device), mask)
    log_probs = LogProbs(packed=way == "packed", verify=False)

    def autocast() -> Any:
        if kind == "bfloat16":
            return nullcontext()
        return torch.autocast(bench.device.type, torch.bfloat16, cache_enabled=False)

    def gradient() -> None:
        found, _ = log_probs(model, batch, autocast=autocast)
        found.sum().backward()
        model.zero_grad(set_to_none=False)  # gradients stay, as between the parts of a step

    shape = Shape(16, 1, len(batch.prompts[0]), length)
    sizes = {"batch_size": 16, "group_size": 16, "max_completion_tokens": length, "micro_batch_tokens": 10**9}
    section = GRPOSection(**sizes, gradient_checkpointing=checkpointing)
    plan = plan_step(model, shape, section, base_bytes=memory_now())
    bench.free()
    reset_peak()
    seconds = bench.seconds(gradient, 3, 1)
    planned, taken = plan.peak - plan.optimizer, peak()
    found = {"seconds": seconds, "peak_gb": taken / 1e9}
    if way == "packed":
        found |= {"planned_gb": planned / 1e9, "planned_over_peak": planned / taken}
    return found


def correctness(bench: Bench) -> dict[str, Any]:
    """One gradient on the device against float32 on the CPU, in each combination of types, and against itself."""
    need_trl()
    expected = _gradient("cpu", torch.float32, None)
    found: dict[str, Any] = {}
    for master, compute in ((torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None)):
        name = f"{master} {compute or 'alone'}".replace("torch.", "")
        apart = _gradient(str(bench.device), master, compute) - expected
        found[name] = float(apart.norm() / expected.norm())
    return {"relative_gradient_error": found}


def _gradient(
    device: str, master: torch.dtype, compute: torch.dtype | None, scaler: Any = None, model: Any = None
) -> torch.Tensor:
    """One gradient of a tiny model, of a loss that is scaled where there is a scaler."""
    from algorist.training.batch import Batch
    from algorist.training.log_probs import LogProbs

    rows = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    model = model if model is not None else Bench(True, "cpu").model("smoke", torch.float32)
    model = model.to(device, master).train()
    mask = torch.tensor([[t < len(r) for t in range(4)] for r in rows], device=device)
    batch = Batch([[3, 4, 5, 6, 7]], rows, [0, 0, 0], torch.ones(3, device=device), mask)
    context = nullcontext if compute is None else lambda: torch.autocast(torch.device(device).type, compute)
    loss = LogProbs(verify=False)(model, batch, autocast=context)[0].sum()
    (loss if scaler is None else scaler.scale(loss)).backward()
    return torch.cat([p.grad.float().cpu().flatten() for p in model.parameters() if p.grad is not None])


def float16(bench: Bench) -> dict[str, Any]:
    """Float16 products with a scaled loss: the gradient, a step that overflows and changes nothing, and on a GPU a whole run."""
    need_trl()
    device = bench.device.type
    expected, found = _gradient("cpu", torch.float32, None), {}
    for name, scale in (("fits", 2.0**8), ("overflows", 2.0**60)):
        model = Bench(True, "cpu").model("smoke", torch.float32).to(device)
        scaler = torch.amp.GradScaler(device, init_scale=scale)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        gradient = _gradient(device, torch.float32, torch.float16, scaler, model) / scale
        scaler.step(optimizer)
        scaler.update()
        moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
        found[name] = {
            "relative_gradient_error": float((gradient - expected).norm() / expected.norm()),
            "moved": float(moved.abs().max()),
            "scale": scaler.get_scale() / scale,
        }
    if bench.cuda:
        with tempfile.TemporaryDirectory() as folder:
            where = [f"output_dir={folder}", "device=cuda", "model.compute_dtype=float16"]
            found["run"] = _algorist("run", "smoke-cpu", *where)
    return found


# ---- whole steps -----------------------------------------------------------------------------------------------------


def _train(bench: Bench, shape: str, kind: str, length: int, prepare: Any = None, **settings: Any) -> Any:
    """Train a few real GRPO steps of 16 completions; return the trainer and what it said about memory."""
    from models import make_tokenizer

    from algorist.config.schema import GRPOSection
    from algorist.prompts import get_format
    from algorist.rewards import build_rewards
    from algorist.rollouts import make_engine
    from algorist.training.grpo_setup import make_grpo_trainer
    from algorist.types import Problem

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    tokenizer, model = make_tokenizer(), _policy(bench, shape, kind)
    form = get_format("question_only")
    section = GRPOSection(
        batch_size=16, gradient_accumulation_steps=1, group_size=16, max_completion_tokens=8 if bench.smoke else length,
        save_steps=10**9, logging_steps=1, **settings,
    )  # fmt: skip
    loud = logging.getLogger("algorist")
    level = loud.level
    loud.setLevel(logging.INFO)
    try:
        with kept_records() as records, tempfile.TemporaryDirectory() as folder:
            trainer = make_grpo_trainer(
                model=model, tokenizer=tokenizer, problems=[Problem(f"p{i}", f"{i}+{i}=", "1") for i in range(64)],
                prompt_format=form, section=section, rewards=build_rewards([reward], form),
                engine=make_engine("native", model, tokenizer), output_dir=Path(folder), seed=3, device=bench.device,
            )  # fmt: skip
            if prepare is not None:
                prepare(trainer)
            trainer.train()
    finally:
        loud.setLevel(level)
    said = [record.getMessage() for record in records]
    return trainer, [text for text in said if "memory" in text or "one forward and backward takes" in text]


def card(bench: Bench) -> dict[str, Any]:
    """Three real GRPO steps of a 1.5B model on a card of 24 GB (imitated): peak, size of the parts, seconds of each rollout."""
    need_trl()
    found: dict[str, Any] = {"card_gb": CARD / 1e9}
    optim = {"adapter": "adamw_torch"}
    if find_spec("bitsandbytes"):
        optim["float32 masters"] = "adamw_8bit" if bench.cuda else "adamw_torch"
    else:
        found["float32 masters"] = "left out: it needs bitsandbytes for Adam's states in 8 bit"
    for kind, name in optim.items():
        for length in (1024,) if bench.smoke else (1024, 4096):
            try:
                case: dict[str, Any] = {}
                with bench.smaller_card(CARD) as taken, bench.peak(case):
                    trainer, said = _train(
                        bench, "1.5B", kind, length, max_steps=3, optim=name, gradient_checkpointing=True
                    )
                log = [line for line in trainer.state.log_history if "time/rollout_s" in line]
                case |= {"part_tokens": trainer.passes.part_tokens, "said": said}
                case |= {key: [line[f"time/{key}"] for line in log] for key in ("rollout_s", "update_s")}
                case["peak_gb"] = case["peak_gb"] and case["peak_gb"] - taken
                del trainer
            except Exception as error:  # the next case is as interesting
                case = {"error": f"{type(error).__name__}: {error}"[:500]}
            found[f"{kind} 16 x {length}"] = case
            print("  ", kind, length, json.dumps(case), flush=True)
            bench.free()
    return found


def halving(bench: Bench) -> dict[str, Any]:
    """Memory that runs out in an update: the step in halves moves the weights as the whole step does."""
    need_trl()
    moved, most, said = [], 0, []
    for little in (False, True):
        peak: dict[str, Any] = {}

        def prepare(trainer: Any, limit: int | None = most if little else None) -> None:
            trainer.log_probs = trainer.passes.compute = _Limited(
                bench, trainer.log_probs, limit, trainer.engine.release
            )

        before = _flat(_policy(bench, "0.5B", "float32 masters"))
        with bench.peak(peak):
            trainer, said = _train(
                bench, "0.5B", "float32 masters", 512, prepare, max_steps=1, optim="sgd", learning_rate=0.05, micro_batch_tokens=10**6
            )  # fmt: skip
        if bench.cuda:
            torch.cuda.set_per_process_memory_fraction(1.0, bench.device)
        most = int(1e9 * peak["peak_gb"]) if bench.cuda else trainer.log_probs.tokens
        moved.append(_flat(trainer.model) - before)
        parts = trainer.passes.part_tokens
        del trainer
        bench.free()
    apart = float((moved[1] - moved[0]).norm() / moved[0].norm())
    return {"relative_difference": apart, "part_tokens": parts, "said": said}


class _Limited:
    """A trainer's log-probs with less memory than the whole step takes: a GPU's share of the process, else refused here.

    Args:
        bench: Where it runs.
        log_probs: The trainer's.
        most: What the whole step took: bytes of a GPU, else tokens; None for no limit.
        release: Takes back what the engine keeps: else its memory would be given up first, and that may be enough.
    """

    def __init__(self, bench: Bench, log_probs: Any, most: int | None, release: Callable[[], None]) -> None:
        self.bench, self.log_probs, self.most, self.tokens, self.release = bench, log_probs, most, 0, release

    def __call__(self, model: Any, batch: Any, **more: Any) -> Any:
        tokens = batch.packed_tokens(range(len(batch)))
        self.tokens = max(self.tokens, tokens)
        self.release()
        if self.most is not None and not self.bench.cuda and tokens > 0.6 * self.most:
            raise torch.OutOfMemoryError("this part is larger than what the smoke run allows")
        if self.most is not None and self.bench.cuda:
            device, most, self.most = self.bench.device, self.most, None
            self.bench.free()
            held = torch.cuda.memory_reserved(device)
            total = torch.cuda.get_device_properties(device).total_memory
            # At least one of the allocator's segments: the smoke run's whole step takes little more.
            limit = held + max(2 << 20, 0.6 * (most - torch.cuda.memory_allocated(device)))
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        return self.log_probs(model, batch, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log_probs, name)


def _flat(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().cpu().flatten() for p in model.parameters()])


# ---- several processes -----------------------------------------------------------------------------------------------


def sharded(bench: Bench) -> dict[str, Any]:
    """FSDP2 on two GPUs through NCCL (smoke: two processes through gloo) against one process: SFT's weights, and a GRPO step."""
    need_trl()
    if bench.cuda and torch.cuda.device_count() < 2:
        raise Skipped("one GPU; FSDP2 through NCCL needs two")
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        steps = [
            "sft.max_steps=2",
            "grpo.max_steps=1",
            "eval.enabled=false",
            "grpo.gradient_accumulation_steps=2",
        ]
        common = [f"output_dir={folder}", f"device={bench.device.type}", "threads=1", *steps]
        one, two = (["sft.batch_size=16", "grpo.batch_size=16"], ["sft.batch_size=8", "grpo.batch_size=8"])
        found["one"] = _algorist("run", "smoke-cpu", "run_name=one", *common, *one)
        launch = ("run", "-n", "2", "--launch", "fsdp2", "smoke-cpu", "run_name=two")
        found["two"] = _algorist(*launch, *common, *two)
        if not (found["one"]["exit"] or found["two"]["exit"]):
            ends = [load_file(Path(folder, run, "sft/final/model.safetensors")) for run in ("one", "two")]
            found["sft_difference"] = max(float((ends[0][n] - ends[1][n]).abs().max()) for n in ends[0])
    return found


def _algorist(*arguments: str) -> dict[str, Any]:
    """Run a command of algorist; return exit code, seconds and its last lines."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "algorist.cli.main", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    tail = (done.stdout + done.stderr)[-2000:]
    return {"exit": done.returncode, "seconds": time.perf_counter() - began, "tail": tail}
