"""Threads that wait for each other: spinning, as OpenMP does by default, or asleep, alone and beside other programs.

    python benchmarks/waiting.py [MODEL] [--threads 2] [--beside 0 2] [--turns 3] [--tokens 24]

Each turn is a process that samples 32 rows of four prompts and computes the gradient of their log-probs; ``--beside`` are numbers of
processes that compute meanwhile. MODEL is as in families.py: random weights, a folder or a GGUF file. Wall seconds, the median of turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

POLICIES = {"spinning": {}, "asleep": {"OMP_WAIT_POLICY": "PASSIVE"}}


def child(name: str, threads: int, tokens: int) -> None:
    """Print the wall and processor seconds of sampling and of an update."""
    import torch

    from algorist.rollouts.base import SamplingParams
    from algorist.rollouts.native.engine import NativeEngine
    from algorist.training.batch import Batch
    from algorist.training.log_probs import LogProbs
    from benchmarks.families import GROUP, LENGTHS, PART, make_model

    torch.set_num_threads(threads)
    model = make_model(name)
    model.generation_config.eos_token_id = None
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 30000, (length,), generator=draw).tolist() for length in LENGTHS]
    engine = NativeEngine(model)
    clocks = []
    for length in (2, tokens):  # the first is thrown away
        clocks = [(time.perf_counter(), time.process_time())]
        groups = engine.generate(
            prompts, GROUP, SamplingParams(temperature=1.0, max_new_tokens=length, seed=1)
        )
        clocks.append((time.perf_counter(), time.process_time()))
        completions = [completion.token_ids for group in groups for completion in group]
        rows = len(completions)
        mask = torch.ones(rows, length, dtype=torch.bool)
        batch = Batch(prompts, completions, [row // GROUP for row in range(rows)], torch.zeros(rows), mask)
        model.train()
        for first in range(0, rows, PART):
            values, _ = LogProbs()(model, batch.take(list(range(first, first + PART))))
            values.sum().backward()
        clocks.append((time.perf_counter(), time.process_time()))
    (began, worked), (sampled, at_sampling), (ended, at_end) = clocks
    print(json.dumps([sampled - began, ended - sampled, at_sampling - worked, at_end - at_sampling]))


def main() -> None:
    """Print a line for each number of programs beside and each policy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm3")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.model, arguments.threads, arguments.tokens)
    words = [sys.executable, "-m", "benchmarks.waiting", arguments.model, "--child"]
    words += ["--threads", str(arguments.threads), "--tokens", str(arguments.tokens)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    for beside in arguments.beside:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(beside)]
        seconds: dict[str, list[list[float]]] = {name: [] for name in POLICIES}
        for _ in range(arguments.turns):
            for name, policy in POLICIES.items():
                done = subprocess.run(words, env=clean | policy, check=True, capture_output=True, text=True)
                seconds[name].append(json.loads(done.stdout.splitlines()[-1]))
        for name, runs in seconds.items():
            sampling, update, *worked = (statistics.median(column) for column in zip(*runs, strict=True))
            print(
                f"{beside} programs beside, {name}: sampling {sampling:.1f} s, update {update:.1f} s "
                f"(of the processor {worked[0]:.1f} and {worked[1]:.1f})",
                flush=True,
            )
        for process in busy:
            process.kill()
            process.wait()
    return None


if __name__ == "__main__":
    main()
