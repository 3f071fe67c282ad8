"""Stages of a run, together and alone: where GRPO starts, what is kept, logged and evaluated."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from algorist.cli.arguments import find_model
from algorist.cli.run_command import run_stages
from algorist.cli.session import work
from algorist.config.load import load_recipe
from algorist.config.schema import Recipe
from algorist.config.section import ModelSection
from algorist.errors import CheckpointError, ConfigError, DataError
from algorist.evaluation.artifact import read_artifact
from algorist.models.load import make_policy
from algorist.prompts import get_format
from algorist.runs.pipeline import Quiet, Run, run_recipe
from algorist.runs.solve import Solver
from algorist.store.stages import STAGES
from tests.conftest import Cli
from tests.tiny import smoke_recipe

CPU = torch.device("cpu")


TINY = ModelSection.model_validate(
    {"name": "tiny", "tiny": {"hidden_size": 32, "layers": 2, "vocab_size": 400}}
)


TEXTS = ["Tom has 14 apples. Tom buys 3 more. How many apples does Tom have?"] * 20


def settings(*overrides: str, name: str = "oneshot-gsm8k") -> Recipe:
    return load_recipe(name, list(overrides)).recipe


class Watch(Quiet):
    """Counts the SFT trainers that are alive while GRPO trains."""

    def __init__(self) -> None:
        self.alive: list[int] = []

    def step(self, stage: str, step: int, steps: int, values: dict[str, float], seconds_left: float) -> None:
        """Look at every GRPO step."""
        from algorist.training.sft import AlgoristSFTTrainer

        if stage == "grpo":
            gc.collect()
            self.alive.append(sum(type(o) is AlgoristSFTTrainer for o in gc.get_objects()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watch, Run]:
    """A run in two calls; GRPO's learning rate is so small that its adapter stays that of SFT."""
    folder = tmp_path_factory.mktemp("adapter")
    tags = get_format("reasoning_answer").tags.all()
    base = make_policy(TINY, device=CPU, seed=0, texts=TEXTS, tags=tags)
    base.model.save_pretrained(folder / "base")
    base.tokenizer.save_pretrained(folder / "base")
    place = ("device=cpu", "threads=1", f"output_dir={folder}", "run_name=r")
    model = (f"model.name={folder / 'base'}", "model.lora={rank: 4, alpha: 8}")
    rates = ("sft.learning_rate=1e-2", "grpo.learning_rate=1e-12", "grpo.eval_every=1")
    recipe = settings(*place, *model, *rates, name="smoke-cpu")
    watch = Watch()
    run_recipe(recipe, stages=("sft",))
    assert not (folder / "r" / "grpo").exists()
    return folder / "r", watch, run_recipe(recipe, resume=True, stages=("grpo",), display=watch)


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_grpo_alone_starts_from_the_adapter_of_sft(runs: tuple[Path, Watch, Run]) -> None:
    path, _, _ = runs
    sft, grpo = adapter(path / "sft" / "final"), adapter(path / "grpo" / "final")
    assert sft.keys() == grpo.keys()
    assert all(torch.allclose(sft[key], grpo[key], rtol=0, atol=1e-9) for key in sft)
    assert max(float(value.abs().max()) for key, value in sft.items() if "lora_B" in key) > 1e-3


def test_nothing_of_sft_is_alive_while_grpo_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, emptied = Watch(), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(watch.alive)))
    overrides = ("device=cpu", "threads=1", f"output_dir={tmp_path}", "eval.enabled=false")
    run_recipe(settings(*overrides, name="smoke-cpu"), display=watch)
    assert watch.alive and set(watch.alive) == {0}
    assert emptied[0] == 0  # the CUDA cache, before the first step of GRPO


def test_files_of_checkpoints_and_of_the_final_adapter(runs: tuple[Path, Watch, Run]) -> None:
    saved = {"adapter_config.json", "adapter_model.safetensors"}
    tokenizer = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    state = {"optimizer.pt", "scheduler.pt", "trainer_state.json"}
    for stage in ("sft", "grpo"):
        newest = sorted((runs[0] / stage).glob("checkpoint-*"))[-1]
        names = {p.name for p in newest.iterdir()}
        assert saved | tokenizer | {"trainer_state.json"} <= names and "optimizer.pt" not in names
        final = {p.name for p in (runs[0] / stage / "final").iterdir()}
        assert saved | tokenizer <= final and not state & final


def test_a_run_says_what_its_seconds_went_to(runs: tuple[Path, Watch, Run]) -> None:
    seconds = json.loads((runs[0] / "times.json").read_text())
    assert set(seconds) == {"loading", "sft", "grpo", "evaluation", "saving", "other"}
    assert all(value > 0 for value in seconds.values())


def test_held_out_evaluation_during_training_keeps_subjects(runs: tuple[Path, Watch, Run]) -> None:
    path, _, run = runs
    assert {"grpo-step-1", "grpo"} <= set(run.summaries)
    found = read_artifact(path / "eval", "grpo-step-1")
    assert all(row["subject"] for row in found.samples) and len({r["subject"] for r in found.samples}) > 1
    assert all(row["has_reasoning"] == (row["reasoning_characters"] > 0) for row in found.samples)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert any({"eval/greedy_accuracy", "eval/format"} <= set(row) for row in lines)


def test_every_step_logs_each_reward_lengths_and_times(runs: tuple[Path, Watch, Run]) -> None:
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in lines if row["stage"] == "grpo" and "loss" in row]
    wanted = {
        "learning_rate",
        "epoch",
        "reward",
        "reward_std",
        "entropy",
        "rollout/tokens_per_s",
        "time/step_s",
    }
    wanted |= {f"rewards/{name}/{kind}" for name in ("correct", "well_formed") for kind in ("mean", "std")}
    wanted |= {"completions/mean_length", "completions/min_length", "completions/max_length"}
    assert len(steps) == 2 and all(wanted <= set(row) for row in steps)


def test_the_log_file_has_time_name_level_and_message(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(8)))
    same = f"{{name: local, path: '{rows}'}}"
    overrides = (f"data.train={same}", f"data.eval={same}", "sft.enabled=false", "grpo.enabled=false")
    line = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ algorist\.[\w.]+ WARNING .*8 of 8 held-out problems are also in the training data"
    live: list[bool] = []

    class Reading(Quiet):
        def say(self, text: str) -> None:  # while the run lasts
            log = tmp_path / "smoke-cpu" / "training.log"
            live.append(log.is_file() and re.search(line, log.read_text(encoding="utf-8"), re.M) is not None)

    recipe = settings(*overrides, "device=cpu", f"output_dir={tmp_path}", name="smoke-cpu")
    run_recipe(recipe, display=Reading())
    assert live[0]


def test_answers_from_an_adapter_are_saved(
    runs: tuple[Path, Watch, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from algorist.cli.solve_command import app

    solver = Solver.load(runs[0] / "grpo" / "final", recipe=runs[2].recipe)
    (told,) = solver.solve(["What is 15 * 23?"], max_new_tokens=8)
    file = tmp_path / "more" / "answers.jsonl"
    words = [
        "What is 15 * 23?",
        "--model",
        str(runs[0]),
        "--max-new-tokens",
        "8",
        "--save",
        str(file),
        "--json",
    ]
    for _ in range(2):
        app(words, standalone_mode=False)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert rows == [told, told] and told["completion"]
    assert [json.loads(line)["answers"][0] for line in capsys.readouterr().out.splitlines()] == rows


@pytest.mark.slow
def test_eval_on_the_command_line_leaves_an_artifact(
    runs: tuple[Path, Watch, Run], real_data: Path, tmp_path: Path, call: Cli
) -> None:
    file = real_data / "gsm8k" / "test.jsonl"
    command = ("eval", str(runs[0]), "--dataset", "gsm8k", "--path", str(file))
    done = call(
        *command, "--limit", "2", "--samples", "0", "--out", str(tmp_path), "--name", "test", "--json"
    )
    (told,) = json.loads(done.stdout)["evaluations"]
    found = read_artifact(tmp_path, "test")
    right = sum(row["correct"] for row in found.samples)
    assert told["metrics"]["greedy_accuracy"]["value"] == right / 2, done.stderr
    assert len(found.samples) == 2 and found.protocol["batch_size"] and found.dataset == "gsm8k"


class Lines(Quiet):
    """Keep what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        """Keep one line."""
        self.said.append(text)


@pytest.mark.parametrize(
    ("stages", "changes", "told"),
    [
        (("grpo",), [], True),
        (("grpo",), ["sft.enabled=false"], False),
        (("sft", "grpo"), ["sft.max_steps=1"], False),
    ],
)
def test_grpo_without_any_sft_is_told(
    tmp_path: Path, stages: tuple[str, ...], changes: list[str], told: bool
) -> None:
    display = Lines()
    recipe = smoke_recipe(tmp_path, "run_name=r", "grpo.max_steps=1", *changes)
    run_recipe(recipe, display=display, stages=stages)
    said = [line for line in display.said if "GRPO starts from" in line]
    log = (tmp_path / "r" / "training.log").read_text(encoding="utf-8")
    assert len(said) == int(told) and ("WARNING SFT is skipped" in log) == told
    if told:
        assert said[0].startswith("warning: SFT is skipped and ") and str(tmp_path / "r") in said[0]
        assert "GRPO starts from tiny as it is" in said[0] and "algorist run RECIPE --only sft" in said[0]


@pytest.mark.long
def test_the_switches_skip_a_stage_and_start_from_its_checkpoint(call: Cli, tmp_path: Path) -> None:
    words = (
        "run",
        "smoke-cpu",
        "run_name=r",
        "eval.enabled=false",
        "grpo.max_steps=1",
        "grpo.learning_rate=1e-12",
    )
    done = call(*words, "--only", "sft")
    run = tmp_path / "runs" / "r"
    assert done.returncode == 0 and (run / "sft/final").is_dir() and not (run / "grpo").exists(), done.stderr
    done = call(*words, "--only", "grpo", "--resume")
    assert done.returncode == 0 and "GRPO starts from" not in done.stderr, done.stderr
    sft, grpo = (load_file(run / stage / "final/model.safetensors") for stage in ("sft", "grpo"))
    assert all(torch.allclose(sft[name], grpo[name], rtol=0, atol=1e-9) for name in sft)


def test_grpo_behind_a_finished_sft_is_not_warned_about(tmp_path: Path) -> None:
    recipe = smoke_recipe(tmp_path, "run_name=r", "grpo.max_steps=1", "sft.max_steps=1")
    run_recipe(recipe, stages=("sft",))
    display = Lines()
    run_recipe(recipe, display=display, resume=True, stages=("grpo",))
    assert (tmp_path / "r/grpo/final").is_dir()
    assert not [line for line in display.said if "GRPO starts from" in line]


def test_the_process_group_is_destroyed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = torch.distributed
    destroyed: list[int] = []
    destroy = distributed.destroy_process_group

    def seen_destroy(*given: Any) -> None:
        destroyed.append(distributed.get_world_size())
        destroy(*given)

    monkeypatch.setattr(distributed, "destroy_process_group", seen_destroy)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.chdir(tmp_path)
    off = ["sft.enabled=false", "grpo.enabled=false", "data.eval.params.count=2"]
    given = ["device=cpu", *off, "eval.baseline=true", "eval.samples=0", "eval.max_completion_tokens=8"]
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        code = work(
            "smoke-cpu", given, False, STAGES, lambda: run_stages("smoke-cpu", given, False, STAGES, False)
        )
        assert code.code() == 0 and destroyed == [1] and not distributed.is_initialized()
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/again", rank=0, world_size=1)
        with pytest.raises(DataError):
            own = [*given, "run_name=b", "data.train={name: gsm8k, path: nowhere}"]
            work("smoke-cpu", own, False, (), lambda: run_stages("smoke-cpu", own, False, (), False))
        assert destroyed == [1, 1] and not distributed.is_initialized()
    finally:
        if distributed.is_initialized():
            destroy()


def test_a_run_counts_the_processes_that_it_has(tmp_path: Path) -> None:
    split = ["grpo.batch_size=4", "grpo.gradient_accumulation_steps=1", "grpo.group_size=8"]
    with pytest.raises(ConfigError, match=r"4 × 1 = 4 completions per step"):
        run_recipe(smoke_recipe(tmp_path, *split, "grpo.processes=2"))
    assert not list(tmp_path.iterdir())


def test_steps_that_are_done_again_are_said(tmp_path: Path) -> None:
    class Heard(Quiet):
        def say(self, line: str) -> None:
            lines.append(line)

    lines: list[str] = []
    short = [
        "sft.max_steps=3",
        "sft.save_steps=2",
        "sft.logging_steps=1",
        "eval.enabled=false",
        f"output_dir={tmp_path}",
    ]
    recipe = load_recipe("smoke-cpu", [*short, "threads=1"]).recipe
    folder = run_recipe(recipe, stages=["sft"], display=Quiet()).folder.path
    (folder / "stages.json").unlink()
    shutil.rmtree(folder / "sft" / "final")
    shutil.rmtree(folder / "sft" / "checkpoint-3", ignore_errors=True)  # as if it had been killed in step 4
    run_recipe(recipe, stages=["sft"], display=Heard(), resume=True)
    assert "sft: continuing from checkpoint-2; it had come to step 3" in lines
    (folder / "stages.json").unlink()
    shutil.rmtree(folder / "sft")
    run_recipe(recipe, stages=["sft"], display=Heard(), resume=True)
    assert "sft: beginning again, as no checkpoint was saved; it had come to step 3" in lines


def test_a_finished_model_that_was_cut_is_made_again_from_a_checkpoint(tmp_path: Path) -> None:
    sizes = ["sft.max_steps=3", "sft.save_steps=1", "grpo.max_steps=1", "eval.enabled=false", "threads=1"]
    recipe = load_recipe("smoke-cpu", [*sizes, f"output_dir={tmp_path}"]).recipe
    folder = run_recipe(recipe, stages=["sft"], display=Quiet()).folder.path
    weights = folder / "sft/final/model.safetensors"
    whole = weights.read_bytes()
    os.truncate(weights, 40_000)  # the same file as the last checkpoint's
    with pytest.raises(CheckpointError, match=r"is gone or damaged\. Make it again: algorist run"):
        find_model(str(folder))
    run_recipe(recipe, display=Quiet(), resume=True)
    log = (folder / "training.log").read_text()
    assert "sft begins, whose model, sft/final, is gone or damaged" in log
    assert weights.read_bytes() == whole and (folder / "grpo/final").is_dir()


def test_evaluations_leave_the_training_as_it_is(tmp_path: Path) -> None:
    def lengths(name: str, *more: str) -> list[Any]:
        short = ["sft.max_steps=1", "grpo.max_steps=3", "grpo.learning_rate=1e-3", "threads=1"]
        adapter = [
            "model.lora={rank: 4, dropout: 0.1}",
            "eval.samples=0",
            f"output_dir={tmp_path}",
            f"run_name={name}",
        ]
        run = run_recipe(load_recipe("smoke-cpu", [*short, *adapter, *more]).recipe, display=Quiet())
        rows = map(json.loads, (run.folder.path / "metrics.jsonl").read_text().splitlines())
        return [row["grad_norm"] for row in rows if row["stage"] == "grpo" and "grad_norm" in row]

    evaluated = lengths("evaluated", "grpo.stop={patience: 9, on: [plateau]}", "grpo.eval_every=2")
    assert len(evaluated) == 3 and evaluated == lengths("plain")
