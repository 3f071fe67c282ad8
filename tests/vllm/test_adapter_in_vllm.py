"""An adapter that algorist trained and saved, opened by plain PEFT and by vLLM itself: the same greedy answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "vllm", reason="vLLM lives in an environment of its own: make test-vllm", exc_type=ImportError
)

from peft import PeftModel
from transformers import AutoModelForCausalLM

from algorist.errors import EngineError
from algorist.extensions.vllm.section import VLLMServerSection
from algorist.extensions.vllm.server import VLLMServerEngine
from algorist.rollouts import SamplingParams, make_engine
from tests.unit.rollouts.rollout_models import prompts_of

from .servers import Server, make_folders

pytestmark = pytest.mark.vllm

NEW_TOKENS = 24


def train(folder: Path, name: str, *overrides: str) -> Path:
    """Run a few steps of SFT with an adapter; return its folder."""
    arguments = [
        f"model.name={folder / 'varied'}",
        "sft={max_steps: 8, batch_size: 8, learning_rate: 5e-3}",
        "grpo.enabled=false",
        "eval.enabled=false",
        f"run_name={name}",
        *overrides,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "algorist.cli.main", "run", "smoke-cpu", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / name / "sft/final"


def greedy_over_http(server: Server, model: str, prompt: list[int]) -> list[int]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


def test_the_adapter_folder_answers_alike_in_peft_and_in_vllm(tmp_path: Path) -> None:
    make_folders(tmp_path)
    adapters = {
        "lora": train(tmp_path, "lora", "model.lora={rank: 8, alpha: 16}"),
        "rslora": train(
            tmp_path, "rslora", "model.lora={rank: 16, rslora: true, target_modules: all-linear}"
        ),
    }
    prompts, params = prompts_of(), SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS)
    modules = [f"{name}={folder}" for name, folder in adapters.items()]
    server = Server.start(
        tmp_path / "varied",
        *(
            "--served-model-name",
            "base",
            "--enable-lora",
            "--max-lora-rank",
            "16",
            "--lora-modules",
            *modules,
        ),
        dev_mode=False,
    )
    try:
        answers = {
            name: [greedy_over_http(server, name, prompt) for prompt in prompts]
            for name in ("base", *adapters)
        }
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "varied", dtype=torch.float32)
        plain.generation_config.eos_token_id = None
        with pytest.raises(EngineError, match=r"no development endpoints.*VLLM_SERVER_DEV_MODE=1"):
            VLLMServerEngine(plain, settings=VLLMServerSection(server_base_url=server.url)).generate(
                prompts, 1, params
            )
    finally:
        server.kill()

    for name, folder in adapters.items():
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "varied", dtype=torch.float32), folder
        )
        model.generation_config.eos_token_id = None
        model.eval()
        for prompt, answer in zip(prompts, answers[name], strict=True):
            ids = torch.tensor([prompt])
            found = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
            )
            assert found[0, len(prompt) :].tolist() == answer, name
        ours = make_engine("native", model).generate(prompts, 1, params)
        assert [g[0].token_ids for g in ours] == answers[name]
        assert len({t for answer in answers[name] for t in answer}) >= 15, "too plain to prove anything"
    found = make_engine("native", plain).generate(prompts, 1, params)
    assert [g[0].token_ids for g in found] == answers["base"]
    assert all(x != y for name in adapters for x, y in zip(answers[name], answers["base"], strict=True)), (
        "the adapters do nothing"
    )
    assert answers["lora"] != answers["rslora"]
