"""GRPO that trains an adapter only: it learns, and its folder is a plain PEFT adapter with the same greedy answers.

The full size, the quickstart with an adapter, is ``benchmarks/lora.py``. Here the task is the quickstart's slip alone: a
careless annotator writes "3 bags of 4" as 3 + 4 in most demonstrations, and the reward turns that into a product.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from algorist.prompts import get_format
from algorist.prompts.chat import encode_prompt
from algorist.rollouts import SamplingParams, make_engine
from tests.conftest import Cli

NAMES = ["Tom", "Mia", "Ben", "Ana", "Leo", "Eva"]
BOXES = ["bags", "boxes", "packs", "jars"]
FACTORS = range(2, 6)


def write_rows(path: Path, *, held_out: bool = False, careless: bool = False) -> Path:
    """Write problems; a third of the pairs (name, box) is held out. Careless: three of four demonstrations add."""
    rows = []
    for i, name in enumerate(NAMES):
        for j, box in enumerate(BOXES):
            if ((i + j) % 3 == 0) != held_out:
                continue
            for k in FACTORS:
                for n in FACTORS:
                    slip = careless and (i + j + k + n) % 4 > 0
                    value = k + n if slip else k * n
                    rows.append(
                        {
                            "question": f"{name} has {k} {box} of {n}.",
                            "solution": f"{k} {'+' if slip else '*'} {n} = {value}",
                            "answer": str(value),
                        }
                    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def local(path: Path) -> str:
    return f"{{name: local, path: '{path}', params: {{}}, split: train}}"


def accuracy(run: Path, name: str) -> float:
    return json.loads((run / "eval" / f"{name}.json").read_text())["metrics"]["greedy_accuracy"]["value"]


@pytest.mark.long
@pytest.mark.slow
def test_grpo_with_an_adapter_learns_and_plain_peft_agrees(cli: Cli, tmp_path: Path) -> None:
    shown = write_rows(tmp_path / "shown.jsonl", careless=True)
    true = write_rows(tmp_path / "true.jsonl")
    held_out = write_rows(tmp_path / "held_out.jsonl", held_out=True)
    common = [
        f"data.train={local(true)}",
        f"data.sft={local(shown)}",
        f"data.eval={local(held_out)}",
        "model.tiny={vocab_size: 400, hidden_size: 64, layers: 2, heads: 2, kv_heads: 1}",
        "eval={samples: 0, batch_size: 128}",
        "grpo={max_completion_tokens: 32, batch_size: 128, group_size: 8, loss: dr_grpo, advantage: group_centered}",
    ]
    sft = cli(
        "run", "quickstart", *common, "sft.max_steps=200", "grpo.enabled=false", "run_name=base", timeout=600
    )
    assert sft.returncode == 0, sft.stdout + sft.stderr
    base = tmp_path / "runs/base/sft/final"
    grpo = cli(
        "run",
        "quickstart",
        *common,
        f"model.name={base}",
        "model.lora={rank: 16}",
        "grpo.max_steps=20",
        "grpo.learning_rate=3e-3",
        "--only",
        "grpo",
        "run_name=lora",
        timeout=600,
    )
    assert grpo.returncode == 0, grpo.stdout + grpo.stderr
    before, after = accuracy(tmp_path / "runs/base", "sft"), accuracy(tmp_path / "runs/lora", "grpo")
    assert after >= before + 0.10, (before, after)

    adapter = tmp_path / "runs/lora/grpo/final"
    assert (adapter / "adapter_model.safetensors").is_file() and not (adapter / "model.safetensors").exists()
    assert_plain_peft_agrees(base, adapter, held_out)


def assert_plain_peft_agrees(base: Path, adapter: Path, problems: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    questions = [json.loads(line)["question"] for line in problems.read_text().splitlines()[::8]]
    form = get_format("reasoning_answer", system_prompt="")
    prompts = [encode_prompt(form, tokenizer, question) for question in questions]
    plain = AutoModelForCausalLM.from_pretrained(base)
    params = SamplingParams(temperature=0.0, max_new_tokens=32)
    without = make_engine("native", plain, tokenizer).generate(prompts, 1, params)
    model = PeftModel.from_pretrained(plain, adapter).eval()
    ours = make_engine("native", model, tokenizer).generate(prompts, 1, params)
    assert [g[0].token_ids for g in ours] != [g[0].token_ids for g in without]  # the adapter matters
    for prompt, group in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False
        )
        assert found[0, len(prompt) :].tolist() == group[0].token_ids
    probe = torch.tensor([prompts[0] + ours[0][0].token_ids])
    with torch.no_grad():
        unmerged = model(probe).logits
        merged_model = model.merge_and_unload()
        torch.testing.assert_close(merged_model(probe).logits, unmerged, atol=1e-4, rtol=0)
    merged = make_engine("native", merged_model, tokenizer).generate(prompts, 1, params)
    assert [g[0].token_ids for g in merged] == [g[0].token_ids for g in ours]
