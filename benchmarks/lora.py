"""LoRA from end to end on CPU: the quickstart's SFT, then GRPO with an adapter only, then the adapter in plain PEFT.

    python benchmarks/lora.py                                # SFT as in the quickstart, then GRPO with LoRA; minutes
    python benchmarks/lora.py --base runs/quickstart/sft/final   # from an SFT model that is there
    python benchmarks/lora.py --quantization 4bit --adapter-sft 300   # the base in NF4 (QLoRA), of the same SFT model
    python benchmarks/lora.py --save                         # also write benchmarks/baselines/lora-quickstart.json

Prints JSON: greedy accuracy before (base) and after on the held-out problems with intervals, seconds, trained parameters, and
whether the adapter folder gives the same greedy tokens in plain PEFT, and merged where the base is not quantised.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import save_json
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from algorist.extensions.problem_sets.arithmetic import word_problems
from algorist.extensions.quantization import keep_as_trained
from algorist.prompts import get_format
from algorist.prompts.chat import encode_prompt
from algorist.rollouts import SamplingParams, make_engine

GRPO = ["model.lora={rank: 16, alpha: 32}", "grpo.learning_rate=2e-3", "eval.baseline=true", "eval.samples=0"]


def algorist(folder: Path, *overrides: str) -> float:
    """Run the quickstart with overrides in ``folder``; return its seconds."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "algorist.cli.main", "run", "quickstart", *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return time.perf_counter() - began


def in_plain_transformers(base: Path, quantization: str | None) -> Any:
    """Load the base as a user of transformers would, quantised as ``model.quantization`` says."""
    if quantization is None:
        return AutoModelForCausalLM.from_pretrained(base)
    config = BitsAndBytesConfig(load_in_8bit=True)
    if quantization == "4bit":
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32)
    # On CPUs with bfloat16 units bitsandbytes fails for widths that are no multiple of 64.
    keep_as_trained(model)
    return model


def peft_agreement(
    base: Path, adapter: Path, quantization: str | None, prompts: int = 16, tokens: int = 80
) -> dict[str, Any]:
    """Compare greedy tokens of algorist's engine and of plain PEFT, and merged against unmerged logits."""
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    form = get_format("reasoning_answer", system_prompt="")
    problems = word_problems(prompts, seed=9, split="test")
    ids = [encode_prompt(form, tokenizer, p.question) for p in problems]
    model = PeftModel.from_pretrained(in_plain_transformers(base, quantization), adapter).eval()
    params = SamplingParams(temperature=0.0, max_new_tokens=tokens)
    ours = make_engine("auto", model, tokenizer).generate(ids, 1, params)
    equal = 0
    for prompt, group in zip(ids, ours, strict=True):
        out = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        equal += out[0, len(prompt) :].tolist() == group[0].token_ids
    found: dict[str, Any] = {"prompts": prompts, "equal_greedy_rows": equal}
    if quantization is None:
        probe = torch.tensor([ids[0]])
        with torch.no_grad():
            unmerged = model(probe).logits
            merged = model.merge_and_unload()(probe).logits
        found["merged_minus_unmerged_logits_max"] = float((merged - unmerged).abs().max())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, help="an SFT model of the quickstart")
    parser.add_argument("--quantization", choices=("4bit", "8bit"), help="keep the base so while GRPO trains")
    parser.add_argument("--sft-steps", type=int, default=1200)
    parser.add_argument(
        "--adapter-sft",
        type=int,
        default=0,
        help="SFT steps of the adapter before GRPO (NF4 costs a tiny base much)",
    )
    parser.add_argument("--grpo-steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, seconds = arguments.base, {}
        if base is None:
            sft = ["grpo.enabled=false", "eval.enabled=false", f"sft.max_steps={arguments.sft_steps}"]
            seconds["sft"] = algorist(folder, *sft, "run_name=sft", f"seed={arguments.seed}")
            base = folder / "runs/sft/sft/final"
        base = base.resolve()
        steps = f"grpo.max_steps={arguments.grpo_steps}"
        more = [f"model.name={base}", "run_name=lora", f"seed={arguments.seed}"]
        more += (
            [f"sft.max_steps={arguments.adapter_sft}", "sft.learning_rate=2e-3"]
            if arguments.adapter_sft
            else ["--only", "grpo"]
        )
        if arguments.quantization:
            more.append(f"model.quantization={arguments.quantization}")
        seconds["grpo_and_evaluation"] = algorist(folder, *GRPO, steps, *more)
        run = folder / "runs/lora"
        stages = [file.stem for file in sorted((run / "eval").glob("*.json"))]
        read = {s: json.loads((run / "eval" / f"{s}.json").read_text())["metrics"] for s in stages}
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        payload = {
            "quantization": arguments.quantization,
            "base_sft_steps": arguments.sft_steps if arguments.base is None else None,
            "settings": [*GRPO, steps, *more],
            "greedy_accuracy": {stage: metrics["greedy_accuracy"] for stage, metrics in read.items()},
            "points": 100
            * (read["grpo"]["greedy_accuracy"]["value"] - read["base"]["greedy_accuracy"]["value"]),
            "reward_correct": [row["rewards/correct/mean"] for row in lines if "rewards/correct/mean" in row],
            "seconds": seconds,
            "plain_peft": peft_agreement(base, run / "grpo/final", arguments.quantization),
        }
        print(json.dumps(payload, indent=2))
        if arguments.save:
            name = f"qlora-{arguments.quantization}" if arguments.quantization else "lora"
            print(save_json(f"{name}-quickstart", payload))


if __name__ == "__main__":
    main()
