"""Seconds of a GRPO step beside a vLLM server on the other core: ``grpo.sample_ahead`` against sampling before each update.

Run it with the Python of vLLM's environment, on a machine with two cores that do nothing else:

    .venv-vllm/bin/python benchmarks/vllm_sample_ahead.py [--steps 12] [--repeats 3] [--save]

A random model of 6 layers; 32 completions of up to 96 tokens a step. Server and trainer have a core and a process each. The runs take
turns; the first three steps of each are left out (the first samples before its update in both).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from measure import ROOT, ratio_with_interval, save_json

sys.path.insert(0, str(ROOT))

from algorist.models.tiny import tiny_model, train_tokenizer
from tests.vllm.servers import TEXTS, Server

SHAPE = {"hidden_size": 256, "heads": 4, "kv_heads": 2, "layers": 6}


def run(folder: Path, name: str, url: str, arguments: argparse.Namespace, *more: str) -> dict[str, float]:
    """Train; return the means of the seconds of a step, of its wait for rollouts and of its update."""
    settings = [
        f"model.name={folder}/model", f"output_dir={folder}/runs", f"run_name={name}", "rewards=[random]", "threads=1",
        "eval.enabled=false", f"grpo={{batch_size: 32, group_size: 8, gradient_accumulation_steps: 1, max_completion_tokens: 96, "
        f"engine: vllm, learning_rate: 1e-6, save_steps: 1000, max_steps: {arguments.steps}, logging_steps: 1}}",
        f"grpo.vllm={{mode: server, server_base_url: '{url}', sync_folder: '{folder}'}}", *more,
    ]  # fmt: skip
    command = [sys.executable, "-m", "algorist.cli.main", "run", "smoke-cpu", "--only", "grpo", *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step_s" in row][3:]
    return {key: mean(row[f"time/{key}"] for row in rows) for key in ("step_s", "rollout_s", "update_s")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    samples: dict[str, list[dict[str, float]]] = {"before": [], "ahead": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
        folder = Path(temporary)
        tokenizer = train_tokenizer(TEXTS, vocab_size=320)
        tiny_model(tokenizer, **SHAPE).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        os.sched_setaffinity(0, cores[-1:])
        server = Server.start(folder / "model")
        os.sched_setaffinity(0, cores[:1])
        try:
            for number in range(arguments.repeats):
                for name, more in (("before", []), ("ahead", ["grpo.sample_ahead=true"])):
                    samples[name].append(run(folder, f"{name}-{number}", server.url, arguments, *more))
                    print(
                        name, {key: round(value, 3) for key, value in samples[name][-1].items()}, flush=True
                    )
        finally:
            server.kill()
    rates: dict[str, Any] = {name: [1 / row["step_s"] for row in rows] for name, rows in samples.items()}
    ratio = ratio_with_interval(rates["ahead"], rates["before"])
    print(f"steps a second, ahead / before: {ratio}")
    if arguments.save:
        save_json("vllm-sample-ahead", {"shape": SHAPE, "samples": samples, "ahead_over_before": ratio})


if __name__ == "__main__":
    main()
