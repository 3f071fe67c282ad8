"""Real faults inside training: NaN gradients and weights, memory that runs out, a reward that hangs or dies."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerState, TrainingArguments

from algorist.config import load_recipe
from algorist.config.load import parse_override
from algorist.config.schema import GRPOSection, SFTSection
from algorist.errors import EngineError, RewardError, TrainingError
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native.engine import NativeEngine
from algorist.store.read import query
from algorist.training import step
from algorist.training.faults import MAX_BAD_STEPS, FiniteSteps, memory_advice
from algorist.types import Problem
from tests.marks import first
from tests.runs.test_checkpoint import run
from tests.tiny import TOKENIZER, make_model, make_trainer, parameters_of
from tests.warm import PYTHON


def poison(trainer: Any, steps: Any, value: float = float("nan")) -> None:
    """Put a value into one gradient before the clipping of the steps named, as an overflow in a kernel does."""
    clip = trainer.accelerator.clip_grad_norm_

    def clip_poisoned(parameters: Any, *arguments: Any, **settings: Any) -> Any:
        chosen = [p for p in parameters if p.grad is not None]
        if trainer.state.global_step in steps:
            chosen[0].grad.view(-1)[0] = value
        return clip(chosen, *arguments, **settings)

    trainer.accelerator.clip_grad_norm_ = clip_poisoned


def weights_after_each_step(trainer: Any) -> list[torch.Tensor]:
    from transformers import TrainerCallback

    seen: list[torch.Tensor] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append(parameters_of(trainer).clone())

    trainer.add_callback(Watch())
    trainer.train()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_without_a_finite_gradient_changes_nothing(tmp_path: Path, value: float) -> None:
    trainer = make_trainer(tmp_path, max_steps=4, batch_size=4, gradient_accumulation_steps=2)
    poison(trainer, (2,), value)
    seen = weights_after_each_step(trainer)
    assert torch.equal(seen[1], seen[2]) and not torch.equal(seen[2], seen[3])
    assert all(bool(weights.isfinite().all()) for weights in seen)
    assert trainer.faults.bad_steps == 1 and trainer.faults.bad_steps_in_a_row == 0
    state = trainer.optimizer.state[next(p for p in trainer.model.parameters() if p.requires_grad)]
    assert int(state["step"]) == 3  # three real steps, moments untouched by the fourth
    logged = [line["step"] for line in trainer.state.log_history if "update/skipped" in line]
    assert logged == [3]
    saved = torch.load(tmp_path / "bad-step-2.pt", weights_only=True)
    assert saved["step"] == 2 and len(saved["inputs"]["completions"]) == 8


@pytest.mark.slow
def test_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=20)
    poison(trainer, range(3, 20))
    with pytest.raises(TrainingError, match=r"5 steps in a row.*step 7.*learning rate.*0\.01; take 0\.001"):
        trainer.train()
    assert trainer.faults.bad_steps == MAX_BAD_STEPS
    assert len(list(tmp_path.glob("bad-step-*.pt"))) == MAX_BAD_STEPS


def test_float16_that_never_has_a_finite_gradient_ends_the_run_too(tmp_path: Path) -> None:
    """A scaler halves its factor for 17 steps at most; after that the skipped steps are the model's."""
    model, noted = torch.nn.Linear(2, 1), []
    faults = FiniteSteps(lambda: None, noted.append)
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none")
    args.fp16, state = True, TrainerState()

    def step(value: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        faults.on_pre_optimizer_step(args, state, None, model=model)
        assert all(p.grad is not None for p in model.parameters()), "the scaler looks at them"

    for value in [float("inf")] * 17 + [1.0] + [float("nan")] * (17 + MAX_BAD_STEPS - 1):
        step(value)
    with pytest.raises(TrainingError, match="22 steps in a row"):
        step(float("nan"))
    assert len(noted) == 17 + 17 + MAX_BAD_STEPS


def test_the_library_alone_does_not_survive_it(tmp_path: Path) -> None:
    """The contract behind this: without the callback a NaN reaches the weights."""
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.remove_callback(trainer.faults)
    poison(trainer, (0,))
    trainer.train()
    assert not bool(parameters_of(trainer).isfinite().all())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_nan_weights_are_named_and_nothing_is_sampled_from_them(engine: str, temperature: float) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(EngineError, match=r"not finite numbers.*earlier checkpoint"):
        make_engine(engine, model, TOKENIZER).generate(
            [[5, 6, 7]], 2, SamplingParams(temperature=temperature, max_new_tokens=3, seed=0)
        )


LITTLE_MEMORY = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
"""One thread; what was freed goes back to the system at once, so that a limit means the same on every machine."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", first(1, ["sft", "grpo"]))
def test_out_of_memory_is_the_same_mathematics_in_smaller_parts(kind: str, tmp_path: Path) -> None:
    """The kernel refuses memory (RLIMIT_AS) in the middle of a window of two micro-batches; parts that know of it are small at once."""
    told, ends = {}, {}
    enough = {"sft": 120, "grpo": 300}[kind]
    for extra_mb, *planned in ((0,), (enough,), (enough, "planned")):
        folder = tmp_path / "-".join((str(extra_mb), *planned))
        done = subprocess.run(
            [PYTHON, "-m", "tests.unit.training.out_of_memory_run", kind, str(extra_mb), str(folder), *planned],
            capture_output=True, text=True, timeout=300, env=LITTLE_MEMORY,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told[(extra_mb, *planned)] = done.stderr
        ends[(extra_mb, *planned)] = torch.load(folder / "end.pt", weights_only=True)
    without, late, early = told
    assert "out of memory" not in told[without] + told[early] and "same mathematics" in told[late]
    for name, weight in ends[without]["weights"].items():
        for other in (late, early):
            assert torch.allclose(weight, ends[other]["weights"][name], atol=1e-6, rtol=1e-5), name
    assert {"loss", "grad_norm", "num_tokens"} <= set().union(*ends[without]["log"])
    for left, right in zip(ends[without]["log"] * 2, ends[late]["log"] + ends[early]["log"], strict=True):
        assert left.keys() == right.keys()
        for key in ("loss", "grad_norm", "num_tokens"):  # nothing counted twice
            assert key not in left or left[key] == pytest.approx(right[key], rel=1e-4)


@pytest.mark.slow
def test_the_engine_gives_its_memory_back_before_parts_get_smaller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    engine = NativeEngine(model, TOKENIZER, tier="graph")
    trainer = make_trainer(tmp_path, model=model, engine=engine, max_steps=2)
    compute, kept = step.in_parts, []

    def in_little_memory(*given: Any) -> Any:
        kept.append(engine._graph.nbytes)
        if kept[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(*given)

    monkeypatch.setattr(step, "in_parts", in_little_memory)
    trainer.train()
    assert kept[0] > 0 and kept[1:] == [0, 0], "and keeps nothing in the steps after it"
    assert "the engine keeps nothing" in caplog.text and "same mathematics" not in caplog.text


@pytest.mark.slow
@pytest.mark.long
def test_a_process_that_runs_out_of_memory_does_its_share_again_while_the_other_waits(tmp_path: Path) -> None:
    """Two gloo processes; the second has too little memory for its half of the step. The update is that of one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ends, said = {}, {}
    for count, extra_mb in ((1, 0), (2, 300)):
        folder = tmp_path / str(count)
        group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started = [
            subprocess.Popen(
                [PYTHON, "-m", "tests.unit.training.out_of_memory_run", "grpo", str(extra_mb), str(folder)],
                env={**LITTLE_MEMORY, "RANK": str(r), "LOCAL_RANK": str(r), **group},
                stderr=subprocess.PIPE, text=True,
            )
            for r in range(count)
        ]  # fmt: skip
        said[count] = [process.communicate(timeout=400)[1] for process in started]
        assert [process.returncode for process in started] == [0] * count, said[count]
        ends[count] = torch.load(folder / "end.pt", weights_only=True)["weights"]
    assert "same mathematics" in said[2][1] and "out of memory" not in said[2][0]
    for name, weight in ends[1].items():
        assert torch.allclose(weight, ends[2][name], atol=1e-6, rtol=1e-5), name


@pytest.mark.long
@pytest.mark.slow
def test_out_of_memory_with_one_row_says_what_to_change(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.training.out_of_memory_run", "wide", "24", str(tmp_path)],
        capture_output=True, text=True, timeout=300,
        env=LITTLE_MEMORY,
    )  # fmt: skip
    assert done.returncode != 0
    last = next(line for line in reversed(done.stderr.splitlines()) if "Error: " in line)
    assert "TrainingError: out of memory in the update" in last
    assert "grpo.gradient_checkpointing=true; grpo.batch_size=16 grpo.gradient_accumulation_steps=4" in last
    assert "grpo.group_size=4 (instead of 8); grpo.max_completion_tokens=100" in last
    assert "vllm" not in last and "PYTORCH_ALLOC_CONF" not in last  # neither is in this process


FULL: dict[str, Any] = {
    "batch_size": 32, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "max_completion_tokens": 256,
}  # fmt: skip


def test_memory_advice_names_the_recipes_keys_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)  # the command line sets it
    """The original's steps: vLLM's share 0.9 → 0.7, group 4 → 2, accumulation 1 → 2, the allocator's variable."""
    beside = GRPOSection(**FULL, engine="vllm", vllm={"gpu_memory_utilization": 0.9})
    starts = [line.split(" (")[0] for line in memory_advice(beside, cuda=True)]
    assert starts == [
        "grpo.gradient_checkpointing=true",
        "grpo.batch_size=16 grpo.gradient_accumulation_steps=4 grpo.steps_per_generation=4",
        "grpo.group_size=4",
        "grpo.max_completion_tokens=128",
        "grpo.vllm.gpu_memory_utilization=0.7",
        "a smaller model",
        "several GPUs that share the weights out",
        "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, against fragmentation",
    ]
    small = GRPOSection(batch_size=4, group_size=4, steps_per_generation=1)
    told = " ".join(memory_advice(small, cuda=False))
    assert "grpo.batch_size=2 grpo.gradient_accumulation_steps=2" in told and "grpo.group_size=2" in told
    here = " ".join(memory_advice(GRPOSection(**FULL), cuda=False))
    assert "vllm" not in here and "PYTORCH" not in here and "launch" not in here
    away = GRPOSection(**FULL, engine="vllm", vllm={"mode": "server"})
    assert "gpu_memory_utilization" not in " ".join(memory_advice(away, cuda=True))
    assert "group_size" not in " ".join(memory_advice(SFTSection(batch_size=8), cuda=False))
    alone = SFTSection(batch_size=1, gradient_accumulation_steps=4, gradient_checkpointing=True)
    smallest = memory_advice(alone, cuda=False)
    assert smallest == ["a smaller model (model.name), or an adapter (model.lora.rank=16)"]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, 3, 4, 6, 9, 16, 24, 32])
@pytest.mark.parametrize("accumulation", [1, 2, 3, 4])
@pytest.mark.parametrize("named", [True, False], ids=["steps_per_generation", ""])
def test_advised_values_are_accepted_by_the_recipe(batch: int, accumulation: int, named: bool) -> None:
    """Each advised change alone, and all of them together, make a valid recipe whose step holds as many completions."""
    step = batch * accumulation
    small = load_recipe("smoke-cpu", ["sft.enabled=false", "grpo.engine=vllm"]).recipe.grpo
    shape = {"batch_size": batch, "gradient_accumulation_steps": accumulation}
    shape |= {"steps_per_generation": accumulation} if named else {}
    for group in (g for g in range(2, step + 1) if step % g == 0):
        values = small.model_dump(exclude_unset=True) | shape | {"group_size": group}
        grpo = GRPOSection.model_validate(values)
        lines = [line for line in memory_advice(grpo, cuda=False) if line.startswith("grpo.")]
        assert any("gpu_memory_utilization" in line for line in lines)
        changes = [line.split(" (")[0].split() for line in lines]
        given = grpo.model_dump()
        for change in [*changes, [setting for parts in changes for setting in parts]]:
            values = copy.deepcopy(given)
            for key, value in map(parse_override, change):
                *parents, last = key.split(".")[1:]
                (values[parents[0]] if parents else values)[last] = value
            section = GRPOSection.model_validate(values)
            assert section.batch_size * section.gradient_accumulation_steps == step


REWARDS = """
import os, re, sys, time

def loops(completion):
    if "loop" in completion:
        re.match(r"(a+)+$", "a" * 60 + "b")   # holds the interpreter: no signal handler would run
    return 1.0

def sleeps(completions, **kwargs):
    time.sleep(60)

def dies(completion):
    if "die" in completion:
        os._exit(7)
    print("a user's own print")
    return 0.5

def raises(completion):
    return 1 / len(completion)

def with_state(completions, trainer_state, **kwargs):
    return [float(trainer_state) for _ in completions]

def bounded(rollout):
    return float(rollout.text)
bounded.low, bounded.high = -1.0, 1.0

def only_upper(rollout):
    return float(rollout.text)
only_upper.high = 1

def sees(rollout):
    return sum(os.environ.get(name) == "s3cret-Value" for name in ("HF_TOKEN", "JUDGE_API_KEY", "CITY"))

def ends(rollout, log_metric):
    sys.exit(0)
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(REWARDS)
    return path


def built(path: Path, name: str, timeout_s: float = 0.5) -> Any:
    return build_rewards([{"name": f"{path}:{name}", "timeout_s": timeout_s}])[0]


@pytest.mark.slow
def test_a_reward_that_hangs_gets_its_floor_and_the_next_call_works(rewards: Path) -> None:
    reward = built(rewards, "loops")
    assert reward(completions=["fine", "loop", "fine"]) == [1.0, 0.0, 1.0]
    assert reward.failures == 1


@pytest.mark.slow
def test_a_reward_that_hangs_is_named_before_the_run(rewards: Path, caplog: pytest.LogCaptureFixture) -> None:
    built(rewards, "sleeps", 0.3).probe([Problem("a", "1 + 1?", "2")])
    assert "'sleeps' in" in caplog.text and "took longer than 0.3 s for the few completions" in caplog.text


def test_a_reward_that_always_hangs_ends_the_run(rewards: Path) -> None:
    reward = built(rewards, "sleeps", 0.3)
    assert reward(completions=["x", "y"]) == [0.0, 0.0] == reward(completions=["x", "y"])
    with pytest.raises(
        RewardError,
        match=r"'sleeps' in .*mine\.py took longer than 0\.3 s 3 times in a row.*new run, run_name=NAME, or give it more time",
    ):
        reward(completions=["x", "y"])


@pytest.mark.slow
def test_a_reward_that_kills_its_process(rewards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reward = built(rewards, "dies", 5.0)
    assert reward(completions=["a", "die", "b"]) == [0.5, 0.0, 0.5]
    assert reward.failures == 1
    out, err = capfd.readouterr()
    assert "own print" not in out and "own print" in err


@pytest.mark.slow
def test_a_reward_that_always_kills_its_process_ends_the_run(rewards: Path) -> None:
    reward = built(rewards, "dies", 5.0)
    assert reward(completions=["die", "die", "fine", "die", "die"]) == [0.0, 0.0, 0.5, 0.0, 0.0]
    with pytest.raises(RewardError, match=r"'dies' in .*mine\.py ended its process 3 times in a row"):
        reward(completions=["die"])


def test_a_declared_range_holds(rewards: Path) -> None:
    reward = built(rewards, "bounded", 5.0)
    assert reward(completions=["0.5", "-1", "1.0000001", "2", "-3"]) == [0.5, -1.0, 1.0000001, -1.0, -1.0]
    assert reward.failures == 2 and "it returned 2, outside its declared range -1 … 1" in reward.first_failure
    assert built(rewards, "only_upper", 5.0)(completions=["-7", "1", "100", "1e308"]) == [-7.0, 1.0, 0.0, 0.0]


@pytest.mark.slow
def test_a_reward_gets_no_secrets_but_those_that_the_recipe_names(
    rewards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "JUDGE_API_KEY", "CITY"):
        monkeypatch.setenv(name, "s3cret-Value")
    spec = {"name": f"{rewards}:sees"}
    for settings, seen in (({}, 1.0), ({"environment": ["JUDGE_API_KEY"]}, 2.0)):
        assert build_rewards([spec | settings])[0](completions=["x"]) == [seen]


def test_a_reward_of_this_process_that_ends_it_says_so(rewards: Path) -> None:
    with pytest.raises(RewardError, match=r"reward 'ends' ended the program \(SystemExit: 0\).*--resume"):
        built(rewards, "ends")(completions=["x"], log_metric=print)
    assert RewardError("").exit_code == 1


def test_a_reward_that_raises_shows_where(rewards: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert built(rewards, "raises", 5.0)(completions=["", "ab"]) == [0.0, 0.5]
    assert "ZeroDivisionError" in caplog.text and "return 1 / len(completion)" in caplog.text


def test_what_only_this_process_has_keeps_the_function_here(rewards: Path) -> None:
    assert built(rewards, "with_state")(completions=["a"], trainer_state=3) == [3.0]


@pytest.mark.slow
def test_a_run_goes_on_when_a_reward_hangs_once(tmp_path: Path, rewards: Path) -> None:
    """Through recipe, trainer and store: the hanging completion is stored with the floor, the others with their value."""
    rewards.write_text(
        "import time\n\nflag = __import__('pathlib').Path(__file__).with_name('hung')\n\n"
        "def once(completion, problem):\n    if problem.id != 'probe' and not flag.exists():\n        flag.touch()\n"
        "        time.sleep(60)\n    return 0.25\n"
    )
    path = run(
        tmp_path,
        "sft.enabled=false", "grpo.max_steps=2", "grpo.batch_size=8", "grpo.gradient_accumulation_steps=1",
        f"rewards=[{{name: '{rewards}:once', timeout_s: 0.5}}, {{name: correct}}]",
    )  # fmt: skip
    values = [row["v"] for row in query(path, "SELECT rewards['once'] AS v FROM rollouts")]
    assert sorted(values) == [0.0] + [0.25] * 15
