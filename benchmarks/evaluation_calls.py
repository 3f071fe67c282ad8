"""Processor seconds and peak memory of greedy evaluations by problems per engine call, each in a process of its own.

    python benchmarks/evaluation_calls.py MODEL --path gsm8k/test.jsonl [--problems 192] [--calls 64 192] [--rows 64]

A call of more problems than are decoded at a time (``--rows``) puts those that wait into the places of those that end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measure import peak_memory_mib

from algorist.config.schema import DatasetSection
from algorist.data import load_problems
from algorist.models.host_memory import keep_freed_memory
from algorist.models.load import policy_of
from algorist.prompts import get_format
from algorist.rollouts import SamplingParams
from algorist.rollouts.collect import collect
from algorist.rollouts.native import decoder_tier
from algorist.rollouts.native.engine import NativeEngine


def measured(arguments: argparse.Namespace, size: int) -> str:
    """Sample the problems in calls of ``size`` and return the figures as a line."""
    keep_freed_memory()
    decoder_tier.ROWS_AT_A_TIME = arguments.rows
    policy = policy_of(Path(arguments.model), device=torch.device("cpu"))
    section = DatasetSection(name="gsm8k", split="test", path=arguments.path, limit=arguments.problems)
    problems, engine = load_problems(section), NativeEngine(policy.model, policy.tokenizer)
    sampling = SamplingParams(max_new_tokens=arguments.tokens, temperature=0.0)
    began, tokens = time.process_time(), 0
    for first in range(0, len(problems), size):
        part = problems[first : first + size]
        groups = collect(engine, policy.tokenizer, part, get_format("reasoning_answer"), sampling, 1)
        tokens += sum(len(rollout.completion_ids) for group in groups for rollout in group.rollouts)
    seconds = time.process_time() - began
    return (
        f"calls of {size}, {arguments.rows} rows at a time: {tokens} tokens, {seconds:.0f} processor s, "
        f"peak {peak_memory_mib() * 2**20 / 1e9:.2f} GB"
    )


def main() -> None:
    """Measure each size in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder, or a GGUF file")
    parser.add_argument("--path", required=True, help="GSM8K's test.jsonl")
    parser.add_argument("--problems", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=decoder_tier.ROWS_AT_A_TIME)
    parser.add_argument("--calls", type=int, nargs="+", default=[64, 192])
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.alone:
        print(measured(arguments, arguments.calls[0]), flush=True)
        return
    same = [arguments.model, "--path", arguments.path, "--problems", str(arguments.problems)]
    same += ["--tokens", str(arguments.tokens), "--rows", str(arguments.rows)]
    for size in arguments.calls:
        command = [sys.executable, __file__, *same, "--calls", str(size), "--alone"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
