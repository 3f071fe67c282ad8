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
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

import measure
import torch

from algorist.config.section import ModelSection
from algorist.evaluation.artifact import read_artifact
from algorist.evaluation.compare import on_common_problems, paired_metrics
from algorist.evaluation.estimators import paired_difference
from algorist.extensions.toolbox.base import TOOLS, Tool, ToolLimits
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
        limits = ToolLimits()
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


ARMS = {"tool": [], "plain": ["tools=null"]}
LENGTH = 96


def worth(asked: argparse.Namespace) -> None:
    """Train and evaluate both arms of each seed: first both after SFT, then both after GRPO; what is there already is not done again."""

    def algorist(*arguments: str) -> None:
        print(time.strftime("%H:%M:%S"), "algorist", *arguments, flush=True)
        subprocess.run([sys.executable, "-m", "algorist", *arguments], check=True, stdin=subprocess.DEVNULL)

    def train(name: str, seed: int, *changes: str) -> None:
        run = asked.out / name
        resume = ["--resume"] if run.exists() else []
        if not (run / "report.html").exists():
            common = [f"output_dir={asked.out}", f"run_name={name}", f"seed={seed}", "eval.enabled=false"]
            algorist("run", "smollm2-tool", *common, *changes, *asked.change, *resume)

    chain = {"min_terms": 2, "max_terms": 3, "min_digits": 3, "max_digits": 4}
    params = json.dumps({"generator": "chain_sum", "count": asked.chains, "seed": 7, "config": chain})
    sets = {"svamp": "svamp_300", "chain": f"reasoning_gym,params={params}"}
    if asked.svamp:
        sets["rest"] = f"svamp,path={rest_of_svamp(asked.svamp, asked.out)}"

    def evaluate(run: str, *names: str) -> None:
        for name in names:
            if name in sets:
                options = ["--data", sets[name], "--name", name, "--max-new-tokens", str(LENGTH)]
                algorist("eval", str(asked.out / run), *options)

    for seed in range(asked.seeds):
        for arm, change in ARMS.items():
            train(
                f"{arm}-sft-{seed}", seed, "grpo.enabled=false", f"sft.max_steps={asked.sft_steps}", *change
            )
            evaluate(f"{arm}-sft-{seed}", "svamp", "chain")
            table(asked.out)
        for arm in ARMS:
            evaluate(f"{arm}-sft-{seed}", "rest")
        for arm, change in ARMS.items():
            start = f"model.name={asked.out / f'{arm}-sft-{seed}' / 'sft' / 'final'}"
            train(
                f"{arm}-grpo-{seed}",
                seed,
                "sft.enabled=false",
                start,
                f"grpo.max_steps={asked.steps}",
                *change,
            )
            evaluate(f"{arm}-grpo-{seed}", "svamp", "chain")
            table(asked.out)
        for arm in ARMS:
            evaluate(f"{arm}-grpo-{seed}", "rest")
        run = str(asked.out / f"tool-grpo-{seed}")
        algorist(
            "eval",
            run,
            "--data",
            "svamp_300",
            "--name",
            "without",
            "--no-tools",
            "--max-new-tokens",
            str(LENGTH),
        )
        table(asked.out)


def rest_of_svamp(whole: Path, folder: Path) -> Path:
    """Write SVAMP without the 300 problems that come with the package, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    rest = folder / "svamp_rest.jsonl"
    rest.write_text(
        "".join(whole.read_text(encoding="utf-8").splitlines(keepends=True)[300:]), encoding="utf-8"
    )
    return rest


def table(folder: Path, *, save: bool = False) -> None:
    """Print what the stored evaluations of ``worth`` say so far; shares are percent, ``gold`` of the last calls got the right answer.

    With ``save`` which problems were right goes to ``baselines/tools-worth.json``: one character of 0 or 1 for each, in order.
    """
    stored = {
        (path.parent.parent.name, path.stem): read_artifact(path.parent, path.stem)
        for path in sorted(folder.glob("*-*-*/eval/*.json"))
    }
    if save:
        right = {
            f"{run} {name}": "".join(str(int(bool(row["correct"]))) for row in artifact.samples)
            for (run, name), artifact in sorted(stored.items())
        }
        measure.save_json("tools-worth", {"right": right})
    print("seed set      after    n  plain   tool  difference [95 %]      calls  failed   gold")
    for (run, name), artifact in sorted(stored.items(), key=lambda item: item[0][::-1]):
        arm, stage, seed = run.split("-")
        if arm == "tool":
            rows, plain = artifact.samples, stored.get((f"plain-{stage}-{seed}", name))
            line = f"{seed:<4} {name:<8} {stage:<5} {len(rows):>4} {_right(plain.samples) if plain else '':>6} {_right(rows):>6}  "
            if plain:
                _, second, _ = on_common_problems(plain, artifact)
                gain = paired_metrics(plain.samples, second.samples)["greedy_accuracy"]
                line += f"{100 * gain.value:+5.1f} [{100 * gain.low:+5.1f}, {100 * gain.high:+5.1f}]"
            print(f"{line:<54}{_calls(rows)}")
    for name, stage in sorted({(name, run.split("-")[1]) for run, name in stored}):
        pairs = [
            (stored[f"plain-{stage}-{seed}", name].samples, rows.samples)
            for seed in range(100)
            if (rows := stored.get((f"tool-{stage}-{seed}", name)))
            and (f"plain-{stage}-{seed}", name) in stored
        ]
        if len(pairs) > 1:
            plain, tool = (
                [mean(bool(row["correct"]) for row in rows) for rows in zip(*arm, strict=True)]
                for arm in zip(*pairs, strict=True)
            )
            gain = paired_difference(plain, tool)
            print(
                f"all  {name:<8} {stage:<5} {len(plain):>4} {100 * mean(plain):>6.1f} {100 * mean(tool):>6.1f}  "
                f"{100 * gain.value:+5.1f} [{100 * gain.low:+5.1f}, {100 * gain.high:+5.1f}] over {len(pairs)} seeds"
            )
    for path in sorted(folder.glob("*-*-*/metrics.jsonl")):
        times = [json.loads(line)["time"] for line in path.read_text(encoding="utf-8").splitlines()]
        print(
            f"{path.parent.name}: {(times[-1] - times[0]) / 60:.1f} minutes from the first to the last logged step"
        )
    print(flush=True)


def _right(rows: list[dict[str, Any]]) -> str:
    return f"{100 * sum(bool(row['correct']) for row in rows) / len(rows):.1f}"


def _calls(rows: list[dict[str, Any]]) -> str:
    """Return calls for each answer, the share that failed, and the share of last calls whose output is the gold answer."""
    called = [row for row in rows if row.get("turns")]
    calls = [turn for row in called for turn in row["turns"]]
    if not calls:
        return ""
    failed = sum(bool(turn["error"]) for turn in calls) / len(calls)
    gold = sum(row["turns"][-1]["reply"].strip() == str(row["gold"]) for row in called) / len(called)
    return f"{len(calls) / len(rows):>7.2f} {100 * failed:>7.1f} {100 * gold:>6.1f}"


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
    second.add_argument("--sft-steps", type=int, default=240)
    second.add_argument("--steps", type=int, default=60)
    second.add_argument("--chains", type=int, default=300)
    second.add_argument(
        "--svamp", type=Path, help="file of all 1,000 problems; without it only the first 300"
    )
    second.add_argument("--change", action="append", default=[], metavar="KEY=VALUE", help="of both arms")
    third = verbs.add_parser("table")
    third.add_argument("--out", type=Path, default=Path("runs/tools"))
    third.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    if asked.verb == "calls":
        calls(asked.count)
    elif asked.verb == "cost":
        cost(asked.model, asked.rows, asked.tokens, asked.rounds)
    elif asked.verb == "table":
        table(asked.out, save=asked.save)
    else:
        worth(asked)


if __name__ == "__main__":
    main()
