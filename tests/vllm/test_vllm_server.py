"""Our vLLM server mode over real HTTP: same tokens, same log-probs, fresh weights, learning, and what goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "vllm", reason="vLLM lives in an environment of its own: make test-vllm", exc_type=ImportError
)

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from algorist.config.schema import GRPOSection
from algorist.errors import EngineError
from algorist.extensions.vllm.section import VLLMServerSection
from algorist.extensions.vllm.server import VLLMServerEngine
from algorist.rollouts import SamplingParams, make_engine
from algorist.rollouts.native.engine import NativeEngine
from tests.unit.rollouts.rollout_models import fresh_log_probs, greedy_of_generate, prompts_of

from .servers import NOWHERE, OVER_TCP, Server, free_port, like, make_folders

pytestmark = pytest.mark.vllm

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
GAP = 1e-3
"""Stated bound of |vLLM − policy| log-prob per token in float32."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_folders(folder)
    return folder


@pytest.fixture(scope="module")
def server(folders: Path) -> Iterator[Server]:
    running = Server.start(folders / "random", "--max-model-len", "256", unseen=True)
    yield running
    running.kill()


def varied(folders: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folders / "varied", dtype=torch.float32)
    model.generation_config.eos_token_id = None  # nothing ends early
    return model


def engine_of(model: Any, server: Server, **more: Any) -> VLLMServerEngine:
    settings = {"server_base_url": server.url, "server_timeout": 1, **more}
    return VLLMServerEngine(model, settings=VLLMServerSection(**settings))


def tokens(groups: Any) -> list[list[list[int]]]:
    return [[c.token_ids for c in group] for group in groups]


def largest_gap(model: Any, prompts: list[list[int]], groups: Any, temperature: float = 1.0) -> float:
    return max(
        float(
            (torch.tensor(c.log_probs) - fresh_log_probs(model, prompt, c.token_ids, temperature)).abs().max()
        )
        for prompt, group in zip(prompts, groups, strict=True)
        for c in group
    )


def test_greedy_tokens_are_the_native_engines_and_weights_are_fresh(
    folders: Path, server: Server, tmp_path: Path
) -> None:
    model, prompts = varied(folders), prompts_of((5, 12, 9, 1, 200))  # the last one stays in the prefix cache
    settings = VLLMServerSection(server_base_url=server.url + "/v1", sync_folder=str(tmp_path))
    engine = make_engine("vllm", model, section=GRPOSection(vllm=settings.model_dump()))
    assert isinstance(engine, VLLMServerEngine)
    before, expected = engine.generate(prompts, 2, GREEDY), NativeEngine(model).generate(prompts, 2, GREEDY)
    assert tokens(before) == tokens(expected)
    assert len({t for group in expected for t in group[0].token_ids}) >= 15, "too plain to prove anything"
    assert largest_gap(model, prompts, before) <= GAP

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.tensor([prompts[1]]), labels=torch.tensor([prompts[1]])).loss.backward()
    optimizer.step()
    after = engine.generate(prompts, 2, GREEDY)
    assert tokens(after) == tokens(NativeEngine(model).generate(prompts, 2, GREEDY)) != tokens(before)
    assert largest_gap(model, prompts, after) <= GAP
    assert list(tmp_path.iterdir()) == []  # no weights are left behind


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_go_merged_and_the_policy_stays(dora: bool, folders: Path, server: Server) -> None:
    prompts = prompts_of()
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], use_dora=dora)
    adapted = get_peft_model(varied(folders), config)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    state = {name: p.clone() for name, p in adapted.named_parameters()}
    found = engine_of(adapted, server).generate(prompts, 1, GREEDY)
    assert tokens(found) == [[greedy_of_generate(adapted, p, 24)] for p in prompts]
    with adapted.disable_adapter():
        plain = engine_of(adapted, server).generate(prompts, 1, GREEDY)
    assert tokens(plain) == tokens(NativeEngine(varied(folders)).generate(prompts, 1, GREEDY))
    assert tokens(plain) != tokens(found)
    assert all(torch.equal(p, state[name]) for name, p in adapted.named_parameters())


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}, {"min_new_tokens": 4}],
    ids=["plain", "filtered", "least"],
)
def test_sampled_log_probs_and_seeds(filters: dict[str, Any], folders: Path, server: Server) -> None:
    model, prompts = varied(folders), prompts_of((5, 12, 9, 1, 200, 190, 180, 170))
    params = SamplingParams(temperature=0.7, max_new_tokens=16, seed=1, stop_token_ids=(3, 5, 8), **filters)
    groups = engine_of(model, server).generate(prompts, 6, params)
    assert largest_gap(model, prompts, groups, 0.7) <= GAP
    assert len({tuple(c.token_ids) for c in groups[1]}) == 6
    for completion in (c for group in groups for c in group):
        ended = completion.token_ids[-1] in (3, 5, 8)
        assert completion.finish_reason == ("stop" if ended else "length")
        assert len(completion.token_ids) >= params.min_new_tokens
        assert ended or len(completion.token_ids) == 16
    assert tokens(engine_of(model, server).generate(prompts, 6, params)) == tokens(groups)
    other = SamplingParams(temperature=0.7, max_new_tokens=16, seed=2, stop_token_ids=(3, 5, 8), **filters)
    assert tokens(engine_of(model, server).generate(prompts, 6, other)) != tokens(groups)


def test_sampled_frequencies_follow_the_model(folders: Path, server: Server) -> None:
    model, prompt = varied(folders), prompts_of((6,))[0]
    params = SamplingParams(temperature=0.8, max_new_tokens=1, seed=0)
    group = engine_of(model, server).generate([prompt], 2000, params)[0]
    with torch.no_grad():
        expected = (model(torch.tensor([prompt])).logits[0, -1] / 0.8).softmax(-1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in group]), minlength=len(expected)).float()
    # Five standard deviations of each count, and one for rounding.
    allowed = 5 * (2000 * expected * (1 - expected)).sqrt() + 1
    assert ((counts - 2000 * expected).abs() <= allowed).all()
    assert (counts > 0).sum() > 5


def test_what_goes_wrong_is_said(folders: Path, server: Server, tmp_path: Path) -> None:
    model, prompts = varied(folders), prompts_of()
    nobody = VLLMServerSection(server_host="127.0.0.1", server_port=free_port(), server_timeout=1)
    with pytest.raises(
        EngineError, match=r"no vLLM server answers at .* \(.*refused.*Start one: VLLM_SERVER"
    ):
        VLLMServerEngine(model, settings=nobody).generate(prompts, 1, GREEDY)
    with pytest.raises(EngineError, match=r"prompt 0 has 256 tokens, but vLLM holds 256.*--max-model-len"):
        engine_of(model, server).generate([[5] * 256], 1, GREEDY)
    with pytest.raises(EngineError, match="prompt 1 is empty"):
        engine_of(model, server).generate([[5], []], 1, GREEDY)
    broken = varied(folders)
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    with pytest.raises(EngineError, match="not finite numbers"):
        engine_of(broken, server).generate(prompts, 1, GREEDY)
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"cannot write weights.*set grpo.vllm.sync_folder"):
        engine_of(model, server, sync_folder=str(tmp_path / "file" / "below")).generate(prompts, 1, GREEDY)


def test_another_model_than_the_policy(
    folders: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, prompts = varied(folders).config, prompts_of()
    wide, flat = like(shape, hidden_size=128), like(shape, num_hidden_layers=1)
    with pytest.raises(EngineError, match=r"log-probs differ by [1-9].*it serves another model"):
        engine_of(flat, server).generate(prompts, 1, GREEDY)
    monkeypatch.chdir("/")  # from here the server's config can be read, and nothing is sent
    sent = server.syncs
    with pytest.raises(EngineError, match=r"another model than the policy.*hidden_size 64 instead of 128\."):
        engine_of(wide, server).generate(prompts, 1, GREEDY)
    with pytest.raises(EngineError, match=r"num_hidden_layers 2 instead of 1\. Start it with the model"):
        engine_of(flat, server).generate(prompts, 1, GREEDY)
    assert server.syncs == sent


def test_a_folder_that_the_server_does_not_see(
    folders: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = varied(folders), prompts_of()
    monkeypatch.chdir(tmp_path)
    unseen = f"{NOWHERE}/weights"
    with pytest.raises(
        EngineError, match=r"could not load the weights.*must see the same folder.*sync_folder"
    ):
        engine_of(model, server, sync_folder=unseen).generate(prompts, 1, GREEDY)
    groups = engine_of(model, server).generate(prompts, 1, GREEDY)  # the server has survived it
    assert tokens(groups) == tokens(NativeEngine(model).generate(prompts, 1, GREEDY))


# ---- runs -----------------------------------------------------------------------------------------------------

DIGITS = """
def digits(completions, **_):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
"""


def start_run(
    folder: Path,
    model: Path,
    server: Server,
    *more: str,
    launch: tuple[str, ...] = ("run",),
    skip: tuple[str, ...] = ("--only", "grpo"),
) -> Any:
    (folder / "own.py").write_text(DIGITS)
    arguments = [
        f"model.name={model}",
        "rewards=[{name: 'own.py:digits'}]",
        "grpo={batch_size: 32, group_size: 8, max_completion_tokens: 24, learning_rate: 1e-2, engine: vllm}",
        f"grpo.vllm={{mode: server, server_base_url: '{server.url}', server_timeout: 5}}",
        "eval.samples=0",
        "run_name=r",
        *more,
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "algorist.cli.main", *launch, "smoke-cpu", *arguments, *skip],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
    )


def finish(process: Any, code: int = 0) -> str:
    output = str(process.communicate(timeout=400)[0])
    assert process.returncode == code, output
    return output


def rows_of(folder: Path) -> list[dict[str, float]]:
    path = folder / "runs/r/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [row for row in (json.loads(line) for line in lines if line.endswith("\n")) if "reward" in row]


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_grpo_run_learns(adapter: bool, folders: Path, server: Server, tmp_path: Path) -> None:
    lora = ["model.lora={rank: 16, target_modules: all-linear}", "grpo.learning_rate=3e-3"] if adapter else []
    model = folders / (
        "varied" if adapter else "random"
    )  # an adapter moves the nearly equal outputs of "random" slowly
    finish(start_run(tmp_path, model, server, "grpo.max_steps=16", *lora))
    rows = rows_of(tmp_path)
    rewards = [row["reward"] for row in rows]
    assert len(rewards) == 16
    assert sum(rewards[-4:]) > (2 if adapter else 4) * sum(rewards[:4]), rewards
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) <= GAP
    assert all(abs(row["sampling/importance_sampling_ratio/mean"] - 1) <= GAP for row in rows)


def test_the_next_batch_is_sampled_during_the_update(folders: Path, server: Server, tmp_path: Path) -> None:
    before = server.syncs
    finish(
        start_run(
            tmp_path,
            folders / "varied",
            server,
            "grpo.max_steps=6",
            "grpo.sample_ahead=true",
            "eval.enabled=false",
        )
    )
    gaps = [row["sampling/sampling_logp_difference/max"] for row in rows_of(tmp_path)]
    assert len(gaps) == 6 and server.syncs - before == 6
    assert gaps[0] <= GAP and min(gaps[1:]) > 10 * GAP, (
        gaps
    )  # the policy before the update sampled the others


def test_evaluations_of_sft_are_sampled_by_the_server(folders: Path, server: Server, tmp_path: Path) -> None:
    asked, synced = server.asked, server.syncs
    stage = ["sft={max_steps: 2, eval_every: 1, batch_size: 4}", "grpo.enabled=false"]
    finish(start_run(tmp_path, folders / "varied", server, *stage, skip=()))
    found = sorted(p.stem for p in (tmp_path / "runs/r/eval").glob("sft*.json"))
    assert found == ["sft", "sft-step-1"]
    assert (
        server.asked > asked and server.syncs >= synced + 2
    )  # its weights are new after step 1 and at the end


@pytest.mark.parametrize("launched", [(), ("--launch", "fsdp2")], ids=["ddp", "fsdp2"])
def test_of_two_processes_one_sends_the_weights(
    folders: Path, server: Server, tmp_path: Path, launched: tuple[str, ...]
) -> None:
    before = server.syncs
    small = ["grpo.max_steps=4", "grpo.batch_size=16", "eval.enabled=false"]
    launch = ("run", "-n", "2", *launched)
    finish(start_run(tmp_path, folders / "random", server, *small, launch=launch))
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) <= GAP
    assert server.syncs - before == 4


def test_the_server_dies_and_the_run_continues_with_another(folders: Path, tmp_path: Path) -> None:
    settings = ["grpo.max_steps=12", "grpo.save_steps=2"]
    first = Server.start(folders / "random")
    try:
        run = start_run(tmp_path, folders / "random", first, *settings)
        until = time.monotonic() + 200
        while len(rows_of(tmp_path)) < 4 and run.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        first.kill()
    output = finish(run, 2)
    assert "stopped answering" in output and "--resume" in output and "Traceback" not in output, output
    seen = len(rows_of(tmp_path))
    assert 4 <= seen < 12
    second = Server.start(folders / "random", port=first.port)
    try:
        finish(start_run(tmp_path, folders / "random", second, *settings, "--resume"))
    finally:
        second.kill()
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) <= GAP


# ---- weights over NCCL: vLLM's own engines on both sides, with their store in NCCL's place (``over_tcp``)


def test_weights_over_nccl(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run learns, each rollout batch has the weights of now, an adapter goes merged; no folder is written."""
    server = Server.start(folders / "random", "--max-model-len", "256", over_tcp=True)
    monkeypatch.setenv("PYTHONPATH", str(OVER_TCP))
    try:
        with pytest.raises(EngineError, match=r"torch has no NCCL here\); start it on GPUs of its own"):
            engine_of(varied(folders), server, weight_transfer="nccl").generate(prompts_of(), 1, GREEDY)
        for name, more in (
            ("full", ["grpo.max_steps=16"]),
            ("lora", ["grpo.max_steps=4", "model.lora={rank: 16, target_modules: all-linear}"]),
        ):
            (tmp_path / name).mkdir()
            more += [
                "grpo.vllm.weight_transfer=nccl",
                f"plugins=[{OVER_TCP / 'trainer.py'}]",
                "eval.enabled=false",
            ]
            start = folders / ("random" if name == "full" else "varied")
            finish(start_run(tmp_path / name, start, server, *more))
            rows = rows_of(tmp_path / name)
            if name == "full":
                rewards = [row["reward"] for row in rows]
                assert sum(rewards[-4:]) > 4 * sum(rewards[:4]), rewards
            assert max(row["sampling/sampling_logp_difference/max"] for row in rows) <= GAP
        assert server.syncs == 0 and server.log.read_text().count("POST /finish_weight_update") == 20
    finally:
        server.kill()


def test_a_server_that_takes_no_weights_over_nccl(folders: Path, server: Server) -> None:
    engine = engine_of(varied(folders), server, weight_transfer="nccl")
    with pytest.raises(
        EngineError, match=r"takes no weights over NCCL; start it .*--weight-transfer-config .*=folder"
    ):
        engine.generate(prompts_of(), 1, GREEDY)
