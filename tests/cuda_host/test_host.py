"""What the host asks of a card: launches, waits, captures and memory, by torch's own allocator; no kernel runs."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as hf
from torch.nn.parallel import DistributedDataParallel

from algorist.config import load_recipe
from algorist.config.section import ModelSection
from algorist.extensions.liger import fuse
from algorist.models.load import make_policy
from algorist.models.precision import set_compute
from algorist.preflight.memory_advice import plan_from_config
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native import graph_tier
from algorist.rollouts.native.engine import NativeEngine
from algorist.store.stages import Stage
from algorist.training import sft, step
from algorist.training.batch import Batch
from algorist.training.distributed import without_buckets
from algorist.training.log_probs import LogProbs, packed_log_probs
from algorist.training.part_size import saved_bytes
from tests.cuda_host.memory import MODELS, WITHIN, config_of, measure, teachers
from tests.cuda_host.stub import Stub, model, rows_end_at_their_length
from tests.cuda_host.written import written

GRAPHS = pytest.mark.skipif("int(__import__('os').environ['STUB_CC']) < 80", reason="graphs from 8.0")
PROMPTS = [[5] * 200] * 4


@pytest.fixture(autouse=True)
def rows_end() -> Iterator[None]:
    with rows_end_at_their_length():
        yield
    gc.collect()
    torch.cuda.empty_cache()


def sample(engine: NativeEngine, stub: Stub, tokens: int = 24, **changes: Any) -> dict[str, int]:
    stub.reset()
    found = engine.generate(PROMPTS, 16, SamplingParams(max_new_tokens=tokens, seed=0, **changes))
    assert [len(group) for group in found] == [16] * 4
    return {n: stub.get(n) for n in ("captured", "replays", "launches", "syncs", "violations")}


def pools() -> set[tuple[int, ...]]:
    """Return the allocator's pools; torch 2.11 leaves cuBLAS's workspace in that of the first capture."""
    return {tuple(part["segment_pool_id"]) for part in torch.cuda.memory_snapshot()} | {(0, 0)}


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "top-p": {"top_p": 0.9},
    "top-p, shortest": {"top_p": 0.9, "temperature": 0.7, "min_new_tokens": 3},
    "top-k, min-p": {"top_k": 20, "min_p": 0.1},
}


@GRAPHS
@pytest.mark.parametrize("way", WAYS)
def test_a_step_may_be_captured(way: str, stub: Stub) -> None:
    """No wait, no allocation past the allocator, no query. After an update in place nothing is captured again, after moved weights all."""
    policy = model("0.5B", layers=2).eval()
    engine = NativeEngine(policy, lambda ids: " ".join(map(str, ids)))
    first = sample(engine, stub, **WAYS[way])
    assert first["captured"] > 25 and first["violations"] == 0, stub.names("violation")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1)
    second = sample(engine, stub, **WAYS[way])
    assert second["captured"] == 0 and second["replays"] == 23 and second["violations"] == 0
    policy.model.norm.weight.data = policy.model.norm.weight.data.clone()
    assert sample(engine, stub, **WAYS[way])["captured"] == first["captured"]


@GRAPHS
def test_how_a_step_is_captured(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one direct run, beside a thread that asks for memory meanwhile, into one pool for all sizes; a look is waited for."""
    body, read = graph_tier._Body.__call__, graph_tier._Look.read

    def beside_another_thread(step: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            other = threading.Thread(target=lambda: torch.empty(1 << 28, dtype=torch.uint8, device="cuda"))
            other.start()
            other.join()
        body(step)

    def arrived(look: Any) -> list[list[int]]:
        # The stub's own looks have none.
        assert look.arrived is None or look.arrived.cuda_event, (
            "the copy was not recorded, nobody would wait for it"
        )
        return read(look)

    monkeypatch.setattr(graph_tier._Body, "__call__", beside_another_thread)
    monkeypatch.setattr(graph_tier._Look, "read", arrived)
    before, engine = pools(), NativeEngine(model("0.5B", layers=1).eval())
    found = sample(engine, stub)
    assert found["violations"] == 0 and found["replays"] == 22
    engine.generate(PROMPTS[:2], 16, SamplingParams(max_new_tokens=24, seed=0))  # in a smaller graph
    assert len(engine._graph._steps) == 2 and len(pools() - before) == 1  # type: ignore[union-attr]


@GRAPHS
@pytest.mark.parametrize(
    ("kind", "per_layer", "beside"), [("bfloat16", 12, 5), ("float32 masters", 14, 6), ("adapter", 21, 5)]
)
def test_nodes_of_a_captured_step(kind: str, per_layer: int, beside: int, stub: Stub) -> None:
    """0.5B, 24 layers: 293 nodes in bfloat16, 509 with an adapter; each takes the card about 2 µs, however little it computes."""
    nodes = []
    for layers in (2, 4):
        policy: Any = model("0.5B", torch.float32 if "float32" in kind else torch.bfloat16, layers).eval()
        if "float32" in kind:
            set_compute(policy, torch.bfloat16)
        if kind == "adapter":
            from peft import LoraConfig, get_peft_model

            policy = get_peft_model(policy, LoraConfig(r=16, target_modules="all-linear"))
        nodes.append(sample(NativeEngine(policy), stub)["captured"])
    assert (nodes[1] - nodes[0]) / 2 <= per_layer
    assert nodes[0] - (nodes[1] - nodes[0]) <= beside


@GRAPHS
def test_a_wait_inside_a_step_is_noticed_and_survived(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = graph_tier.sample
    monkeypatch.setattr(
        graph_tier, "sample", lambda *given, may_wait, **more: real(*given, may_wait=True, **more)
    )
    policy = model("0.5B", layers=1).eval()
    found = sample(NativeEngine(policy), stub, top_p=0.9)
    assert found["violations"] > 0 and found["replays"] == 0
    assert "no CUDA graph, decoding without" in caplog.text
    torch.rand(4, device="cuda")  # generator and allocator are as before
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    torch.empty(free + (1 << 29), dtype=torch.uint8, device="cuda")  # what was cached is given up for it
    monkeypatch.undo()
    with rows_end_at_their_length():
        assert sample(NativeEngine(policy), stub, top_p=0.9)["replays"] == 22


@GRAPHS
def test_the_cache_of_the_graphs_takes_what_is_free(stub: Stub) -> None:
    """It is set aside once and does not double: 64 rows in one wave, where a quarter of the memory would hold 16."""
    engine = NativeEngine(model("0.5B").eval())
    torch.cuda.empty_cache()
    room = 64 * 1100 * 2 * 24 * 2 * 64 * 2 / 0.7
    taken = torch.empty(torch.cuda.mem_get_info()[0] - int(room), dtype=torch.uint8, device="cuda")
    try:
        assert sample(engine, stub, 1000)["replays"] < 1000
    finally:
        del taken


def test_no_plan_per_shape_in_a_models_attention() -> None:
    """On an H100 torch prefers cuDNN's attention, which plans anew for each batch's shape."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    make_policy(ModelSection(name="tiny"), device=torch.device("cuda"), seed=0, texts=["1 + 1 = 2"] * 9)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_ddp_holds_no_second_copy_of_the_gradients() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layer = torch.nn.Sequential(torch.nn.Linear(4096, 4096)).cuda()
        before = torch.cuda.memory_allocated()
        with without_buckets(layer):
            made = DistributedDataParallel(layer, device_ids=[0])
        assert torch.cuda.memory_allocated() - before < 1e6
        assert not hasattr(layer, "_ddp_params_and_buffers_to_ignore"), "SFT is averaged by DDP itself"
        made.module(torch.zeros(2, 4096, device="cuda")).sum().backward()
        assert all(p.grad is not None for p in layer.parameters())
    finally:
        torch.distributed.destroy_process_group()


@GRAPHS
@pytest.mark.parametrize(
    ("kind", "fused", "most"),
    [("all weights", False, 135), ("adapter", False, 110), ("all weights", True, 84), ("adapter", True, 58)],
)
def test_new_tensors_of_an_update(kind: str, fused: bool, most: float) -> None:
    """Two layers of 1.5B, 68,576 tokens: an adapter adds in place, its input is not cast to float32 and back (150 GB)."""
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("one part of so many tokens is for a larger card")
    assert written(kind, layers=2, fused=fused)[0] < most


def launches_of_a_step(stage: Stage, rows: int, accumulation: int, stub: Stub) -> int:
    """Launches of the last of two updates of 0.5B with two layers."""
    recipe = "gsm8k-qwen2.5-0.5b" if stage == "grpo" else "sft-grpo-dapo"
    changes = [
        "model.name=Qwen/Qwen2.5-0.5B", f"{stage}.optim=adamw_torch", f"{stage}.batch_size={rows}",
        f"{stage}.gradient_accumulation_steps={accumulation}", "data.train.max_prompt_tokens=100",
        "grpo.max_completion_tokens=256", "sft.max_length=256",
    ]  # fmt: skip
    real, counts = step.update, [0]

    def update(*given: Any) -> Any:
        before = stub.get("launches")
        loss = real(*given)
        counts.append(stub.get("launches") - before)
        return loss

    kind, sizes, more = MODELS["Qwen/Qwen2.5-0.5B"]
    with (
        patch.dict(MODELS, {"Qwen/Qwen2.5-0.5B": (kind, (2, *sizes[1:]), more)}),
        patch.object(sft if stage == "sft" else step, "update", update),
    ):
        measure(recipe, *changes, stage=stage, steps=2)
    return counts[-1]


@pytest.mark.skipif("int(__import__('os').environ['STUB_CARD_GB']) < 40", reason="one part of 64 rows")
@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_parts_are_what_fits(stage: Stage, stub: Stub) -> None:
    """``batch_size`` × ``gradient_accumulation_steps`` says what a step learns from, not how it is computed."""
    assert 0 < launches_of_a_step(stage, 8, 8, stub) <= 1.1 * launches_of_a_step(stage, 64, 1, stub)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_ligers_kernels_start_on_every_card(dtype: torch.dtype, stub: Stub) -> None:
    """As Triton's compiler makes them for it; the numbers are in tests/unit/extensions/test_liger.py."""
    policy = model("0.5B", dtype, layers=1)
    undo = fuse(policy)
    try:
        mask = torch.ones(1, 9, dtype=torch.bool, device="cuda")
        batch = Batch([[1] * 9], [[1] * 9], [0], torch.zeros(1, device="cuda"), mask)
        packed_log_probs(policy, batch)[0].sum().backward()
    finally:
        undo()
    kernels = " ".join(stub.names("outside"))
    for name in ("rms_norm_forward", "rms_norm_backward", "swiglu_forward", "swiglu_backward", "triton_rope"):
        assert name in kernels, name


def test_counting_tokens_leaves_the_cards_memory_as_it_was(capability: int) -> None:
    policy = model("0.5B", torch.float32, layers=1).train()
    kind = torch.bfloat16 if capability >= 80 else torch.float16
    mask = torch.ones(1, 48, dtype=torch.bool, device="cuda")
    batch = Batch([[1] * 48], [[1] * 48], [0], torch.zeros(1, device="cuda"), mask)

    def count() -> int:
        with torch.autocast("cuda", kind, cache_enabled=False):
            return saved_bytes(lambda: packed_log_probs(policy, batch)[0].sum(), policy)

    count()
    before = torch.cuda.memory_allocated()
    assert count() > 1e7 and torch.cuda.memory_allocated() == before


def test_a_pass_that_fails_leaves_nothing_on_the_card() -> None:
    """Also where the layers' inputs wait in the host's memory: nothing but Python's collector is needed."""
    config = hf.LlamaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    policy = hf.LlamaForCausalLM(config).cuda().train()
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    mask = torch.ones(1, 9, dtype=torch.bool, device="cuda")
    batch = Batch([[1] * 9], [[1] * 9], [0], torch.zeros(1, device="cuda"), mask)
    passes = LogProbs(verify=False)
    assert passes.spare_memory(policy, 18)
    passes(policy, batch)  # and its result is forgotten, as by an error in the loss
    gc.collect()
    before = torch.cuda.memory_allocated()
    passes(policy, batch)
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    passes(policy, batch)[0].sum().backward()  # for which the inputs come back


@GRAPHS
def test_rollouts_halve_where_the_card_is_full(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    """The driver's own error, in the real allocator, and memory that is free again for the next attempt."""
    policy = model("0.5B", layers=2).eval()
    engine = NativeEngine(policy, token_budget=64 * 3000)
    room = 64 * 1400 * 2 * 2 * 2 * 64 * 2
    torch.cuda.empty_cache()
    taken = torch.empty(torch.cuda.mem_get_info()[0] - room, dtype=torch.uint8, device="cuda")
    try:
        found = engine.generate(PROMPTS, 16, SamplingParams(max_new_tokens=2800, seed=0))
    finally:
        del taken
    assert [len(group) for group in found] == [16] * 4
    assert "out of memory while sampling" in caplog.text


PLANNED = [
    ("gsm8k-qwen2.5-0.5b", "grpo"),
    ("gsm8k-qwen2.5-1.5b-16gb", "grpo"),
    ("qwen2.5-1.5b-from-3b", "grpo"),
    ("sft-grpo-dapo", "sft"),
]


@GRAPHS
@pytest.mark.parametrize(
    ("name", "stage", "fused"),
    [*((name, stage, False) for name, stage in PLANNED), ("gsm8k-qwen2.5-1.5b-16gb", "grpo", True)],
)
def test_the_planned_peak_is_the_allocators(name: str, stage: Stage, fused: bool) -> None:
    """All weights, an adapter, a teacher in 4 bit, recomputed layers of SFT; with what the engine keeps and the run's autocast."""
    card = torch.cuda.get_device_properties(0).total_memory / 1e9
    if card < 20:
        pytest.skip("the recipe is for a larger card")
    changes = "grpo.micro_batch_tokens=4000", "grpo.max_completion_tokens=128", "sft.max_length=512"
    found = measure(name, *changes, stage=stage, steps=2, fused=fused)
    assert found["ratio"] == pytest.approx(1, abs=WITHIN)


@GRAPHS
def test_parts_of_a_plan_leave_room_for_a_teacher_that_is_not_loaded() -> None:
    """7B in 4 bit beside 0.5B: 26.9 GB were planned on a card of 24, of which 23.2 are measured."""
    if torch.cuda.get_device_properties(0).total_memory / 1e9 > 30:
        pytest.skip("where all tokens fit there is nothing to part")
    recipe = load_recipe("qwen2.5-0.5b-from-7b").recipe
    with teachers():
        types = {"dtype": torch.float32, "compute": torch.bfloat16}
        plan = plan_from_config(recipe, "grpo", config_of(recipe.model.name), **types, prompt_tokens=320)
    assert plan.peak == pytest.approx(23.2e9, rel=WITHIN)


@GRAPHS
def test_an_update_that_does_not_fit_goes_on_in_halves(caplog: pytest.LogCaptureFixture) -> None:
    """The allocator's own error, with 16 GB left at most: first the engine gives back what it keeps, then parts get smaller."""
    taken = torch.empty(max(0, torch.cuda.mem_get_info()[0] - 16 * 10**9), dtype=torch.uint8, device="cuda")
    try:
        changes = "grpo.micro_batch_tokens=100000", "grpo.max_completion_tokens=128"
        assert measure("gsm8k-qwen2.5-0.5b", *changes, steps=2)["phases_gb"]["optimizer"] > 0
    finally:
        del taken
    said = [
        record.getMessage()
        for record in caplog.records
        if "out of memory in" in record.getMessage() or "same mathematics" in record.getMessage()
    ]
    assert "the engine keeps nothing" in said[0] and "same mathematics" in said[1], said
    assert torch.cuda.memory_stats()["num_ooms"] >= 2


@GRAPHS
def test_each_gpu_of_fsdp2_loads_its_part_only() -> None:
    """7B by 8: 30.5 GB of weights were on each card before they were sharded; now one tensor of 2.2 GB beside the part of 3.8."""
    code = (
        "import json; from tests.cuda_host.sharded import measure; print(json.dumps(measure(trains=False)))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["part"] == pytest.approx(3.81, rel=0.01) and found["loading"] < 3.81 + 1.1 * 2.18
    assert found["whole"] == pytest.approx(3.81 + 15.23, rel=0.01)  # 16-bit weights for a rollout


def battery(out: Path, *options: str, **environment: str) -> tuple[int, str, dict[str, Any]]:
    """Run ``benchmarks/gpu.py`` in small; return exit code, what it said, and its files by section."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "benchmarks/gpu.py",
        "--smoke",
        "--device",
        "cuda",
        "--out",
        str(out),
    ]
    done = subprocess.run([*command, *options], env=os.environ | environment, capture_output=True, text=True)
    return (
        done.returncode,
        done.stdout + done.stderr,
        {f.stem: json.loads(f.read_text()) for f in out.glob("*.json")},
    )


def test_the_battery_goes_on_past_a_section_that_hangs(tmp_path: Path) -> None:
    code, said, found = battery(tmp_path, "--sections", "decode,env", "--limit", "30", STUB_LAUNCHES="60")
    assert code == 1 and "failed: decode\n" in said
    assert found["decode"]["error"] == "no end after 30 s"
    assert found["env"]["driver"] == "" and found["env"]["name"] == "Stub"  # and without nvidia-smi


@pytest.mark.skipif("int(__import__('os').environ['STUB_CC']) != 90", reason="minutes; once is enough")
def test_the_battery_runs_to_its_end(tmp_path: Path) -> None:
    """With numbers in every process and thread. What the sections measure is nonsense here, what they compare is not."""
    numbers = os.pathsep.join([str(Path(__file__).with_name("numbers")), os.environ["PYTHONPATH"]])
    code, said, found = battery(tmp_path, PYTHONPATH=numbers)
    assert code == 0 and "without numbers:" not in said, said
    assert len(found) == 14
    assert {n for n, part in found.items() if "skipped" in part} == {"quickstart", "learning", "sharded"}
    assert max(found["correctness"]["relative_gradient_error"].values()) < 0.02
    assert found["kernels"]["graph_gap_max"] < 0.01 and found["kernels"]["decoder_gap_max"] < 0.01
    assert found["float16"]["run"]["exit"] == 0 and found["float16"]["overflows"]["moved"] == 0
    assert (
        "same mathematics" in found["halving"]["said"][0] and found["halving"]["relative_difference"] < 0.01
    )
    for case in ("adapter 16 x 1024", "float32 masters 16 x 1024"):
        assert found["card"][case]["part_tokens"] < 24e9 / 700, "parts for the imitated card"
    assert isinstance(found["speed"]["continuous_batching_2_rows_ms_per_step"], float)
