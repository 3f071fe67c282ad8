"""``grpo.vllm``: what its two modes take, what is refused, and that every key reaches vLLM, a server or the loss."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algorist.config import load_recipe
from algorist.config.schema import GRPOSection
from algorist.errors import ConfigError, MissingExtraError
from algorist.extensions.vllm.engine import _Running, llm_arguments
from algorist.extensions.vllm.section import ColocatedVLLMSection, VLLMServerSection
from algorist.extensions.vllm.server import VLLMServerEngine
from algorist.extensions.weights import Weights
from algorist.rollouts.engines import make_engine
from algorist.runs.draft import Draft
from algorist.runs.pipeline import run_recipe
from algorist.runs.plan import Plan, make_plan
from algorist.store.read import metrics
from algorist.training.batch import Batch
from tests.unit.rollouts.rollout_models import build

ENGINE = """
from algorist.rollouts.engines import engine
from algorist.rollouts.transformers import TransformersEngine

class Mine(TransformersEngine):
    name = "mine"

@engine("mine", exact=False)
def mine(model, tokenizer, settings):
    assert settings.section.group_size == 4
    return Mine(model, tokenizer)
"""


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
        ("grpo.vllm.tensor_parallel_size=2", r"Here it is grpo\.vllm=\{mode: server\}"),
        ("grpo.vllm.gpu_memory_utilization=2", r"less than or equal to 1 \(got 2\)"),
        ("grpo.vllm=5", r"grpo\.vllm: .*dictionary.*\(got 5\)"),
        ("grpo.sampler_correction.mode=token_mas", r"Did you mean 'token_mask'\?"),
        ("grpo.vllm.importance_sampling_mode=token_mask", r"Here it is grpo\.sampler_correction\.mode"),
        ("grpo.vllm_importance_sampling_correction=false", r"Here it is grpo\.sampler_correction=null"),
    ],
)  # fmt: skip
def test_what_a_mode_does_not_take_is_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("smoke-cpu", [setting])


def test_the_mode_decides_and_survives_the_runs_yaml(tmp_path: Path) -> None:
    from algorist.config.yaml_text import to_yaml

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
        made = make_engine("vllm", build("qwen3"), section=GRPOSection(vllm={"mode": "server", **given}))
        assert isinstance(made, VLLMServerEngine)
        return made

    plain = engine()
    assert (plain.url, plain.sync_folder, plain._patience) == ("http://localhost:8000", None, 60.0)
    assert engine(weight_transfer="nccl")._over_nccl and not plain._over_nccl
    found = engine(server_host="gpu1", server_port=81, server_timeout=7, sync_folder=str(tmp_path))
    assert (found.url, found.sync_folder, found._patience) == ("http://gpu1:81", tmp_path, 7.0)
    assert engine(server_base_url="https://gpu2:9/v1/", server_host="gpu1").url == "https://gpu2:9"


def test_a_vllm_asleep_has_its_weights_before_its_cache() -> None:
    """It sleeps on CUDA only, so what it is asked for is written down here; woken whole, weights and cache would meet at the peak."""
    asked: list[str] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, tags=(), **__: asked.append(" ".join((name, *tags)))

    running = _Running.__new__(_Running)
    running.llm, running._sleeps, running._asleep = Recorder(), True, False
    rollout = ["collective_rpc", "reset_prefix_cache"]
    running.load(iter(()))
    running.sleep()
    running.load(iter(()))
    woken = ["wake_up weights", rollout[0], "wake_up kv_cache", rollout[1]]
    assert asked == [*rollout, "sleep", *woken] and not running._asleep


def test_the_share_of_tokens_that_a_correction_masks_is_counted() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    batch = replace(batch_of_zeros(mask), old_log_probs=torch.tensor([[0.0, 2.0, 0.0], [0.0, 9.0, 9.0]]))
    recipe = load_recipe("smoke-cpu", ["grpo.sampler_correction={mode: token_mask, high: 3}"]).recipe
    correction = Weights(recipe)
    noted: list[Any] = []
    correction.needs_old_log_probs = True
    correction.batch(batch, SimpleNamespace(note=noted.append))  # type: ignore[arg-type]
    assert noted[0].values()["sampling/masked_share"] == 0.25  # one ratio of e² in four tokens


def batch_of_zeros(mask: torch.Tensor) -> Batch:
    rows = [[1] * mask.shape[1]] * len(mask)
    return Batch([[1]], rows, [0] * len(mask), torch.zeros(mask.shape), mask, torch.zeros(mask.shape))


def planned(folder: Path, *settings: str) -> Plan:
    return make_plan(
        Draft.of(load_recipe("smoke-cpu", ["grpo.engine=vllm", f"output_dir={folder}", *settings]).recipe)
    )


def test_what_vllm_cannot_do_is_refused_with_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("vllm") is None:  # before the models are loaded, not after SFT
        with pytest.raises(MissingExtraError, match="the engine is vllm, which is not installed"):
            planned(tmp_path)
        (tmp_path / "vllm.py").touch()  # a plan looks no further
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"vespo is not corrected.*sampler_correction=null"):
        planned(tmp_path, "grpo.loss=vespo")
    plan = planned(tmp_path, "grpo.loss=vespo", "grpo.sampler_correction=null")
    assert plan.recipe.grpo.sampler_correction is None
    two = replace(plan, processes=replace(plan.processes, count=2))
    with pytest.raises(ConfigError, match=r"serves one process, and the run has 2; start a server"):
        plan.extensions.check(two)
    plan = planned(tmp_path, "grpo.engine=native", "eval.engine=vllm")  # it would wait for ever
    with pytest.raises(ConfigError, match=r"eval.engine is vllm in the training process"):
        plan.extensions.check(replace(plan, processes=two.processes))
    server = planned(tmp_path, "grpo.vllm={mode: server}")
    server.extensions.check(replace(server, processes=two.processes))


@pytest.mark.slow
def test_an_engine_of_a_users_file(tmp_path: Path) -> None:
    """A plug-in registers an engine, a run samples with it, and its log-probs are corrected for where it says so."""
    (tmp_path / "mine.py").write_text(ENGINE)
    plain = (
        "device=cpu",
        "threads=1",
        f"output_dir={tmp_path}",
        f"plugins=[{tmp_path}/mine.py]",
        "eval.enabled=false",
    )
    recipe = load_recipe("smoke-cpu", [*plain, "grpo.engine=mine", "grpo.max_steps=1"]).recipe
    run_recipe(recipe)
    (line,) = metrics(tmp_path / "smoke-cpu", "grpo")
    assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
    assert line["sampling/sampling_logp_difference/max"] < 1e-4 and line["sampling/masked_share"] == 0
    with pytest.raises(ConfigError, match=r"unknown rollout engine 'mined'\. Did you mean 'mine'"):
        make_plan(Draft.of(load_recipe("smoke-cpu", [*plain, "eval.engine=mined", "run_name=b"]).recipe))
