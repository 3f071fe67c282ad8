"""``grpo.vllm``: what its two modes take, what is refused, and that every key reaches vLLM, a server, TRL or the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from algorist.config import load_recipe
from algorist.config.schema import GRPOSection
from algorist.config.vllm_sections import ColocatedVLLMSection, VLLMServerSection
from algorist.errors import ConfigError
from algorist.rollouts.engines import make_engine
from algorist.rollouts.vllm.engine import llm_arguments
from algorist.rollouts.vllm.server import VLLMServerEngine
from algorist.training.grpo_setup import objective_of, vllm_arguments
from tests.unit.rollout_models import build


def section(*settings: str) -> GRPOSection:
    return load_recipe("smoke-cpu", ["grpo.engine=vllm", *settings]).recipe.grpo


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("grpo.vllm.mode=sever", r"grpo\.vllm\.mode is 'sever'\. Did you mean 'server'\? Expected colocate or server"),
        ("grpo.vllm.gpu_memory=0.5", r"gpu_memory: unknown key\. Did you mean 'gpu_memory_utilization'\?"),
        ("grpo.vllm={mode: server, server_url: x}", r"server_url: unknown key\. Did you mean 'server_base_url'\?"),
        (
            "grpo.vllm={mode: server, max_num_seqs: 3}",
            r"max_num_seqs: a key of grpo\.vllm\.mode=colocate, not of server\. .*\"grpo\.vllm=\{mode: server\}\" replaces",
        ),
        ("grpo.vllm={mode: server, server_base_url: 'localhost:80'}", r"'localhost:80'; expected http://HOST:PORT"),
        ("grpo.vllm={integration: trl, max_num_seqs: 3}", r"max_num_seqs is a setting of grpo\.vllm\.integration=algorist"),
        ("grpo.vllm={mode: server, group_port: 3}", r"group_port is a setting of grpo\.vllm\.integration=trl"),
        ("grpo.vllm.gpu_memory_utilization=2", r"less than or equal to 1 \(got 2\)"),
        ("grpo.vllm=5", r"grpo\.vllm: .*dictionary.*\(got 5\)"),
        ("grpo.vllm.importance_sampling_mode=token_mas", r"Did you mean 'token_mask'\?"),
    ],
)  # fmt: skip
def test_what_a_mode_does_not_take_is_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("smoke-cpu", [setting])


def test_the_mode_decides_and_survives_the_runs_yaml(tmp_path: Path) -> None:
    from algorist.config.explain import to_yaml

    file = tmp_path / "again.yaml"
    for given, kind in (
        ("grpo.vllm={}", ColocatedVLLMSection),
        ("grpo.vllm={mode: server}", VLLMServerSection),
    ):
        recipe = load_recipe("smoke-cpu", [given]).recipe
        assert type(recipe.grpo.vllm) is kind
        file.write_text(to_yaml(recipe), encoding="utf-8")
        assert load_recipe(str(file)).recipe == recipe


COLOCATED = {
    "gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 123456, "max_model_length": 700, "max_num_seqs": 7, "max_num_batched_tokens": 900,
    "enable_sleep_mode": True, "enforce_eager": True, "model_impl": "transformers",
}  # fmt: skip


def test_colocated_settings_reach_vllm() -> None:
    plain = llm_arguments(ColocatedVLLMSection(), "cuda", torch.float32)
    assert plain["gpu_memory_utilization"] == 0.3 and not {"max_num_seqs", "enforce_eager"} & set(plain)
    found = llm_arguments(ColocatedVLLMSection(**COLOCATED), "cuda", torch.float32)  # type: ignore[arg-type]
    expected = {**COLOCATED, "max_model_len": COLOCATED["max_model_length"]}
    del expected["max_model_length"]
    assert expected.items() <= found.items()


def test_settings_of_a_server_reach_its_engine(tmp_path: Path) -> None:
    def engine(**given: Any) -> VLLMServerEngine:
        made = make_engine("vllm", build("qwen3"), vllm=VLLMServerSection(**given))
        assert isinstance(made, VLLMServerEngine)
        return made

    plain = engine()
    assert (plain.url, plain.sync_folder, plain._patience) == ("http://localhost:8000", None, 60.0)
    found = engine(server_host="gpu1", server_port=81, server_timeout=7, sync_folder=str(tmp_path))
    assert (found.url, found.sync_folder, found._patience) == ("http://gpu1:81", tmp_path, 7.0)
    assert engine(server_base_url="https://gpu2:9/v1/", server_host="gpu1").url == "https://gpu2:9"


def test_trl_gets_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    colocated = section(
        "grpo.vllm={integration: trl, mode: colocate, tensor_parallel_size: 2, max_model_length: 64}"
    )
    found = vllm_arguments(colocated)
    assert (found["vllm_mode"], found["vllm_tensor_parallel_size"], found["vllm_max_model_length"]) == (
        "colocate",
        2,
        64,
    )
    assert found["vllm_gpu_memory_utilization"] == 0.3 and "vllm_model_impl" not in found
    server = section(
        "grpo.vllm={integration: trl, mode: server, group_port: 77, importance_sampling_clip_max: null}"
    )
    found = vllm_arguments(server)
    assert (found["vllm_mode"], found["vllm_group_port"], found["vllm_importance_sampling_clip_max"]) == (
        "server",
        77,
        None,
    )
    assert not {"vllm_server_host", "vllm_server_timeout", "vllm_sync_folder"} & set(
        found
    )  # TRL's own defaults

    own = section("grpo.vllm.max_num_seqs=3")
    assert "vllm_max_num_seqs" not in vllm_arguments(own)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"max_num_seqs is a setting of algorist's own vLLM in one process"):
        vllm_arguments(own)


def test_the_correction_reaches_the_loss() -> None:
    assert objective_of(section()).correction == ("sequence_mask", None, 3.0)
    bounds = "importance_sampling_clip_min: 0.5, importance_sampling_clip_max: 2"
    given = section(f"grpo.vllm={{importance_sampling_mode: token_truncate, {bounds}}}")
    assert objective_of(given).correction == ("token_truncate", 0.5, 2.0)
    assert objective_of(section("grpo.vllm.importance_sampling_correction=false")).correction is None
    assert objective_of(load_recipe("smoke-cpu").recipe.grpo).correction is None
    with pytest.raises(ConfigError, match="vespo is not corrected"):
        objective_of(section("grpo.loss=vespo"))
