"""Checkpoints: whole or not there, damaged ones refused by name, and a continued run that is the same run to the bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from algorist.config import load_recipe
from algorist.errors import CheckpointError
from algorist.runs.pipeline import run_recipe
from algorist.store.read import query
from algorist.training.checkpoint import (
    MANIFEST,
    STATE,
    checkpoints,
    damage,
    newest_checkpoint,
    write_manifest,
)
from tests.marks import first
from tests.warm import PYTHON

TINY = [
    "model.tiny={hidden_size: 32, layers: 1, vocab_size: 300, max_position_embeddings: 256}",
    "eval.enabled=false",
    "sft.max_steps=4",
    "sft.save_steps=2",
    "sft.batch_size=4",
    "sft.logging_steps=3",
    "grpo.max_completion_tokens=24",
    "grpo.group_size=4",
    "grpo.save_steps=1",
    "grpo.logging_steps=2",
    "grpo.save_total_limit=20",
    "sft.save_total_limit=20",
]
TIMES = ("seconds", "time", "_s", "tokens_per_second", "runtime", "per_second")


def run(
    folder: Path, *overrides: str, resume: bool = False, stages: tuple[str, ...] = ("sft", "grpo")
) -> Path:
    recipe = load_recipe("smoke-cpu", [*TINY, *overrides, f"output_dir={folder}", "run_name=r"]).recipe
    run_recipe(recipe, resume=resume, stages=stages)
    return folder / "r"


def rollouts(path: Path) -> list[dict[str, Any]]:
    rows = query(path, "SELECT * EXCLUDE (seconds) FROM rollouts ORDER BY ALL")
    return [{k: str(v) for k, v in row.items()} for row in rows]


def metrics(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.endswith(TIMES) and not k.startswith("hardware/")}
        for line in lines
    ]


def same(one: Path, other: Path, stage: str) -> None:
    left, right = (load_file(p / stage / "final" / "model.safetensors") for p in (one, other))
    assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
    assert rollouts(one) == rollouts(other)
    assert metrics(one) == metrics(other)


def cut_back(path: Path, stage: str, step: int) -> None:
    """Undo the end of a finished stage, as a process killed right after ``checkpoint-step`` leaves it (metrics and rollouts stay)."""
    shutil.rmtree(path / stage / "final")
    for late in checkpoints(path / stage):
        if int(late.name.rpartition("-")[2]) > step:
            shutil.rmtree(late)
    stages = json.loads((path / "stages.json").read_text())
    stages.pop(stage, None)
    (path / "stages.json").write_text(json.dumps(stages))


SETTINGS = {
    "one batch, one step": ["grpo.max_steps=4", "grpo.batch_size=8", "grpo.gradient_accumulation_steps=1"],
    "two epochs": [
        "grpo.max_steps=6", "grpo.batch_size=8", "grpo.gradient_accumulation_steps=1", "data.train.limit=6",
    ],
    "two iterations": ["grpo.max_steps=5", "grpo.batch_size=8", "grpo.gradient_accumulation_steps=1", "grpo.num_iterations=2"],
    "a buffer over several steps": [
        "grpo.max_steps=5", "grpo.batch_size=4", "grpo.gradient_accumulation_steps=1", "grpo.steps_per_generation=3",
    ],
    "a refill": [
        "grpo.max_steps=4", "grpo.batch_size=8", "grpo.gradient_accumulation_steps=1", "grpo.resample={when_below: 1, max_rounds: 1}",
        "grpo.replay={max_age: 3}", "grpo.pools={hopeless: 2}",
    ],
    "accumulation": ["grpo.max_steps=3", "grpo.batch_size=4", "grpo.gradient_accumulation_steps=2"],
    "trl's own generation": ["grpo.max_steps=3", "grpo.batch_size=8", "grpo.gradient_accumulation_steps=1", "grpo.engine=transformers"],
}  # fmt: skip


@pytest.fixture(scope="module")
def after_sft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose SFT stage is finished."""
    return run(tmp_path_factory.mktemp("sft"), "grpo.enabled=false")


@pytest.mark.slow
@pytest.mark.parametrize("name", first(1, SETTINGS))
def test_grpo_continued_from_any_checkpoint_is_the_same_run(
    tmp_path: Path, after_sft: Path, name: str
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(after_sft, whole / "r")
    (whole / "r" / "config.yaml").unlink()
    settings = SETTINGS[name]
    _restart(whole, settings)
    done = whole / "r"
    assert len(rollouts(done)) > 0
    for checkpoint in checkpoints(done / "grpo")[1:]:
        step = int(checkpoint.name.rpartition("-")[2])
        other = tmp_path / f"from-{step}"
        shutil.copytree(done, other / "r")
        cut_back(other / "r", "grpo", step)
        run(other, *settings, resume=True)
        same(done, other / "r", "grpo")


STATEFUL = """
import os, signal
from pathlib import Path

class Counting:
    \"\"\"Pays by how many completions it has seen, and kills the run once, in the middle of a batch.\"\"\"

    low, high = 0.0, 1.0

    def __init__(self):
        self.seen = 0

    def __call__(self, completion):
        self.seen += 1
        here = Path(HERE)
        if self.seen == 27 and (here / "kill").exists():
            (here / "kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return (self.seen * 7 % 11) / 10

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

counting = Counting()
"""


@pytest.mark.slow
def test_a_stateful_reward_goes_on_where_a_kill_left_it(tmp_path: Path, after_sft: Path) -> None:
    """Uninterrupted, against killed in its fourth rollout batch and resumed: weights, rollouts and metrics are equal."""
    reward = tmp_path / "mine.py"
    reward.write_text(STATEFUL.replace("HERE", repr(str(tmp_path))))
    settings = [*SETTINGS["one batch, one step"], f"rewards=[{{name: '{reward}:counting'}}]"]
    for name in ("whole", "killed"):
        shutil.copytree(after_sft, tmp_path / name / "r")
        if name == "killed":
            (tmp_path / "kill").touch()
        code = "import json, sys; from tests.runs.test_checkpoint import _restart; _restart(*json.loads(sys.argv[1]))"
        command = [PYTHON, "-c", code, json.dumps([str(tmp_path / name), settings])]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
        assert done.returncode == (-signal.SIGKILL if name == "killed" else 0), done.stderr
    assert [c.name for c in checkpoints(tmp_path / "killed" / "r" / "grpo")] == [
        f"checkpoint-{n}" for n in (3, 2, 1)
    ]
    run(tmp_path / "killed", *settings, resume=True)
    values = [row["rewards"] for row in rollouts(tmp_path / "whole" / "r")]
    assert len(values) == 32 and len(set(values)) > 5
    same(tmp_path / "whole" / "r", tmp_path / "killed" / "r", "grpo")


@pytest.mark.slow
def test_the_reference_of_a_continued_run_is_the_start_of_its_stage(tmp_path: Path, after_sft: Path) -> None:
    """A copy of a model whose forward takes packed rows ran that model in its plain pass: the KL to the reference was 0."""
    reward = tmp_path / "mine.py"
    reward.write_text("def spread(completion):\n    return sum(map(ord, completion)) % 5 / 4\n")
    settings = [
        *SETTINGS["one batch, one step"],
        "grpo.beta=0.1",
        "grpo.learning_rate=3e-3",
        f"rewards=[{reward}:spread]",
    ]
    settings += ["grpo.logging_steps=1"]
    shutil.copytree(after_sft, tmp_path / "whole" / "r")
    _restart(str(tmp_path / "whole"), settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "continued")
    cut_back(tmp_path / "continued" / "r", "grpo", 3)
    run(tmp_path / "continued", *settings, resume=True)
    kl = [
        [row["kl"] for row in metrics(tmp_path / name / "r") if "kl" in row]
        for name in ("whole", "continued")
    ]
    assert kl[0] == kl[1] and len(kl[0]) == 4 and kl[0][-1] > 1e-3
    same(tmp_path / "whole" / "r", tmp_path / "continued" / "r", "grpo")


def _restart(folder: str, settings: list[str]) -> None:
    """Run GRPO in a folder that holds a finished SFT stage."""
    from algorist.config.yaml_text import to_yaml

    recipe = load_recipe("smoke-cpu", [*TINY, *settings, f"output_dir={folder}", "run_name=r"]).recipe
    Path(folder, "r", "config.yaml").write_text(to_yaml(recipe))
    run_recipe(recipe, resume=True)


def test_sft_continued_from_a_checkpoint_is_the_same_run(tmp_path: Path, after_sft: Path) -> None:
    shutil.copytree(after_sft, tmp_path / "r")
    cut_back(tmp_path / "r", "sft", 2)
    run(tmp_path, "grpo.enabled=false", resume=True)
    same(after_sft, tmp_path / "r", "sft")


def test_a_run_that_is_lengthened_has_the_rates_of_its_new_schedule_at_once(tmp_path: Path) -> None:
    settings = ("grpo.enabled=false", "sft.lr_scheduler=linear", "sft.warmup_ratio=0", "sft.logging_steps=1")
    longer = ("sft.max_steps=8",)
    run(tmp_path / "whole", *settings, *longer)
    run(tmp_path / "cut", *settings)
    cut_back(tmp_path / "cut" / "r", "sft", 2)
    run(tmp_path / "cut", *settings, *longer, resume=True)
    rates = [
        {
            row["step"]: row["learning_rate"]
            for row in metrics(tmp_path / name / "r")
            if "learning_rate" in row
        }
        for name in ("whole", "cut")
    ]
    assert [rates[0][step] for step in range(3, 9)] == [rates[1][step] for step in range(3, 9)]
    said = (tmp_path / "cut/r/training.log").read_text()
    short = sum("sft.max_steps" in line for line in said.splitlines())
    assert short == 1 and "sft.max_steps 4 → 8: the learning rate of step 3 is " in said
    was, now = re.search(r"step 3 is (\S+); without the change it would be (\S+)", said).groups()[::-1]
    assert float(now) == pytest.approx(rates[1][3], rel=1e-2) and float(was) < float(now)


def test_a_checkpoint_holds_what_it_says(after_sft: Path) -> None:
    newest, refused = newest_checkpoint(after_sft / "sft")
    assert newest is not None and newest.name == "checkpoint-4" and refused == []
    ended = json.loads((newest / MANIFEST).read_text())["files"]
    newest = newest.with_name("checkpoint-2")
    manifest = json.loads((newest / MANIFEST).read_text())
    weights = (newest.with_name("checkpoint-4") / "model.safetensors").stat()
    assert "optimizer.pt" not in ended and "trainer_state.json" in ended
    assert os.path.samestat(weights, (after_sft / "sft" / "final" / "model.safetensors").stat())
    assert {
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
        STATE,
    } <= set(manifest["files"])
    assert not list((after_sft / "sft").glob(".*"))
    assert not list(newest.glob("*.bin"))


def test_a_stage_that_is_lengthened_after_its_end_continues_from_a_checkpoint_that_can(
    after_sft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = ("grpo.enabled=false", "sft.max_steps=6", "sft.lr_scheduler=constant", "sft.warmup_ratio=0")
    whole = run(tmp_path / "whole", *longer)
    run(tmp_path, *longer, "sft.max_steps=4")
    shutil.rmtree(tmp_path / "r" / "sft" / "final")  # killed before the stage was closed
    (tmp_path / "r" / "stages.json").unlink()
    capsys.readouterr()
    run(tmp_path, *longer, resume=True)
    assert "checkpoint-4 ended the stage and is left out" in capsys.readouterr().err
    left, right = (load_file(path / "sft/final/model.safetensors") for path in (whole, tmp_path / "r"))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_save_total_limit(tmp_path: Path) -> None:
    path = run(tmp_path, "grpo.enabled=false", "sft.save_steps=1", "sft.save_total_limit=2")
    assert [p.name for p in checkpoints(path / "sft")] == ["checkpoint-4", "checkpoint-3"]


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A stage folder with checkpoint-1 and checkpoint-2."""
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(100) + bytes([step]))
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        write_manifest(folder, step)
    return tmp_path


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(bytes(data))


def _written_anew(checkpoint: Path, state: str) -> None:
    (checkpoint / "trainer_state.json").write_text(state)
    write_manifest(checkpoint, 2)


OUTSIDE = '{"step": 2, "files": {"../../x": {"bytes": 1, "sha256": ""}}}'
DAMAGES = {
    "one bit": (lambda p: _flip(p / "model.safetensors"), "model.safetensors has changed"),
    "cut short": (lambda p: (p / "model.safetensors").write_bytes(b"x"), "has 1 bytes, expected 101"),
    "a file gone": (lambda p: (p / "trainer_state.json").unlink(), "trainer_state.json is missing"),
    "no manifest": (lambda p: (p / MANIFEST).unlink(), "manifest.json is missing"),
    "a broken manifest": (lambda p: (p / MANIFEST).write_text("{"), "manifest.json cannot be read"),
    "a list for a manifest": (lambda p: (p / MANIFEST).write_text("[1]"), "manifest.json cannot be read"),
    "a path outside": (lambda p: (p / MANIFEST).write_text(OUTSIDE), "lies outside"),
    "another step": (lambda p: write_manifest(p, 9), "its files are of step 2 and 9, its name is of another"),
    "another trainer_state": (
        lambda p: _written_anew(p, '{"global_step": 1000000000}'),
        "of step 2 and 1000000000",
    ),
    "a list for a trainer_state": (lambda p: _written_anew(p, "[]"), "trainer_state.json cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(two: Path, kind: str) -> None:
    harm, words = DAMAGES[kind]
    harm(two / "checkpoint-2")
    newest, refused = newest_checkpoint(two)
    assert newest == two / "checkpoint-1" and len(refused) == 1
    assert "checkpoint-2 is damaged" in refused[0] and words in refused[0]


def test_none_left_is_an_error_with_the_way_out(two: Path) -> None:
    for step in (1, 2):
        _flip(two / f"checkpoint-{step}" / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"checkpoint-2 is damaged.*\n.*checkpoint-1 is damaged.*\n.*mv "
    ):
        newest_checkpoint(two)


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / ".saving").mkdir()
    assert newest_checkpoint(tmp_path) == (None, [])
    assert damage(tmp_path) == "manifest.json is missing"


def test_a_full_disk_while_saving_leaves_the_one_before(tmp_path: Path, after_sft: Path) -> None:
    """RLIMIT_FSIZE makes the kernel refuse to write a file any longer, as a full disk does."""
    import resource
    import signal

    shutil.copytree(after_sft, tmp_path / "r")
    cut_back(tmp_path / "r", "sft", 2)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"cannot write .*checkpoint-4.*checkpoint-2 is still there.*--resume"
        ):
            run(tmp_path, "grpo.enabled=false", resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert damage(tmp_path / "r" / "sft" / "checkpoint-2") == ""
    assert not (tmp_path / "r" / "sft" / ".saving").exists()
    run(tmp_path, "grpo.enabled=false", resume=True)
    same(after_sft, tmp_path / "r", "sft")


class Evil:
    """Pickled, it would make a file where it is read."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def _another_shape(file: Path) -> None:
    content = torch.load(file, weights_only=True)
    content["param_groups"][0]["params"] = [0]
    torch.save(content, file)


HOSTILE: dict[str, tuple[str, Callable[[Path], None]]] = {
    **{
        f"code in {name}": (name, lambda p: torch.save({"layout": 2, "x": Evil()}, p))
        for name in (STATE, "optimizer.pt")
    },
    **{
        f"code in {name}": (name, lambda p: torch.save([Evil()], p))
        for name in ("rng_state.pth", "scheduler.pt")
    },
    "no keys": (STATE, lambda p: torch.save({"layout": 2}, p)),
    "a list": (STATE, lambda p: torch.save([1], p)),
    "no pickle": ("scheduler.pt", lambda p: p.write_bytes(b"nothing")),
    "of another shape": ("optimizer.pt", _another_shape),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_checkpoint_is_refused_and_runs_nothing(
    case: str, after_sft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is in order. torch's own message would advise ``weights_only=False``."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(after_sft, tmp_path / "r")
    cut_back(tmp_path / "r", "sft", 2)
    checkpoint = tmp_path / "r" / "sft" / "checkpoint-2"
    name, harm = HOSTILE[case]
    harm(checkpoint / name)
    write_manifest(checkpoint, 2)
    with pytest.raises(CheckpointError, match=r"checkpoint-2 cannot be loaded.* mv ") as refused:
        run(tmp_path, "grpo.enabled=false", resume=True)
    assert "weights_only" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_what_a_continued_run_will_miss_is_said_at_once(
    after_sft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after the whole training."""
    shutil.copytree(after_sft, tmp_path / "r")
    cut_back(tmp_path / "r", "sft", 2)
    (tmp_path / "r" / "metrics.jsonl").unlink()
    file = tmp_path / "r" / "environment.json"
    known = json.loads(file.read_text())
    file.write_text(json.dumps(known | {"versions": known["versions"] | {"torch": "1.0"}}))
    run(tmp_path, "grpo.enabled=false", resume=True)
    said = capsys.readouterr().err
    assert "warning: metrics.jsonl is missing" in said and "warning: torch was 1.0 when the run began" in said
    for damaged in ("environment.json", "eval/sft.json"):
        (tmp_path / "r" / damaged).write_text("{")
        with pytest.raises(CheckpointError, match=f"{damaged} is damaged"):
            run(tmp_path, "grpo.enabled=false", resume=True)
        (tmp_path / "r" / damaged).write_text("{}")
