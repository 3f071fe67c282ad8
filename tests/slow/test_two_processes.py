"""Two real processes (gloo, CPU) through ``algorist run -n 2``: the same numbers as one process, everything written once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file

from algorist.cli.session import CONFIGS
from algorist.config.load import load_recipe, load_run_recipe
from algorist.errors import ConfigError
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native.engine import NativeEngine
from algorist.runs.pipeline import Quiet, run_recipe
from algorist.store.stages import step_of
from algorist.training.checkpoint import damage, processes_of
from algorist.training.distributed import is_sharded, whole_weights
from tests.warm import NESTED, PYTHON

ROOT = Path(__file__).resolve().parents[2]
# Some groups have no useful reward, so that a process may meet a micro-batch without any signal.
REWARD = """
def rare(completions, **_):
    return [float(sum(c in "xyzqjkvw" for c in text) >= 4) for text in completions]
"""
STEPS, SAMPLED_AT = 12, range(0, 12, 2)
SETTINGS = [
    "threads=1",
    "sft.max_steps=3",
    "sft.gradient_accumulation_steps=2",
    f"grpo.max_steps={STEPS}",
    "grpo.num_iterations=2",
    "grpo.gradient_accumulation_steps=2",
    "grpo.learning_rate=0.002",
    "grpo.eval_every=5",
    "grpo.resample={when_below: 1, max_rounds: 1, max_share: 0.5}",
    "grpo.replay={max_age: 2}",
    "grpo.pools={solved: 2, hopeless: 1}",
    "grpo.save_total_limit=20",
    "eval.samples=0",
    "data.eval.params.count=6",
    "eval.batch_size=2",  # three batches: the processes take turns
]
ONE = ["sft.batch_size=16", "grpo.batch_size=16"]
TWO = ["sft.batch_size=8", "grpo.batch_size=8"]
ALGORIST = ("-m", "algorist.cli.main")
STOCK_TRL = ("-m", "torch.distributed.run", "--nproc-per-node=2", str(ROOT / "benchmarks" / "stock_trl.py"))
WEIGHTS, NUMBERS = 1e-5, 1e-5  # largest differences in float32: weights; losses and gradient norms


def start(folder: Path, *arguments: str, program: tuple[str, ...] = ALGORIST) -> subprocess.Popen[str]:
    own = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
        NESTED: "1",
        "PYTHON_EXEC": PYTHON,
    }
    command = [PYTHON, *program, *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def call(folder: Path, *arguments: str, code: int = 0, program: tuple[str, ...] = ALGORIST) -> str:
    process = start(folder, *arguments, program=program)
    output, _ = process.communicate(timeout=480)
    assert process.returncode == code, output
    return output


def settings(folder: Path) -> list[str]:
    return [*SETTINGS, f"rewards=[{{name: '{folder}/reward.py:rare'}}]"]


class Lines(Quiet):
    """Keep what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        """Keep one line."""
        self.said.append(text)


def run_alone(folder: Path, *overrides: str, resume: bool = False) -> str:
    """Run in this process (no second start-up to wait for) and return what the run said."""
    recipe = load_recipe("smoke-cpu", [f"output_dir={folder}/runs", *settings(folder), *overrides]).recipe
    display = Lines()
    run_recipe(recipe, display=display, resume=resume)
    return "\n".join(display.said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold the runs of this file: ``runs/one`` by one process, ``runs/two`` by two."""
    path = tmp_path_factory.mktemp("two")
    (path / "reward.py").write_text(REWARD)
    run_alone(path, "run_name=one", *ONE)
    call(path, "run", "-n", "2", "smoke-cpu", "run_name=two", *TWO, *settings(path))
    return path


def weights(run: Path, stage: str) -> dict[str, torch.Tensor]:
    return load_file(run / stage / "final" / "model.safetensors")


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rollouts(run: Path) -> list[dict[str, Any]]:
    rows = pyarrow.parquet.read_table(run / "rollouts").to_pylist()
    return [{k: v for k, v in row.items() if k not in ("seconds", "sampler_log_prob_sum")} for row in rows]


def test_weights_losses_and_gradients_are_those_of_one_process(folder: Path) -> None:
    one, two = folder / "runs/one", folder / "runs/two"
    for stage in ("sft", "grpo"):
        assert largest_difference(weights(one, stage), weights(two, stage)) <= WEIGHTS
    assert largest_difference(weights(one, "sft"), weights(one, "grpo")) > 1000 * WEIGHTS  # GRPO did learn
    lines = [[row for row in metrics(run) if "grad_norm" in row] for run in (one, two)]
    assert len(lines[0]) == 3 + STEPS
    for first, second in zip(*lines, strict=True):
        assert (first["stage"], first["step"]) == (second["stage"], second["step"])
        for name in {"loss", "grad_norm", "update/computed_share"} & first.keys():
            assert second[name] == pytest.approx(first[name], abs=NUMBERS), (first, second)
    shares = [row["groups/useful_share"] for row in lines[0] if "groups/useful_share" in row]
    assert any(0 < share < 1 for share in shares)


@pytest.mark.long
def test_two_processes_equal_stock_trl_in_two_processes(folder: Path) -> None:
    """The same completions, learned from by ``trl.GRPOTrainer`` itself, give the same weights."""
    given = ["sft.enabled=false", "eval.enabled=false", "grpo.num_iterations=1", "grpo.max_steps=4"]
    given += ["grpo.resample=null", "grpo.replay=null", "grpo.pools=null"]
    call(folder, "run", "-n", "2", "smoke-cpu", "run_name=ours", *TWO, *settings(folder), *given)
    call(
        *(folder, "smoke-cpu", "run_name=stock", "device=cpu", *TWO, *settings(folder), *given),
        program=STOCK_TRL,
    )
    first, second = weights(folder / "runs/ours", "grpo"), weights(folder / "runs/stock", "grpo")
    assert largest_difference(first, second) <= WEIGHTS
    lines = [
        [row for row in metrics(folder / "runs" / name) if "grad_norm" in row] for name in ("ours", "stock")
    ]
    assert len(lines[0]) == 4 and any(row["grad_norm"] > 0 for row in lines[0])
    for mine, theirs in zip(*lines, strict=True):
        for name in ("loss", "grad_norm", "reward", "completions/mean_length"):
            assert mine[name] == pytest.approx(theirs[name], abs=NUMBERS), name


def test_rollouts_are_those_of_one_process_each_stored_once(folder: Path) -> None:
    first, second = rollouts(folder / "runs/one"), rollouts(folder / "runs/two")
    trained = [row for row in second if row["advantage"] is not None]
    assert len(trained) == 32 * len(SAMPLED_AT) < len(second), "some groups were sampled to replace others"
    assert {row["step"] for row in second} == set(SAMPLED_AT)
    assert 4 * len({(row["step"], row["group"]) for row in second}) == len(second)
    assert [{**r, "advantage": 0} for r in first] == [{**r, "advantage": 0} for r in second]
    pairs = [(mine["advantage"], other["advantage"]) for mine, other in zip(first, second, strict=True)]
    assert all(a == b or a == pytest.approx(b, abs=NUMBERS) for a, b in pairs)


def test_everything_is_written_once(folder: Path) -> None:
    one, two = folder / "runs/one", folder / "runs/two"
    steps = [(row["stage"], row["step"], "grad_norm" in row) for row in metrics(two)]
    assert len(steps) == len(set(steps))
    assert json.loads((two / "stages.json").read_text()) == json.loads((one / "stages.json").read_text())
    names = [{p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file()} for run in (one, two)]
    per_process = {name for name in names[1] if "rng_state" in name or name.endswith(".pt.1")}
    for last in ("sft/checkpoint-3", "grpo/checkpoint-12"):  # one process ends a stage with the model alone
        per_process |= {f"{last}/optimizer.pt", f"{last}/scheduler.pt"}
    assert names[1] - per_process - {"report.html", "result.json"} == {
        name for name in names[0] if "rng_state" not in name
    }
    for checkpoint in two.glob("*/checkpoint-*"):
        assert damage(checkpoint) == "" and processes_of(checkpoint) == 2
    assert "algorist run -n 2" in json.loads((two / "environment.json").read_text())["command"]


def cut(folder: Path, name: str, step: int) -> Path:
    """Copy the run of two processes as if it had been killed after the checkpoint of ``step`` in the GRPO stage."""
    run = folder / "runs" / name
    shutil.copytree(folder / "runs/two", run)
    shutil.rmtree(run / "grpo" / "final")
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(run / "grpo" / f"checkpoint-{later}")
    stages = json.loads((run / "stages.json").read_text())
    kept = {stage: result for stage, result in stages.items() if "grpo" not in stage}
    (run / "stages.json").write_text(json.dumps(kept))
    return run


def test_resume_is_exact_and_ctrl_c_stops_both_after_the_same_step(folder: Path) -> None:
    # After step 1 one of two updates on a batch of rollouts is done: each process must get its own share back.
    run, whole = cut(folder, "again", 1), folder / "runs/two"
    process = start(
        *(folder, "run", "-n", "2", "smoke-cpu", "run_name=again", "--resume", *TWO, *settings(folder)),
        *("--", "--num_cpu_threads_per_process", "1"),
    )
    deadline = time.monotonic() + 120
    while not (run / "grpo/checkpoint-3").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "continuing from checkpoint-1" in said and "not bit for bit" not in said
    assert "Continue: algorist run -n 2" in said and "Traceback" not in said

    newest = max(run.glob("grpo/checkpoint-*"), key=step_of)
    assert 3 <= step_of(newest) < STEPS
    assert damage(newest) == "" and processes_of(newest) == 2
    same = load_file(whole / "grpo" / newest.name / "model.safetensors")
    assert largest_difference(load_file(newest / "model.safetensors"), same) == 0
    assert rollouts(run) == [row for row in rollouts(whole) if row["step"] < step_of(newest)]
    assert metrics(run)[-1]["step"] == step_of(newest)


def test_resume_with_another_number_continues_and_says_so(folder: Path) -> None:
    run = cut(folder, "alone", 11)
    said = run_alone(folder, "run_name=alone", *TWO, resume=True)
    assert "checkpoint-11 was made by 2 process(es), this run has 1: it continues, not bit for bit" in said
    assert {"grpo", "eval-grpo"} <= set(json.loads((run / "stages.json").read_text()))
    assert [row["step"] for row in metrics(run) if "grad_norm" in row][-STEPS:] == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder, and the gist's recipe for a tiny model, GSM8K's columns and two steps."""
    path = tmp_path_factory.mktemp("gist")
    rows = [
        {"question": f"Tom has {n} pens and gets {n}. How many?", "answer": f"#### {2 * n}"} for n in range(8)
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, [
        "model.name=tiny",
        "model.tiny={hidden_size: 32, layers: 2, vocab_size: 400, max_position_embeddings: 1024}",
        f"data.train.path={path}/rows.jsonl",
        "data.train.max_prompt_tokens=null",
        "eval.enabled=false",
        "device=cpu",
        "threads=1",
        "grpo.group_size=4",
        "grpo.gradient_accumulation_steps=1",
        "grpo.max_completion_tokens=8",
        "grpo.max_steps=2",
        "grpo.save_steps=1",
        f"output_dir={path}/runs",
    ]


def gist_alone(changes: list[str], resume: bool = False) -> str:
    display = Lines()
    run_recipe(load_recipe("gist-gsm8k", changes).recipe, display=display, resume=resume)
    return "\n".join(display.said)


def stop_after_one_step(run: Path) -> None:
    shutil.rmtree(run / "grpo/final")
    shutil.rmtree(run / "grpo/checkpoint-2")
    (run / "stages.json").write_text("{}")


@pytest.mark.long
def test_the_gist_in_two_processes_trains_all_weights(gsm8k: tuple[Path, list[str]]) -> None:
    path, changes = gsm8k
    run, given = path / "runs/full", [*changes, "run_name=full"]
    said = call(path, "run", "-n", "2", "gist-gsm8k", *given)
    assert "warning: the run has 2 processes, so its LoRA adapter is left out" in said
    assert "model.lora.in_several_processes=keep" in (run / "training.log").read_text()
    assert load_run_recipe(run).model.lora is None
    files = {p.name for p in (run / "grpo/final").iterdir()}
    assert "model.safetensors" in files and "adapter_config.json" not in files

    stop_after_one_step(run)
    said = gist_alone(given, resume=True)
    assert "warning: this run began without the recipe's LoRA adapter" in said
    assert "continuing from checkpoint-1" in said
    assert {p.name for p in (run / "grpo/final").iterdir()} == files
    assert load_run_recipe(run).model.lora is None


@pytest.mark.long
def test_an_adapter_run_that_goes_on_in_two_processes_keeps_it(gsm8k: tuple[Path, list[str]]) -> None:
    path, changes = gsm8k
    run, given = path / "runs/kept", [*changes, "run_name=kept"]
    assert "adapter" not in gist_alone(given)
    assert (run / "grpo/final/adapter_config.json").is_file()
    stop_after_one_step(run)
    said = call(path, "run", "-n", "2", "gist-gsm8k", *given, "--resume")
    assert "continuing from checkpoint-1" in said and "is left out" not in said
    assert "warning: an adapter in several processes is less tried" in said
    assert (run / "grpo/final/adapter_config.json").is_file()
    assert load_run_recipe(run).model.lora is not None


def test_a_sharded_model_samples_with_its_whole_weights(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, intermediate_size=64, vocab_size=100, eos_token_id=1))
    params = SamplingParams(max_new_tokens=12, seed=3)
    expected = NativeEngine(model).generate([[5, 6, 7], [8, 9]], 3, params)
    assert not is_sharded(model)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert is_sharded(model)
        with torch.no_grad(), whole_weights(model):
            found = NativeEngine(model).generate([[5, 6, 7], [8, 9]], 3, params)
        assert [[c.token_ids for c in g] for g in found] == [[c.token_ids for c in g] for g in expected]
        model(torch.tensor([[5, 6, 7]])).logits.sum().backward()  # sharded again, and it still learns
        assert type(model.lm_head.weight.grad).__name__ == "DTensor"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", CONFIGS)
def test_accelerate_reads_the_shipped_configurations_as_meant(name: str) -> None:
    file = str(files("algorist").joinpath("launch", f"{name}.yaml"))
    parsed = launch_command_parser().parse_args(["--config_file", file, "--num_processes", "4", "script.py"])
    found, _, _ = _validate_launch_command(parsed)
    chosen = {"ddp": found.multi_gpu, "fsdp2": found.use_fsdp}.get(name, found.use_deepspeed)
    assert chosen and found.num_processes == 4
    if name == "fsdp2":
        told = prepare_multi_gpu_env(found)
        assert told["FSDP_VERSION"] == "2" and told["FSDP_STATE_DICT_TYPE"] == "FULL_STATE_DICT"
        assert told["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
    if name.startswith("zero"):
        assert found.zero_stage == int(name[-1]) and found.zero3_init_flag is False


def test_mistakes_are_told_before_any_process_starts(folder: Path) -> None:
    assert "grpo.batch_siz" in call(folder, "run", "-n", "2", "smoke-cpu", "grpo.batch_siz=8", code=2)
    said = call(folder, "run", "-n", "2", "smoke-cpu", "device=cpu", "--launch", "zero3", code=2)
    assert "needs DeepSpeed, which is not installed" in said
    assert "Traceback" not in said


GROUP_OF_8 = ["grpo.group_size=8", "grpo.gradient_accumulation_steps=1"]


def test_the_batch_rule_counts_the_processes_before_any_starts(folder: Path) -> None:
    given = ["smoke-cpu", *GROUP_OF_8, "run_name=never", *settings(folder)[:1]]
    for words, told in (
        (["-n", "2", *given, "grpo.batch_size=3"], "3 × 1 × 2 = 6 completions per step"),
        (["-n", "1", *given, "grpo.batch_size=4"], "4 × 1 = 4 completions per step"),
        ([*given, "grpo.batch_size=3", "--", "--num_processes", "2"], "3 × 1 × 2 = 6"),
        ([*given, "grpo.batch_size=3", "--", "--num_processes=1", "--num-processes", "2"], "3 × 1 × 2 = 6"),
    ):
        said = " ".join(call(folder, "run", *words, code=2).split())
        assert told in said and "not divisible by grpo.group_size = 8; take" in said
    assert not (folder / "runs/never").exists()


@pytest.mark.long
def test_a_group_may_lie_on_two_processes(folder: Path) -> None:
    given = ["sft.enabled=false", "eval.enabled=false", "grpo.learning_rate=0.002", "grpo.max_steps=3"]
    changes = [*settings(folder), *given, *GROUP_OF_8, "grpo.num_iterations=1"]
    recipe = load_recipe(
        "smoke-cpu", [f"output_dir={folder}/runs", "run_name=whole", *changes, "grpo.batch_size=8"]
    ).recipe
    run_recipe(recipe, display=Quiet())
    call(folder, "run", "-n", "2", "smoke-cpu", "run_name=split", *changes, "grpo.batch_size=4")
    whole, split = folder / "runs/whole", folder / "runs/split"
    first, second = rollouts(whole), rollouts(split)
    assert len(second) == 3 * 8 and {row["group"] for row in second} == {0}
    assert [{**r, "advantage": 0} for r in first] == [{**r, "advantage": 0} for r in second]
    assert [r["advantage"] for r in second] == pytest.approx([r["advantage"] for r in first], abs=NUMBERS)
    assert any(r["advantage"] for r in second)
    assert largest_difference(weights(whole, "grpo"), weights(split, "grpo")) <= WEIGHTS
    assert load_run_recipe(split).grpo.processes == 2  # so every later command reads the folder
    named = [f"output_dir={folder}/runs", "run_name=split"]
    with pytest.raises(ConfigError, match=r"4 × 1 = 4 completions per step"):
        run_recipe(load_recipe("smoke-cpu", [*named, *changes, "grpo.batch_size=4"]).recipe, resume=True)


@pytest.mark.long
def test_estimators_that_look_at_more_than_a_completion_are_those_of_one_process(folder: Path) -> None:
    """Three groups of eight on two processes, the middle one torn apart: averages over prompts, an entropy that all share, masks."""
    own = [
        "sft.enabled=false", "eval.enabled=false", "grpo.learning_rate=0.002", "grpo.max_steps=4", "grpo.group_size=8",
        "grpo.gradient_accumulation_steps=1", "grpo.resample=null", "grpo.replay=null", "grpo.reduction=prompt-mean-token-mean",
        "grpo.positive_weight=0.5", "grpo.drop_equal_groups=true", "grpo.off_policy_mask=1e-5", "grpo.entropy_control={target: 9, step: 0.01}",
    ]  # fmt: skip
    changes = [*settings(folder), *own]
    run_alone(folder, "run_name=prompts", *own, "grpo.batch_size=24")
    call(folder, "run", "-n", "2", "smoke-cpu", "run_name=torn", *changes, "grpo.batch_size=12")
    one, two = folder / "runs/prompts", folder / "runs/torn"
    assert largest_difference(weights(one, "grpo"), weights(two, "grpo")) <= WEIGHTS
    lines = [[row for row in metrics(run) if "grad_norm" in row] for run in (one, two)]
    for name in ("loss", "entropy", "entropy_control/bonus", "off_policy_mask/masked"):
        assert [row[name] for row in lines[1]] == pytest.approx(
            [row[name] for row in lines[0]], abs=NUMBERS
        ), name
    assert any(row["off_policy_mask/masked"] for row in lines[0])
    assert len({row["grad_norm"] for row in lines[0]}) == 4


OF_ONE = """
import os
from algorist_grader import grade
def check(problem, answer):
    os._exit(3)
def of_rank_0(completion, trainer_state):
    if os.environ["RANK"] == "1":
        grade("7", "7", problem={"checker": __file__ + ":check"})
        raise ValueError("not here")
    return len(completion) % 2
"""


def test_what_fails_in_one_process_is_counted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OF_ONE)
    given = ["sft.enabled=false", "eval.enabled=false", "grpo.max_steps=2", "grpo.batch_size=8", "threads=1"]
    own = [f"rewards=[correct, {{name: '{tmp_path}/mine.py:of_rank_0', weight: 0.5}}]", "run_name=r"]
    said = call(tmp_path, "run", "-n", "2", "smoke-cpu", f"output_dir={tmp_path}", *given, *own)
    assert "reward 'of_rank_0' failed on 8 of 16 completions (ValueError: not here" in " ".join(said.split())
    for line in [row for row in metrics(tmp_path / "r") if "grad_norm" in row]:
        assert (line["rewards/of_rank_0/failures"], line["grading/crashed"], line["grading/timeout"]) == (
            8,
            8,
            0,
        )


KILLED = """
import os, signal
from algorist.training.extension import Extension, extension

@extension
class Killed(Extension):
    name = "killed"

    def seen(self, event):
        if event.kind == "stage" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_signal_that_ended_a_process_is_said(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    said = call(tmp_path, "run", "-n", "2", "smoke-cpu", *TWO, f"plugins=[{tmp_path}/killed.py]", code=137)
    assert "error: signal 9 ended a process (9: often for want of memory)" in said and "exitcode" not in said
