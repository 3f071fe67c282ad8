"""Rows of docs/requirements.md that a strict reader wanted to see: each test names the items that it shows."""

from __future__ import annotations

import ast
import gc
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import algorist
from algorist.cli import launch_command
from algorist.cli.doctor_command import bad_pair
from algorist.config.load import load_recipe
from algorist.config.schema import ModelSection, Recipe
from algorist.errors import ConfigError, DataError, MissingExtraError
from algorist.evaluation.artifact import read_artifact
from algorist.evaluation.record import record_evaluation
from algorist.evaluation.run import EvaluationSetting
from algorist.models.load import Policy, make_policy
from algorist.prompts import get_format
from algorist.prompts.chat import render_prompt
from algorist.rollouts import make_engine
from algorist.runs.pipeline import Quiet, run_recipe
from algorist.toolkit.oneshot import DEFAULT_GRPO_ARGS, _grpo_section
from algorist.training.sft import AlgoristSFTTrainer, Demonstration, make_sft_trainer
from algorist.types import Problem

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
QUESTION = "Tom has 14 apples. Tom buys 3 more. How many apples does Tom have?"


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    place = ("device=cpu", "threads=1", f"output_dir={folder}", "eval.enabled=false")
    return load_recipe("smoke-cpu", [*place, *overrides]).recipe


def tiny_policy(prompt_format: str = "reasoning_answer") -> Policy:
    section = ModelSection.model_validate(
        {
            "name": "tiny",
            "tiny": {"hidden_size": 32, "layers": 2, "vocab_size": 400, "max_position_embeddings": 1024},
        }
    )
    tags = get_format(prompt_format).tags.all()
    return make_policy(section, device=CPU, seed=0, texts=[QUESTION] * 20, tags=tags)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder in the hub's layout."""
    folder = tmp_path_factory.mktemp("model")
    policy = tiny_policy()
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


class Lines(Quiet):
    """Keep what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        """Keep one line."""
        self.said.append(text)


# --- runs


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
    recipe = recipe_of(tmp_path, "run_name=r", "grpo.max_steps=1", *changes)
    run_recipe(recipe, display=display, stages=stages)
    said = [line for line in display.said if "GRPO starts from" in line]
    log = (tmp_path / "r" / "training.log").read_text(encoding="utf-8")
    assert len(said) == int(told) and ("WARNING SFT is skipped" in log) == told
    if told:
        assert said[0].startswith("warning: SFT is skipped and ") and str(tmp_path / "r") in said[0]
        assert "GRPO starts from tiny as it is" in said[0] and "leave --skip-sft out" in said[0]


def test_grpo_behind_a_finished_sft_is_not_warned_about(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "run_name=r", "grpo.max_steps=1", "sft.max_steps=1")
    run_recipe(recipe, stages=("sft",))
    display = Lines()
    run_recipe(recipe, display=display, resume=True, stages=("grpo",))
    assert (tmp_path / "r/grpo/final").is_dir()
    assert not [line for line in display.said if "GRPO starts from" in line]


def test_after_each_stage_garbage_is_collected_and_the_cuda_cache_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    collect, empty, available = gc.collect, torch.cuda.empty_cache, torch.cuda.is_available

    def in_train() -> bool:
        frame = sys._getframe(2)
        return frame.f_code.co_name == "_train" and frame.f_globals["__name__"] == "algorist.runs.pipeline"

    def seen_collect(*given: Any) -> int:
        if in_train():
            events.append("collect")
        return collect(*given)

    def seen_empty() -> None:
        if in_train():
            events.append("empty_cache")
        empty()

    class Stages(Quiet):
        def step(self, stage: str, step: int, steps: int, values: dict[str, float], seconds: float) -> None:
            """Note that a stage trains."""
            if events[-1:] != [stage]:
                events.append(stage)

    monkeypatch.setattr(gc, "collect", seen_collect)
    monkeypatch.setattr(torch.cuda, "empty_cache", seen_empty)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: in_train() or available())
    run_recipe(recipe_of(tmp_path, "sft.max_steps=1", "grpo.max_steps=1"), display=Stages())
    assert events == ["sft", "collect", "empty_cache", "grpo", "collect", "empty_cache"]


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
        code = launch_command._work("smoke-cpu", given, False, ("sft", "grpo"))
        assert code == 0 and destroyed == [1] and not distributed.is_initialized()
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/again", rank=0, world_size=1)
        with pytest.raises(DataError):
            launch_command._work(
                "smoke-cpu", [*given, "run_name=b", "data.train={name: gsm8k, path: nowhere}"], False, ()
            )
        assert destroyed == [1, 1] and not distributed.is_initialized()
    finally:
        if distributed.is_initialized():
            destroy()


# --- the batch rule


def test_the_recipe_counts_its_processes() -> None:
    split = ["grpo.batch_size=4", "grpo.gradient_accumulation_steps=1", "grpo.group_size=8"]
    with pytest.raises(ConfigError, match=r"4 × 1 = 4 completions per step.*gradient_accumulation_steps=2"):
        load_recipe("smoke-cpu", split)
    assert load_recipe("smoke-cpu", [*split, "grpo.processes=2"]).recipe.grpo.processes == 2
    with pytest.raises(
        ConfigError, match=r"4 × 1 × 3 = 12 .*gradient_accumulation_steps=2, or .*group_size=6"
    ):
        load_recipe("smoke-cpu", [*split, "grpo.processes=3"])
    with pytest.raises(ConfigError, match=r"steps_per_generation × processes = 6"):
        load_recipe(
            "smoke-cpu",
            [
                "grpo.batch_size=3",
                "grpo.gradient_accumulation_steps=4",
                "grpo.group_size=8",
                "grpo.processes=2",
                "grpo.steps_per_generation=1",
            ],
        )


def test_a_run_counts_the_processes_that_it_has(tmp_path: Path) -> None:
    split = ["grpo.batch_size=4", "grpo.gradient_accumulation_steps=1", "grpo.group_size=8"]
    with pytest.raises(ConfigError, match=r"4 × 1 = 4 completions per step"):
        run_recipe(recipe_of(tmp_path, *split, "grpo.processes=2"))
    assert not list(tmp_path.iterdir())


# --- doctor


@pytest.mark.parametrize(
    ("vllm", "trl", "fits"),
    [
        ("0.21.9", "1.16.0", False),
        ("0.22.0", "1.16.0", True),
        ("0.24.0+cu129", "1.16.3", True),
        ("0.32.0", "1.16.0", True),
        ("0.33.0", "1.16.0", False),
        ("dev", "1.16.0", False),
        ("0.5.0", "2.0.0", True),  # of another TRL nothing is known; it is a problem of its own
    ],
)
def test_a_vllm_that_does_not_fit_trl_is_a_bad_pair(vllm: str, trl: str, fits: bool) -> None:
    told = bad_pair(vllm, trl)
    assert (told == "") == fits
    assert fits or (vllm in told and ">=0.22,<0.33" in told)


@pytest.mark.parametrize(("version", "fits"), [("0.21.0", False), ("0.22.0", True)])
def test_doctor_reports_a_vllm_that_imports_but_is_too_old(tmp_path: Path, version: str, fits: bool) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(f"__version__ = '{version}'\n")
    (tmp_path / f"vllm-{version}.dist-info").mkdir()
    (tmp_path / f"vllm-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)

    done = python("-m", "algorist.cli.main", "doctor", "--json", "--no-hub")
    found = json.loads(done.stdout)
    problems = [text for text in found["problems"] if version in text]
    if fits:
        assert found["vllm"] == f"{version} imports" and problems == []
    else:
        assert found["vllm"].startswith("bad pair: vLLM 0.21.0 imports, but TRL") and done.returncode == 1
        assert len(problems) == 1 and "pip install 'vllm>=0.22,<0.33'" in problems[0]
    warned = python("-c", "from trl.import_utils import is_vllm_available as a; print(a())").stderr
    assert ("TRL currently supports vLLM versions" in warned) != fits  # TRL itself says the same


# --- SFT batches


def test_labels_of_the_trainers_batches_are_the_output_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy()
    demos = [Demonstration(f"{n} + {n}?", f"it is {2 * n}" + " or so" * n) for n in range(6)]
    seen: list[dict[str, torch.Tensor]] = []
    loss = AlgoristSFTTrainer._loss

    def seen_loss(self: Any, model: Any, inputs: Any, *rest: Any) -> Any:
        seen.append({k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)})
        return loss(self, model, inputs, *rest)

    monkeypatch.setattr(AlgoristSFTTrainer, "_loss", seen_loss)
    changes = ["sft.batch_size=3", "sft.gradient_accumulation_steps=1", "sft.epochs=1"]
    trainer = make_sft_trainer(
        model=policy.model,
        tokenizer=policy.tokenizer,
        demos=demos,
        section=recipe_of(tmp_path, *changes, "sft.max_steps=null").sft,
        output_dir=tmp_path,
        seed=0,
        device=CPU,
    )
    trainer.train()
    assert [batch["labels"].shape[0] for batch in seen] == [3, 3]
    encode = policy.tokenizer
    expected = {}
    for demo in demos:
        prompt = encode(demo.prompt)["input_ids"]
        output = encode(demo.completion, add_special_tokens=False)["input_ids"] + [encode.eos_token_id]
        expected[tuple(prompt + output)] = [-100] * len(prompt) + output
    found = {}
    for batch in seen:
        assert batch["labels"].shape == batch["input_ids"].shape
        masks = batch.get("attention_mask", batch["input_ids"] != encode.pad_token_id)
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], masks.bool(), strict=True):
            assert set(labels[~mask].tolist()) <= {-100}
            found[tuple(ids[mask].tolist())] = labels[mask].tolist()
    assert found == expected


# --- the Python API


def test_use_vllm_turns_vllm_on(model: Path, shared_data: Path, tmp_path: Path) -> None:
    asked = {**DEFAULT_GRPO_ARGS, "use_vllm": True}
    assert _grpo_section(asked).engine == "vllm" and _grpo_section(DEFAULT_GRPO_ARGS).engine == "auto"
    assert _grpo_section(asked).vllm["gpu_memory_utilization"] == 0.3

    def setup() -> Any:
        return algorist.create_math_training_setup(
            str(model),
            path=shared_data / "gsm8k" / "train.jsonl",
            limit=12,
            output_dir=tmp_path,
            device="cpu",
            grpo_args={"use_vllm": True, "max_completion_length": 8},
        )

    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(MissingExtraError, match=r"vllm"):
            setup()
    else:
        assert setup().artifacts.trainer.engine.name == "vllm"


def test_the_defaults_of_the_text_generator() -> None:
    build = inspect.signature(algorist.build_text_generator).parameters
    assert build["model_id"].default == "HarleyCooper/GRPOtuned"
    ask = inspect.signature(algorist.generate_math_solution).parameters
    assert (ask["max_new_tokens"].default, ask["temperature"].default) == (200, 0.9)
    assert ask["generator"].default is None  # then it builds its own
    assert next(iter(ask)) == "question"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_a_users_own_wandb_run_gets_the_metrics(
    model: Path, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    from tests.runs.test_tracking import wandb_records

    monkeypatch.setenv("WANDB_SILENT", "true")
    own = wandb.init(mode="offline", project="mine", dir=str(tmp_path))
    try:
        setup = algorist.create_math_training_setup(
            str(model),
            path=shared_data / "gsm8k" / "train.jsonl",
            limit=12,
            output_dir=tmp_path / "run",
            device="cpu",
            report_to="wandb",
            grpo_args={
                "num_generations": 4,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "max_completion_length": 12,
                "max_steps": 2,
            },
        )
        algorist.run_training(setup.artifacts)
        assert wandb.run is own
    finally:
        wandb.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = wandb_records(file)
    lines = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    logged = [row for row in setup.artifacts.trainer.state.log_history if "loss" in row]
    told = [row for row in lines if "train/loss" in row]
    assert [row["train/global_step"] for row in told] == [1, 2]
    for name in ("loss", "reward", "reward_std", "rewards/correctness_numeric/mean"):
        assert [row[f"train/{name}"] for row in told] == pytest.approx([row[name] for row in logged])
    config: dict[str, Any] = {}
    for record in records:
        kind = record.WhichOneof("record_type")
        update = (
            record.config.update if kind == "config" else record.run.config.update if kind == "run" else ()
        )
        config |= {i.key: json.loads(i.value_json) for i in update if i.key}
    assert (config["per_device_train_batch_size"], config["max_steps"]) == (8, 2)
    assert config["learning_rate"] == DEFAULT_GRPO_ARGS["learning_rate"]


# --- evaluation


def test_a_completion_ends_behind_the_stop_string_and_is_graded_with_it(tmp_path: Path) -> None:
    form, policy = get_format("r1_zero"), tiny_policy("r1_zero")
    problem = Problem("p", "2 + 2?", "4")
    prompt = render_prompt(form, policy.tokenizer, problem.question)
    told = "it is four </think> <answer> 4 </answer> <answer> 5 </answer> How many apples?"
    changes = ["sft.max_steps=60", "sft.learning_rate=1e-2", "sft.batch_size=1", "sft.lr_scheduler=constant"]
    make_sft_trainer(
        model=policy.model,
        tokenizer=policy.tokenizer,
        demos=[Demonstration(prompt, told)],
        section=recipe_of(tmp_path, *changes, "sft.gradient_accumulation_steps=1", "sft.max_length=null").sft,
        output_dir=tmp_path / "sft",
        seed=0,
        device=CPU,
    ).train()
    section = load_recipe("math-baseline").recipe.eval
    assert section.stop_strings == ["</answer>"]
    section = section.model_copy(update={"max_completion_tokens": 100})
    found = {}
    for name, stops in (("whole", []), ("stopped", section.stop_strings)):
        setting = EvaluationSetting.from_section(
            section.model_copy(update={"stop_strings": stops}), max_tokens=9, matcher="symbolic", seed=0
        )
        record_evaluation(
            tmp_path,
            name,
            engine=make_engine("native", policy.model, policy.tokenizer),
            tokenizer=policy.tokenizer,
            problems=[problem],
            prompt_format=form,
            setting=setting,
            ks=[1],
            rewards=None,
            model="m",
            dataset="d",
        )
        found[name] = read_artifact(tmp_path, name)
    whole, stopped = (next(r for r in found[n].samples if r["greedy"]) for n in ("whole", "stopped"))
    assert whole["completion"].strip() == told and not whole["correct"]
    assert stopped["completion"].strip() == "it is four </think> <answer> 4 </answer>"
    assert stopped["correct"] and stopped["well_formed"] and stopped["extracted"] == "4"
    assert not stopped["truncated"] and stopped["completion_tokens"] < whole["completion_tokens"]
    assert all(r["completion"].endswith("</answer>") for r in found["stopped"].samples if not r["truncated"])
    assert found["stopped"].protocol["stop_strings"] == ["</answer>"]
    assert "stop_strings" not in found["whole"].protocol


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval\.stop_strings has an empty text"):
        load_recipe("math-baseline", ["eval.stop_strings=['']"])


# --- types


def untyped(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            named += [a for a in (given.vararg, given.kwarg) if a]
            bare = [a.arg for a in named if a.annotation is None and a.arg not in ("self", "cls")]
            found += [f"{node.name}({', '.join(bare)})"] if bare or node.returns is None else []
    return found


def test_every_function_and_method_is_typed_and_mypy_asks_for_it() -> None:
    assert untyped(ast.parse("class A:\n    def f(self, x) -> int: ...\ndef g(*a: int): ...")) == [
        "g()",
        "f(x)",
    ]
    sources = sorted((ROOT / "src/algorist").rglob("*.py"))
    found = {path.name: untyped(ast.parse(path.read_text(encoding="utf-8"))) for path in sources}
    assert len(found) > 100 and {name: lines for name, lines in found.items() if lines} == {}
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert told["disallow_untyped_defs"] is True and told["files"] == ["src/algorist"]


def test_the_hub_is_asked_for_main_and_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that would go over the network, by name, configuration and split; the rows are read as any others."""
    import datasets

    asked: list[Any] = []

    def load_dataset(*given: Any, **named: Any) -> Any:
        asked.append((given, named))
        return datasets.Dataset.from_list([{"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = algorist.load_gsm8k()
    assert asked == [(("openai/gsm8k", "main"), {"split": "train"})]
    assert [row["question"] for row in rows] == ["1 + 1?"]
