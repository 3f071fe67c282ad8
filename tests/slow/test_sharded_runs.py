"""FSDP2 and DeepSpeed in two real processes (gloo, CPU) through ``algorist run -n 2``: SFT, GRPO, evaluations and resume as one process does them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from algorist.training.checkpoint import damage, processes_of
from tests.slow.test_two_processes import (
    NUMBERS,
    ONE,
    REWARD,
    TWO,
    WEIGHTS,
    call,
    largest_difference,
    metrics,
    rollouts,
    run_alone,
    settings,
    weights,
)

pytestmark = pytest.mark.slow
STEPS = 4
# Parts of few tokens: the processes need unequal numbers of forward passes, and each pass gathers weights from both.
CHANGES = [f"grpo.max_steps={STEPS}", "grpo.micro_batch_tokens=90", "grpo.eval_every=3"]


# DeepSpeed comes without its kernels; accelerate and transformers would load it in every process that finds it, so it is not
# among the project's own packages. What it needs beyond them:
DEEPSPEED = ("deepspeed>=0.19,<0.20", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo")
# The file of a checkpoint in which the parts of several processes lie.
SHARDED = {"fsdp2": "pytorch_model_fsdp.bin", "zero2": "global_step4", "zero3": "global_step4"}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold ``runs/one`` by one process."""
    path = tmp_path_factory.mktemp("sharded")
    (path / "reward.py").write_text(REWARD)
    run_alone(path, "run_name=one", *ONE, *CHANGES)
    return path


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install DeepSpeed into a folder of its own."""
    path = tmp_path_factory.mktemp("deepspeed")
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--target", str(path), *DEEPSPEED], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    # On a CPU it would compile its own reductions where it lies, which takes two processors two minutes; gloo has them.
    comm, build = path / "deepspeed/comm/torch.py", "def build_shm_op():\n"
    text = comm.read_text()
    assert build in text
    comm.write_text(text.replace(build, f"{build}    return None\n"))
    return path


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.long) if name != "fsdp2" else name for name in SHARDED],
)
def config(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name the configuration; its package can be imported by the processes that are started."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "fsdp2":
            path = request.getfixturevalue("deepspeed")
            patch.setenv("PYTHONPATH", str(path))
            patch.setenv("PATH", f"{path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        yield request.param


@pytest.fixture(scope="module")
def folder(one: Path, config: str) -> Path:
    """Hold ``runs/one`` by one process and ``runs/CONFIG`` by two that share one model."""
    sharded(one, config, config)
    return one


def sharded(path: Path, config: str, name: str, *more: str) -> str:
    given = [f"run_name={name}", *TWO, *settings(path), *CHANGES, *more]
    return call(path, "run", "-n", "2", "--launch", config, "smoke-cpu", *given)


@pytest.mark.long
def test_the_run_is_that_of_one_process(folder: Path, config: str) -> None:
    one, two = folder / "runs/one", folder / "runs" / config
    for stage in ("sft", "grpo"):
        assert largest_difference(weights(one, stage), weights(two, stage)) <= 2 * WEIGHTS
    assert largest_difference(weights(one, "sft"), weights(one, "grpo")) > 100 * WEIGHTS  # GRPO did learn
    lines = [[row for row in metrics(run) if "grad_norm" in row] for run in (one, two)]
    for first, second in zip(*lines, strict=True):
        for name in ("loss", "grad_norm"):
            assert second[name] == pytest.approx(first[name], abs=NUMBERS), (first, second)
    first, second = rollouts(one), rollouts(two)
    assert [{**r, "advantage": 0} for r in first] == [{**r, "advantage": 0} for r in second]
    for name in ("sft", "grpo-step-3", "grpo"):
        found = [json.loads((run / f"eval/{name}.json").read_text())["metrics"] for run in (one, two)]
        assert found[0] == found[1]
    said = (two / "training.log").read_text()
    assert "packed log-prob pass is off" not in said
    assert (two / f"grpo/checkpoint-{STEPS}" / SHARDED[config]).exists()


FULL = """
import os
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from algorist.training.extension import Extension, extension

plain, seen = Qwen3MLP.forward, dict.fromkeys(("forward", "backward"), 0)

def runs_out(where, *times):
    seen[where] += 1
    if os.environ["RANK"] == "1" and seen[where] in times:
        raise torch.OutOfMemoryError(f"CUDA out of memory, {where}")

def forward(self, x):
    if x.requires_grad:
        runs_out("forward", 4)
        x.register_hook(lambda _: runs_out("backward", 8))
    return plain(self, x)

Qwen3MLP.forward = forward

@extension
class EachStage(Extension):
    name = "each_stage"

    def seen(self, event):
        if event.kind == "stage":
            seen.update(forward=0, backward=0)
"""


@pytest.mark.long
@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason="before torch 2.13 FSDP2 cannot go on after a failed pass",
)
@pytest.mark.parametrize("config", ["fsdp2"], indirect=True)
def test_out_of_memory_in_one_process_halves_the_parts_of_all(folder: Path, config: str) -> None:
    """In the middle of a forward and of a backward pass of each stage; the other process learns of it after the pass."""
    (folder / "full.py").write_text(FULL)
    fixed = [f"{stage}.micro_batch_tokens=1000" for stage in ("sft", "grpo")]
    said = sharded(folder, config, "full", f"plugins=[{folder}/full.py]", *fixed)
    log = (folder / "runs/full/training.log").read_text()
    assert log.count("same mathematics") == 4, said
    for stage in ("sft", "grpo"):
        apart = largest_difference(weights(folder / "runs/one", stage), weights(folder / "runs/full", stage))
        assert apart <= WEIGHTS, stage


READS = """
import os
from pathlib import Path
from transformers import AutoModelForCausalLM
from algorist.training.extension import Extension, extension

load = AutoModelForCausalLM.from_pretrained

def note(what):
    with Path(__file__).with_name("noted.txt").open("a") as file:
        file.write(f"{os.environ['RANK']}: {what}\\n")

def noted(name, *args, **ways):
    note(f"reads {Path(name).parent.name}")
    return load(name, *args, **ways)

AutoModelForCausalLM.from_pretrained = noted

@extension
class Parts(Extension):
    name = "parts"

    def seen(self, event):
        if event.kind == "stage" and os.environ["RANK"] == "0":
            units = [type(m).__name__ for m in event.trainer.model.modules() if "FSDP" in type(m).__name__]
            note(f"{event.stage} in {len(units)} units")
"""


@pytest.mark.long
@pytest.mark.parametrize("config", ["fsdp2"], indirect=True)
def test_one_process_reads_the_weights_and_each_has_its_part_from_then_on(folder: Path, config: str) -> None:
    """Also in the evaluation before the training, of the policy that a KL penalty refers to, and of what is saved at the start."""
    (folder / "reads.py").write_text(READS)
    model = shutil.copytree(folder / "runs/one/sft/final", folder / "pretrained/model")
    more = [f"model.name={model}", "eval.baseline=true", "grpo.beta=0.1", "grpo.stop={patience: 9}"]
    run_alone(folder, "run_name=whole", *ONE, *CHANGES, *more)
    sharded(folder, config, "parts", f"plugins=[{folder}/reads.py]", *more)
    loads = ["reads pretrained", "sft in 6 units", "reads sft", "grpo in 6 units", "reads grpo"]
    assert (folder / "noted.txt").read_text().splitlines() == [f"0: {what}" for what in loads]
    whole, parts = folder / "runs/whole", folder / "runs/parts"
    for stage in ("sft", "grpo"):
        assert largest_difference(weights(whole, stage), weights(parts, stage)) <= WEIGHTS
    start = load_file(parts / "grpo/start/model.safetensors")
    assert largest_difference(start, weights(whole, "sft")) <= WEIGHTS
    base = [json.loads((run / "eval/base.json").read_text())["metrics"] for run in (whole, parts)]
    assert base[0] == base[1]
    kls = [[row["kl"] for row in metrics(run) if "kl" in row] for run in (whole, parts)]
    assert kls[1] == pytest.approx(kls[0], abs=NUMBERS) and kls[0][-1] > 100 * NUMBERS


@pytest.mark.long
@pytest.mark.parametrize("config", ["fsdp2"], indirect=True)
def test_a_model_that_no_process_can_sample_alone_is_whole_in_the_evaluations(
    folder: Path, config: str
) -> None:
    model = folder / "gpt2"
    tokenizer = AutoTokenizer.from_pretrained(folder / "runs/one/sft/final")
    tokenizer.save_pretrained(model)
    shape = {"vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}
    ids = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**shape, **ids, **no_dropout)).save_pretrained(model)
    more = [f"model.name={model}", "eval.baseline=true", "grpo.enabled=false"]
    run_alone(folder, "run_name=gpt2-one", *ONE, *CHANGES, *more)
    sharded(folder, config, "gpt2", *more)
    one, two = folder / "runs/gpt2-one", folder / "runs/gpt2"
    assert largest_difference(weights(one, "sft"), weights(two, "sft")) <= WEIGHTS
    for name in ("base", "sft"):
        found = [json.loads((run / f"eval/{name}.json").read_text())["metrics"] for run in (one, two)]
        assert found[0] == found[1]


@pytest.mark.parametrize("config", ["fsdp2"], indirect=True)
def test_weights_that_cannot_be_used_end_both_processes_with_one_sentence(folder: Path, config: str) -> None:
    """``--debug`` shows the tracebacks of all processes."""
    broken = shutil.copytree(folder / "runs/one/sft/final", folder / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    given = ["run", "-n", "2", "--launch", config, "smoke-cpu", "run_name=broken", f"model.name={broken}"]
    said = call(folder, *given, *TWO, code=2)
    assert said.count("not finite in model.norm.weight") == 1, said
    assert "SystemExit" not in said and "exitcode" not in said, said
    said = call(folder, *given, *TWO, "run_name=again", "--debug", code=1)
    assert "CheckpointError: the weights in" in said and "Traceback" in said


@pytest.mark.parametrize("config", ["fsdp2"], indirect=True)
def test_an_optimizer_that_needs_whole_weights_is_refused_once(folder: Path, config: str) -> None:
    given = ["run", "-n", "2", "--launch", config, "smoke-cpu", "grpo.optim=adafactor"]
    said = call(folder, *given, *TWO, code=2)
    assert said.count("grpo.optim is adafactor, which cannot update the parts") == 1, said


@pytest.mark.long
@pytest.mark.parametrize(
    "config", ["fsdp2", pytest.param("zero3", marks=pytest.mark.long)], indirect=True
)  # zero2's checkpoints are zero3's
def test_resume_goes_on_as_if_it_had_not_been_cut(folder: Path, config: str) -> None:
    cut_and_go_on(folder, config, folder / "runs" / config)


@pytest.mark.long
@pytest.mark.parametrize("config", ["fsdp2"], indirect=True)
def test_weights_of_bare_bfloat16_are_rounded_in_parts(folder: Path, config: str) -> None:
    sharded(folder, config, "bare", "model.dtype=bfloat16")
    first, last = (weights(folder / "runs/bare", stage) for stage in ("sft", "grpo"))
    assert {weight.dtype for weight in last.values()} == {torch.bfloat16}
    assert largest_difference(first, last) > 100 * WEIGHTS
    cut_and_go_on(folder, config, folder / "runs/bare", "model.dtype=bfloat16")


def cut_and_go_on(folder: Path, config: str, whole: Path, *more: str) -> None:
    """Compare a run that was cut after its first step of GRPO, and continued, with the whole one."""
    run = whole.with_name(f"{whole.name}-again")
    shutil.copytree(whole, run)
    shutil.rmtree(run / "grpo/final")
    for later in (2, 3, 4):  # in the middle of two updates on one batch of rollouts
        shutil.rmtree(run / f"grpo/checkpoint-{later}")
    stages = json.loads((run / "stages.json").read_text())
    (run / "stages.json").write_text(json.dumps({k: v for k, v in stages.items() if "grpo" not in k}))
    said = sharded(folder, config, run.name, *more, "--resume")
    assert "continuing from checkpoint-1" in said and "not bit for bit" not in said
    newest = run / f"grpo/checkpoint-{STEPS}"
    assert damage(newest) == "" and processes_of(newest) == 2
    assert largest_difference(weights(run, "grpo"), weights(whole, "grpo")) == 0
    assert rollouts(run) == rollouts(whole)
