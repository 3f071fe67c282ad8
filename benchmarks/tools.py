"""What calls cost, and what a calculator is worth: decoding with and without turns; a recipe with and without its tool.

    python benchmarks/tools.py cost [--model smollm2] [--rows 16] [--tokens 128]   # seconds of the same tokens, with and without calls
    python benchmarks/tools.py calls [--count 10000]                               # seconds of so many calls of each tool
    python benchmarks/tools.py worth [--seeds 3] [--out runs/tools] [--steps 60]   # smollm2-tool against the same recipe without tools

``cost`` decodes fixed prompts greedily; then again with replies at every eighth token, and compares with as many tokens without any. The two
take turns. ``worth`` prints the commands' output: for each seed a run with and one without the calculator (the same SFT tokens, GRPO steps and problems),
the evaluation on SVAMP's 300 with and without it, and the paired difference.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch

from algorist.config.model_section import ModelSection
from algorist.extensions.tools.base import TOOLS, Limits, Tool
from algorist.models.load import make_policy
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native.engine import NativeEngine
from algorist.types import Turn

EVERY, REPLY = 8, 4


class Periodic:
    """Replies with a few tokens to whatever was written, at each full number of tokens."""

    def __init__(self, decode: object, stop: str) -> None:
        self.stop_strings = (stop,)

    def begin(self, rows: int) -> None:
        self.calls = [0] * rows

    def reply(self, row: int, token_ids: list[int], ended: bool) -> Iterator[int] | None:
        self.calls[row] += 1
        return None if ended else iter(token_ids[-REPLY:])

    def turns_of(self, row: int) -> tuple[Turn, ...]:
        return ()


def cost(model: str, rows: int, tokens: int, rounds: int) -> None:
    """Print the seconds of decoding with and without turns, and their ratio."""
    policy = make_policy(ModelSection(name=model), device=torch.device("cpu"), seed=0, texts=[], tags=[])
    engine = NativeEngine(policy.model, policy.tokenizer, tier="decoder")
    question = "Write the numbers from one to two hundred, each followed by an equals sign: 1 = 2 = 3 ="
    prompts = [list(policy.tokenizer(f"{i}. {question}")["input_ids"]) for i in range(rows)]
    params = SamplingParams(temperature=0.0, max_new_tokens=tokens, min_new_tokens=tokens)
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    calls = 0
    for _ in range(rounds + 1):
        for name, values in seconds.items():
            turns = Periodic(policy.tokenizer.decode, "=") if name == "with" else None
            began = time.perf_counter()
            engine.generate(prompts, 1, params, turns)
            values.append(time.perf_counter() - began)
            calls = sum(turns.calls) if turns else calls
    best = {name: median(values[1:]) for name, values in seconds.items()}
    print(
        f"{rows} rows of {tokens} tokens, {calls} calls: {best['without']:.2f} s without, {best['with']:.2f} s with, ratio {best['with'] / best['without']:.3f}"
    )


def calls(count: int) -> None:
    """Print the seconds of ``count`` calls, in sessions of four that share their variables, from as many threads as there are cores."""
    requests = {
        "calculator": ["17 * 24 + 3", "1/3 + 2/5", "(1999 - 3) / 4", "2**10 % 7"],
        "python": [
            "x = 17 * 24\nx + 3",
            "y = [n * n for n in range(20)]\nsum(y)",
            "x - len(y)",
            "print(max(y), x // 7)",
        ],
    }
    for name, texts in requests.items():
        limits = Limits()
        called = TOOLS.get(name)(limits)
        called.check()

        def session(_: int, called: Tool = called, texts: list[str] = texts) -> int:
            state, errors = None, 0
            for text in texts:
                output = called.call(text, state)
                state, errors = output.session, errors + bool(output.error)
            return errors

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            began = time.perf_counter()
            errors = sum(threads.map(session, range(count // len(texts))))
            took = time.perf_counter() - began
        print(f"{name}: {count} calls in {took:.2f} s, {errors} errors")


def worth(seeds: int, out: Path, steps: int) -> None:
    """Train and evaluate both arms of each seed, then compare them."""

    def algorist(*arguments: str) -> None:
        print("algorist", *arguments, flush=True)
        subprocess.run([sys.executable, "-m", "algorist", *arguments], check=True)

    for seed in range(seeds):
        for name, change in (("tool", []), ("plain", ["tools=null"])):
            run = out / f"{name}-{seed}"
            resume = ["--resume"] if run.exists() else []
            algorist(
                "run",
                "smollm2-tool",
                f"output_dir={out}",
                f"run_name={name}-{seed}",
                f"seed={seed}",
                f"grpo.max_steps={steps}",
                *change,
                *resume,
            )
            algorist("eval", str(run), "--data", "svamp_300", "--name", "svamp")
            algorist(
                "eval", str(run), "--data", "story_problems,params={count: 300, seed: 9}", "--name", "story"
            )
        algorist(
            "eval", str(out / f"tool-{seed}"), "--data", "svamp_300", "--name", "svamp-no-tools", "--no-tools"
        )
        algorist(
            "compare", str(out / f"plain-{seed}/eval/svamp.json"), str(out / f"tool-{seed}/eval/svamp.json")
        )
        algorist(
            "compare",
            str(out / f"tool-{seed}/eval/svamp-no-tools.json"),
            str(out / f"tool-{seed}/eval/svamp.json"),
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    first = verbs.add_parser("cost")
    first.add_argument("--model", default="smollm2")
    first.add_argument("--rows", type=int, default=16)
    first.add_argument("--tokens", type=int, default=128)
    first.add_argument("--rounds", type=int, default=3)
    verbs.add_parser("calls").add_argument("--count", type=int, default=10_000)
    second = verbs.add_parser("worth")
    second.add_argument("--seeds", type=int, default=3)
    second.add_argument("--out", type=Path, default=Path("runs/tools"))
    second.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    if asked.verb == "calls":
        calls(asked.count)
    elif asked.verb == "cost":
        cost(asked.model, asked.rows, asked.tokens, asked.rounds)
    else:
        worth(asked.seeds, asked.out, asked.steps)


if __name__ == "__main__":
    main()
