"""The battery for a GPU: is it right there, how fast is it, what memory does it take. One command, one JSON file per section.

    python benchmarks/gpu.py --out gpu-results              # the first ten minutes, then the rest
    python benchmarks/gpu.py --out gpu-results --sections env,kernels,decode
    python benchmarks/gpu.py --out /tmp/smoke --smoke       # every section in small on the CPU, in a minute: what CI runs

A section writes its file as it ends, so a killed run keeps what is done; one that fails writes its error and the next one
runs. No weights are loaded: models are random, in Qwen2.5's shapes, with the large key biases that Qwen2.5 has. Times are medians
of CUDA events. Sections that need TRL (all but env, kernels, decode and speed) say so and are left out where it is missing; those
on the update are in ``gpu_training.py``.
CONTRIBUTING.md says how to run it on a machine without network.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_bench import PROMPT, Bench, Skipped, need_trl
from gpu_training import card, correctness, float16, halving, memory, sharded, update
from measure import ROOT, save_json
from transformers import ContinuousBatchingConfig, GenerationConfig

from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native.engine import NativeEngine

# ---- the first ten minutes -------------------------------------------------------------------------------------------


def env(bench: Bench) -> dict[str, Any]:
    """The device, its driver, and its two ceilings: copy bandwidth and bfloat16 products."""
    size, side = (1 << 20, 256) if bench.smoke else (1 << 31, 8192)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=bench.device).to(bench.dtype) for _ in range(2))
    found: dict[str, Any] = {
        "copy_gb_per_s": 2 * size / bench.seconds(lambda: target.copy_(source)) / 1e9,
        "product_tflop_per_s": 2 * side**3 / bench.seconds(lambda: a @ b) / 1e12,
        "triton": find_spec("triton") is not None,
    }
    if bench.cuda:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "name": properties.name,
            "memory_gb": properties.total_memory / 1e9,
            "capability": torch.cuda.get_device_capability(),
            "cuda": torch.version.cuda,
            "driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").strip(),
        }
    return found


def kernels(bench: Bench) -> dict[str, Any]:
    """The Triton kernels against float64, compiled; greedy tokens of the graphs against the eager decoder; the score gap."""
    found: dict[str, Any] = {}
    by_hand = [f"tests/unit/rollouts/test_{n}.py" for n in ("triton_attention", "triton_step", "sampling")]
    for name, tests in (
        {} if bench.smoke else {"tests": by_hand, "gpu_tests": [*GPU_TESTS, "tests/unit"]}.items()
    ):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        found |= {f"{name}_exit": done.returncode, f"{name}_tail": done.stdout[-2000:]}
    model = bench.model("0.5B")
    prompts = bench.prompts(3, model.config.vocab_size)
    params = SamplingParams(max_new_tokens=8 if bench.smoke else 64, seed=0)
    groups = {t: NativeEngine(model, tier=t).generate(prompts, 4, params) for t in ("graph", "decoder")}
    for tier, completions in groups.items():
        gaps = []
        for prompt, group in zip(prompts, completions, strict=True):
            for completion in group:
                ids = torch.tensor([[*prompt, *completion.token_ids]], device=bench.device)
                with torch.no_grad():
                    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
                chosen = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
                gaps.append((chosen - torch.tensor(completion.log_probs)).abs())
        gap = torch.cat(gaps)
        found[f"{tier}_gap_mean"], found[f"{tier}_gap_max"] = float(gap.mean()), float(gap.max())
    first = [[c.token_ids[0] for c in g] for gs in groups.values() for g in gs]
    found["same_first_tokens"] = first[: len(first) // 2] == first[len(first) // 2 :]
    return found


def decode(bench: Bench, shapes: tuple[str, ...] = ("0.5B", "1.5B")) -> dict[str, Any]:
    """Milliseconds per decoded step of the graphs and of the eager decoder, beside what the memory allows."""
    copied = env(bench)["copy_gb_per_s"] * 1e9
    cases = []
    for shape in shapes[:1] if bench.smoke else shapes:
        model = bench.model(shape)
        for rows in (2,) if bench.smoke else (1, 16, 64, 256):
            case: dict[str, Any] = {"shape": shape, "rows": rows, "limit_ms": _limit(model, rows, copied)}
            for tier in ("graph", "decoder"):
                case[tier] = _decode_case(bench, model, rows, tier)
            case["graph_over_limit"] = case["graph"]["ms_per_step"] / case["limit_ms"]
            case["eager_over_graph"] = case["decoder"]["ms_per_step"] / case["graph"]["ms_per_step"]
            cases.append(case)
            print("  ", json.dumps(case), flush=True)
            bench.free()
        del model
        bench.free()
    return {"cases": cases}


def _limit(model: Any, rows: int, bytes_per_s: float) -> float:
    """Milliseconds to read the weights once (the embedding only as the head) and the keys and values of all rows."""
    config = model.config
    weights = sum(
        p.nbytes for n, p in model.named_parameters() if config.tie_word_embeddings or "embed" not in n
    )
    head_dim = config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
    return 1000 * (weights + token * (rows * 64 + -(-rows // 16) * PROMPT)) / bytes_per_s


def _decode_case(bench: Bench, model: Any, rows: int, tier: str) -> dict[str, Any]:
    """Two lengths, so that the prefill cancels; groups of up to 16 rows."""
    group = min(rows, 16)
    prompts = bench.prompts(-(-rows // group), model.config.vocab_size)
    engine = NativeEngine(model, tier=tier)
    short, long = (5, 9) if bench.smoke else (32, 160)

    def sample(count: int) -> None:
        engine.generate(prompts, group, SamplingParams(max_new_tokens=count, seed=0))

    found: dict[str, Any] = {}
    with bench.peak(found):
        sample(long)  # the largest first: its graphs and its cache serve both
        times = {count: bench.seconds(lambda n=count: sample(n), 3, 1) for count in (short, long)}  # type: ignore[misc]
    found["ms_per_step"] = 1000 * (times[long] - times[short]) / (long - short)
    found["tokens_per_s"] = rows * long / times[long]
    if bench.cuda and rows == 64:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            sample(long)
        calls = {e.key: e.count for e in profile.key_averages() if "Launch" in e.key}
        found["launches_per_step"] = {name: count / long for name, count in calls.items()}
    engine.release()
    return found


def quickstart(bench: Bench) -> dict[str, Any]:
    """The quickstart on the GPU: it learns, and step 2's rollout takes what step 1's took."""
    return _quickstart(bench, 0)


def _quickstart(bench: Bench, seed: int) -> dict[str, Any]:
    need_trl()
    if bench.smoke:
        raise Skipped("minutes long; tests/slow/test_runs.py runs it on the CPU")
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"device={bench.device.type}", f"seed={seed}", f"output_dir={folder}"]
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "algorist.cli.main", "run", "quickstart", *overrides],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        found: dict[str, Any] = {"exit": done.returncode, "seconds": time.perf_counter() - began}
        found["tail"] = (done.stdout + done.stderr)[-3000:]
        for path in Path(folder).rglob("metrics.jsonl"):
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            found["rollout_s"] = [m["time/rollout_s"] for m in lines if "time/rollout_s" in m]
            found["reward"] = [m["reward"] for m in lines if "reward" in m]
    return found


# ---- with more time --------------------------------------------------------------------------------------------------


def speed(bench: Bench) -> dict[str, Any]:
    """Larger shapes, and transformers' ``generate`` and continuous batching beside the engine's tiers."""
    found = {} if bench.smoke else decode(bench, ("4B", "8B"))
    model = bench.model("0.5B")
    for rows in (2,) if bench.smoke else (16, 64):
        ids = torch.tensor(bench.prompts(1, model.config.vocab_size) * rows, device=bench.device)
        new = 4 if bench.smoke else 64

        def generate(ids: torch.Tensor = ids, new: int = new) -> None:
            model.generate(ids, max_new_tokens=new, do_sample=True, pad_token_id=0)

        found[f"generate_{rows}_rows_ms_per_step"] = 1000 * bench.seconds(generate, 3, 1) / new

        def continuous(ids: torch.Tensor = ids, new: int = new) -> None:
            given = GenerationConfig(max_new_tokens=new, do_sample=True, pad_token_id=0, eos_token_id=-1)
            # On a CPU its cache would take all memory there is.
            room = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64) if bench.smoke else None
            done = model.generate_batch(ids.tolist(), given, room, progress_bar=False)
            lengths = [len(row.generated_tokens) for row in done.values()]
            if lengths != [new] * len(ids):
                raise RuntimeError(f"asked for {len(ids)} rows of {new} tokens, got {lengths}")

        name = f"continuous_batching_{rows}_rows_ms_per_step"
        try:
            found[name] = 1000 * bench.seconds(continuous, 3, 1) / new
        except Exception as error:  # it has its own demands on GPU and libraries
            found[name] = f"{type(error).__name__}: {error}"[:500]
    return found


def step(bench: Bench) -> dict[str, Any]:
    """A whole GRPO step against stock TRL in turns, with ``generate`` and, where it is installed, with vLLM on both sides; peak memory."""
    need_trl()
    from equal import USUAL, time_case

    found: dict[str, Any] = {}
    engines = ["native", "vllm"] if find_spec("vllm") else ["native"]
    for size in ("tiny",) if bench.smoke else ("0.5B", "1.5B"):
        case = USUAL | {
            "model": size,
            "device": bench.device.type,
            "rows": 64,
            "group": 16,
            "tokens": 512,
            "dtype": "bfloat16",
        }
        if bench.smoke:
            case |= {"rows": 4, "group": 4, "tokens": 8, "prompt_tokens": 12, "dtype": "float32"}
        for engine in engines:
            timed = time_case(case | {"engine": engine}, 2 if bench.smoke else 3)
            found[f"{size} {engine}"] = timed
            print("  ", size, engine, json.dumps(timed["speed_up"]), flush=True)
            bench.free()
    return found


def learning(bench: Bench) -> dict[str, Any]:
    """The quickstart with three seeds."""
    return {str(seed): _quickstart(bench, seed) for seed in (0, 1, 2)}


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        *(env, kernels, decode, update, quickstart),
        *(correctness, float16, halving, memory, card, speed, step, sharded, learning),
    )
}
DECIDES = {
    "env": "the ceilings that every other figure is read against",
    "kernels": "whether the decoding kernels may be the default at all: right and in bounds on silicon, which no host test can say",
    "decode": "native or vLLM as the default of grpo.engine, and whether an adapter must be merged (estimated: 1.2 ms a token, 0.5B)",
    "update": "whether element-wise kernels are to be fused, by their share; if the peaks are the stub's, memory needs no card again",
    "quickstart": "whether a run learns on a card as on the CPU",
    "correctness": "the tolerance that the packed pass is held to in 16 bit",
    "float16": "whether a T4's recipes may be recommended",
    "halving": "whether a run outlives running out of memory with the real driver",
    "memory": "the factor between planned and reserved memory",
    "card": "the promises of the 8, 16 and 24 GB recipes",
    "speed": "whether README may name a speed against stock TRL on a GPU",
    "step": "the same on equal work, and what of a step is left to cut",
    "sharded": "whether FSDP2 over NCCL is as exact as over gloo",
    "learning": "whether the gain in accuracy on the CPU holds in bfloat16 on a card",
}
"""What is done differently by a section's figures; it stands in the section's file."""
GPU_TESTS = (
    "-m",
    "gpu",
    "--continue-on-collection-errors",
)  # most files need packages that a GPU machine may lack
FIRST = ("env", "kernels", "decode", "update", "quickstart")


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    except FileNotFoundError:  # a container without nvidia-smi
        return ""


def _one_by_one(names: list[str], chosen: argparse.Namespace) -> int:
    """Run each section in a process of its own: a capture that hangs, or an error that stays with the card, ends one of them."""
    failed = []
    for name in names:
        command = [sys.executable, __file__, "--sections", name, "--out", str(chosen.out)]
        command += ["--device", chosen.device, *["--smoke"] * chosen.smoke]
        try:
            code = subprocess.run(command, timeout=chosen.limit).returncode
        except subprocess.TimeoutExpired:
            save_json(name, {"section": name, "error": f"no end after {chosen.limit:g} s"}, chosen.out)
            code = 1
        failed += [name] if code else []
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def main() -> int:
    """Run the sections; exit 1 when one has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument(
        "--sections",
        default=",".join(SECTIONS),
        help=f"comma-separated; the first ten minutes: {','.join(FIRST)}",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny models, one repeat, any device")
    parser.add_argument(
        "--limit", type=float, default=540, help="seconds of a section, where it is not the only one"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args()
    names = [name.strip() for name in chosen.sections.split(",") if name.strip()]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {', '.join(unknown)}; expected some of {', '.join(SECTIONS)}")
    if chosen.device == "cpu" and not chosen.smoke:
        parser.error("no GPU is visible to torch; --smoke runs every section in small on the CPU")
    if len(names) > 1 and chosen.device != "cpu":
        return _one_by_one(names, chosen)
    bench, failed = Bench(chosen.smoke, chosen.device), []
    for name in names:
        print(f"== {name}: {(SECTIONS[name].__doc__ or '').splitlines()[0]}", flush=True)
        began = time.perf_counter()
        try:
            result: dict[str, Any] = SECTIONS[name](bench)
        except Skipped as why:
            result = {"skipped": str(why)}
        except Exception:
            result = {"error": traceback.format_exc()}
            failed.append(name)
        seconds = time.perf_counter() - began
        about = {"section": name, "decides": DECIDES[name], "smoke": chosen.smoke, "section_s": seconds}
        result = {**about, **result}
        path = save_json(name, result, chosen.out)
        said = result.get("error") or result.get("skipped") or f"{result['section_s']:.1f} s"
        print(f"   {path}: {said}", flush=True)
        bench.free()
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
