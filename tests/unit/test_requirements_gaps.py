"""Items of the reference systems that no other test shows, named in the tests' names (docs/requirements.md has all)."""

from __future__ import annotations

import ast
import gc
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from algorist.config.load import load_recipe
from algorist.config.schema import DatasetSection, ModelSection, Recipe
from algorist.data import DATASETS, Source, dataset, load_problems
from algorist.errors import ConfigError, MissingExtraError
from algorist.evaluation.artifact import read_artifact
from algorist.evaluation.estimators import summarise
from algorist.grading import grade, grade_completion
from algorist.models.load import make_policy, prepare_tokenizer
from algorist.models.precision import pick_precision
from algorist.prompts import get_format
from algorist.prompts.chat import render_prompt
from algorist.prompts.of_recipe import recipe_format
from algorist.rewards import build_rewards
from algorist.runs.pipeline import Quiet, Run, run_recipe
from algorist.runs.solve import Solver
from algorist.training.sft import Demonstration, make_sft_trainer, tokenize_demonstrations
from algorist.training.stock import stock_config
from algorist.training.training_arguments import optim_arguments
from algorist.types import Problem

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "algorist"
CPU = torch.device("cpu")
TINY = ModelSection.model_validate(
    {"name": "tiny", "tiny": {"hidden_size": 32, "layers": 2, "vocab_size": 400}}
)
TEXTS = ["Tom has 14 apples. Tom buys 3 more. How many apples does Tom have?"] * 20


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own; the deciding variables are those given."""
    unset = ("TRANSFORMERS_NO_TF", "TRANSFORMERS_NO_TENSORFLOW", "USE_TF")
    base = {k: v for k, v in os.environ.items() if k not in unset}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**base, "OMP_NUM_THREADS": "1", **environment},
    )


# --- install, environment, documents


def test_installed_with_the_stated_dependencies() -> None:
    direct = importlib.metadata.distribution("algorist").read_text("direct_url.json")
    assert direct is not None and json.loads(direct)["dir_info"]["editable"]  # as make test installs it
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    for name, least in (("datasets", "2.18"), ("transformers", "4.38"), ("trl", "0.10"), ("wandb", "0.16")):
        assert not asked[name].contains(_below(least)), name
    assert project["requires-python"] == ">=3.11"


def _below(version: str) -> str:
    major, minor = version.split(".")
    return f"{major}.{int(minor) - 1}.9"


@pytest.mark.parametrize(("given", "expected"), [({}, "1 1 0"), ({"USE_TF": "1"}, "1 1 1")])
def test_tensorflow_is_kept_out_unless_asked_for(given: dict[str, str], expected: str) -> None:
    code = (
        "import os, algorist; "
        "print(*(os.environ[n] for n in ('TRANSFORMERS_NO_TF', 'TRANSFORMERS_NO_TENSORFLOW', 'USE_TF')))"
    )
    done = python("-c", code, **given)
    assert done.stdout.split() == expected.split(), done.stderr


def test_doctor_reports_versions_devices_and_a_broken_vllm(tmp_path: Path) -> None:
    command = ("-m", "algorist.cli.main", "doctor", "--json", "--no-hub")
    found = json.loads(python(*command).stdout)
    assert found["versions"]["trl"].startswith("1.16.") and found["versions"]["python"]
    assert str(torch.get_num_threads()) in found["device"] or "CUDA" in found["device"]
    assert "GiB free" in found["disk"]
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.12: not found')\n")
    (tmp_path / "vllm-0.17.0.dist-info").mkdir()
    (tmp_path / "vllm-0.17.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.17.0\n"
    )
    broken = python(*command, PYTHONPATH=str(tmp_path))
    told = json.loads(broken.stdout)
    assert broken.returncode == 1 and "libcudart" in told["vllm"]
    assert any("install vllm first, then trl" in text for text in told["problems"])


def test_documents_say_what_must_be_said() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = " ".join(" ".join(p.read_text(encoding="utf-8") for p in pages).split())
    assert re.search(r"vLLM [^.]*installed before trl", text)
    assert re.search(r"everal GPUs with (PEFT|LoRA) [^.]*unstable|LoRA with several GPUs is unstable", text)
    assert (ROOT / "docs" / "evaluation.md").is_file()


def test_sources_compile_are_typed_and_log_under_the_package() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = "algorist." + path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger" and node.args:
                name = (
                    ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else "algorist"
                )
                library = name.partition(".")[0] in {"transformers", "trl", "datasets", "accelerate"}
                assert library or f"{module}.".startswith(f"{name}."), f"{path.name}: logger {name}"
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                assert node.returns is not None, f"{path.name}: {node.name} has no return type"
                named = [*node.args.args, *node.args.kwonlyargs]
                assert all(a.annotation for a in named), f"{path.name}: {node.name} has an untyped argument"
    assert (SOURCE / "py.typed").is_file()


# --- prompts


@pytest.mark.parametrize("name", ["reasoning_answer", "working_solution", "think_answer"])
def test_each_tag_stands_on_its_own_line(name: str) -> None:
    form = get_format(name)
    lines = (form.prefill() + form.demonstrate("6 * 7", "42")).split("\n")
    gap = [] if name != "think_answer" else [""]
    t = form.tags
    assert lines[:3] == [t.reasoning_open, "6 * 7", t.reasoning_close]
    assert lines[3:] == [*gap, t.answer_open, "42", t.answer_close]


@pytest.mark.parametrize("name", ["reasoning_answer", "working_solution", "think_answer"])
def test_system_prompts_show_their_tags(name: str) -> None:
    form = get_format(name)
    assert all(tag in form.system_prompt for tag in form.tags.all())
    assert form.system_prompt == form.system_prompt.strip()
    if name == "reasoning_answer":
        assert form.system_prompt.count("\n...\n") == 2


def test_a_prompt_is_a_system_and_a_user_message() -> None:
    rendered = get_format("working_solution").render("  1 + 1? \n")
    assert isinstance(rendered, list)
    assert [m["role"] for m in rendered] == ["system", "user"] and rendered[1]["content"] == "1 + 1?"


def test_raw_prompts() -> None:
    text = get_format("r1_zero").render("1 + 1?")
    assert isinstance(text, str)
    assert text.endswith("\nUser: 1 + 1?\nAssistant: <think>") and text.count("\n") == 2
    assert "</think> <answer>" in text
    plain = get_format("question_only").render("1 + 1?")
    assert plain == "1 + 1?" or (isinstance(plain, list) and [m["content"] for m in plain] == ["1 + 1?"])


def test_system_prompt_from_a_file_is_stripped(tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("\n  Réponds en <answer>.\n\n", encoding="utf-8")
    recipe = load_recipe("oneshot-gsm8k", [f"prompt.system_prompt_path={file}"]).recipe
    assert recipe_format(recipe).system_prompt == "Réponds en <answer>."
    with pytest.raises(ConfigError, match="system_prompt_path"):
        recipe_format(load_recipe("oneshot-gsm8k", [f"prompt.system_prompt_path={tmp_path}/no"]).recipe)


def test_a_system_prompt_without_tags_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    recipe_format(load_recipe("oneshot-gsm8k").recipe)
    assert not caplog.records
    recipe_format(load_recipe("oneshot-gsm8k", ["prompt.system_prompt=Just answer."]).recipe)
    assert "never shows <reasoning>, </reasoning>, <answer>, </answer>" in caplog.text


def test_chat_template_of_the_recipe_takes_any_text() -> None:
    recipe = load_recipe("sft-grpo-dapo").recipe
    section = TINY.model_copy(update={"chat_template": recipe.model.chat_template})
    tags = get_format("working_solution").tags.all()
    tokenizer = make_policy(section, device=CPU, seed=0, texts=TEXTS, tags=tags).tokenizer
    form = replace(recipe_format(recipe), system_prompt="It's {{ 'so' }}: {% raw %}")
    text = render_prompt(form, tokenizer, "What's 15 * 23?")
    end = str(tokenizer.eos_token)
    assert text == f"It's {{{{ 'so' }}}}: {{% raw %}}{end}What's 15 * 23?<start_working_out>\n"


def test_a_tokenizer_without_template_and_pad_gets_both() -> None:
    tokenizer = make_policy(TINY, device=CPU, seed=0, texts=TEXTS).tokenizer
    tokenizer.pad_token, tokenizer.chat_template = None, None
    prepare_tokenizer(tokenizer, None)
    assert tokenizer.pad_token == tokenizer.eos_token
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert asked == "s\n\nUser: q\nAssistant: "
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "s\n\nUser: q\n"


# --- settings


def settings(*overrides: str, name: str = "oneshot-gsm8k") -> Recipe:
    return load_recipe(name, list(overrides)).recipe


def arguments_of(recipe: Recipe, folder: Path) -> Any:
    weights = [r.weight for r in recipe.rewards]
    shared = optim_arguments(recipe.grpo, output_dir=folder, seed=0, device=CPU, report_to=recipe.report_to)
    return stock_config(recipe.grpo, shared, weights)


def test_trackers_are_off_until_named_and_bf16_follows_the_device(tmp_path: Path) -> None:
    plain = arguments_of(settings(), tmp_path)
    assert plain.report_to == [] and not plain.bf16 and not plain.use_vllm
    assert arguments_of(settings("report_to=[wandb]"), tmp_path).report_to == ["wandb"]
    assert (plain.max_completion_length, settings().data.train.max_prompt_tokens) == (200, 256)


def test_vllm_settings_reach_trl(tmp_path: Path) -> None:
    asked = arguments_of(settings("grpo.engine=vllm"), tmp_path)
    assert (asked.use_vllm, asked.vllm_mode, asked.vllm_gpu_memory_utilization) == (True, "colocate", 0.3)


def test_a_zero_override_counts_or_is_refused() -> None:
    recipe = settings("grpo.weight_decay=0", "grpo.min_p=0", "seed=0", name="sft-grpo-dapo")
    assert (recipe.grpo.weight_decay, recipe.grpo.min_p, recipe.seed) == (0.0, 0.0, 0)
    with pytest.raises(ConfigError, match=r"grpo\.learning_rate"):
        settings("grpo.learning_rate=0")


@pytest.mark.parametrize(("batch", "accumulation", "works"), [(4, 1, 2), (2, 2, 4), (1, 1, 8)])
def test_the_batch_rule_names_what_works(batch: int, accumulation: int, works: int) -> None:
    wrong = (f"grpo.batch_size={batch}", f"grpo.gradient_accumulation_steps={accumulation}")
    with pytest.raises(ConfigError, match=f"take grpo.gradient_accumulation_steps={works}"):
        settings(*wrong, name="r1-zero-numina")
    right = settings(wrong[0], f"grpo.gradient_accumulation_steps={works}", name="r1-zero-numina").grpo
    assert right.batch_size * right.gradient_accumulation_steps % right.group_size == 0


def test_no_code_of_the_models_runs_and_the_main_revision_is_taken() -> None:
    model = settings(name="r1-zero-numina").model
    assert model.trust_remote_code is False and model.revision is None
    assert settings("model.trust_remote_code=true").model.trust_remote_code is True
    assert settings("model.attn_implementation=flash_attention_2").model.attn_implementation is not None
    assert pick_precision(ModelSection(dtype="bfloat16"), CPU).master is torch.bfloat16
    assert pick_precision(ModelSection(), CPU).master is torch.float32


def test_unsloth_that_is_not_installed_says_how_to_get_it() -> None:
    if importlib.util.find_spec("unsloth") is not None:
        pytest.skip("unsloth is installed")
    with pytest.raises(MissingExtraError, match=r"pip install .*unsloth_zoo.*model\.backend=transformers"):
        make_policy(ModelSection(name="Qwen/Qwen3-4B-Base", backend="unsloth"), device=CPU, seed=0)


# --- data


def test_golds_of_gsm8k_lose_commas_and_dollars_and_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "So $5.\n#### $1,234"}) + "\n")
    (problem,) = load_problems(DatasetSection(name="gsm8k", path=str(path)))
    assert (problem.answer, problem.solution) == ("1234", "So $5.")


def test_a_dataset_of_ones_own_is_one_function() -> None:
    @dataset("doubling_in_test")
    def load(source: Source) -> list[Problem]:
        """2 n for each n below params.count."""
        return [Problem(str(n), f"2 * {n}?", str(2 * n)) for n in range(source.params["count"])]

    try:
        found = load_problems(DatasetSection(name="doubling_in_test", params={"count": 3}))
        assert [(p.question, p.answer) for p in found] == [("2 * 0?", "0"), ("2 * 1?", "2"), ("2 * 2?", "4")]
    finally:
        DATASETS._entries.pop("doubling_in_test")


def test_demonstrations_that_are_too_long_are_left_out_and_counted() -> None:
    tokenizer = make_policy(TINY, device=CPU, seed=0, texts=TEXTS).tokenizer
    demos = [Demonstration("1 + 1?", "2"), Demonstration("1 + 1?", "2 " * 50)]
    rows, left_out = tokenize_demonstrations(demos, tokenizer, max_length=20)
    assert (len(rows), left_out) == (1, 1) and rows[0]["input_ids"][-1] == tokenizer.eos_token_id


def test_the_rest_of_an_epoch_still_makes_a_step(tmp_path: Path) -> None:
    policy = make_policy(TINY, device=CPU, seed=0, texts=TEXTS)
    section = settings("sft.batch_size=2", "sft.gradient_accumulation_steps=2", "sft.epochs=1").sft
    demos = [Demonstration(f"{n} + 1?", str(n + 1)) for n in range(5)]
    place: dict[str, Any] = {"output_dir": tmp_path, "seed": 0, "device": CPU}
    trainer = make_sft_trainer(**vars(policy), demos=demos, section=section, **place)
    trainer.train()
    assert trainer.state.global_step == 2  # two micro-batches, then the one that is left


# --- rewards and grades


def test_a_reward_of_weight_zero_is_told_and_not_counted() -> None:
    rewards = build_rewards([{"name": "correct", "weight": 1.0}, {"name": "well_formed", "weight": 0.0}])
    told = rewards.explain("<reasoning>\na\n</reasoning>\n<answer>\n7\n</answer>", "8")
    assert told.components == {"correct": 0.0, "well_formed": 1.0} and told.total == 0.0


@pytest.mark.parametrize(("answer", "gold"), [("150", "15"), ("1.5", "15"), ("15.0004", "15"), ("15", "1.5")])
def test_contained_or_nearly_equal_answers_are_wrong(answer: str, gold: str) -> None:
    assert not grade(answer, gold).correct


def test_the_four_outputs_of_the_original_test() -> None:
    form = get_format("working_solution")
    shown = "15 times 23.\n<end_working_out>\n<SOLUTION>\n%s\n</SOLUTION>"
    outputs = [(shown % "345", "345"), (shown % "344", "345"), ("345", "345"), (shown % "15", "15")]
    rows = []
    for number, (text, gold) in enumerate(outputs):
        parsed = form.parse(text)
        told = grade_completion(text, gold, parsed=parsed, matcher="numeric")
        same = {"greedy": True, "truncated": False, "completion_tokens": 10, "problem_id": str(number)}
        rows.append({**same, "correct": told.correct, "well_formed": parsed.well_formed})
        assert (parsed.reasoning is not None) == (text != "345")  # reasoning in three of four
    found = summarise(rows)
    assert (found["format"].value, found["greedy_accuracy"].value) == (0.75, 0.5)


def test_rewards_explain_on_the_command_line() -> None:
    completion = "<think>\nStep 1: a\nStep 2: b\nStep 3: c\n</think>\n\n<answer>\n4\n</answer>"
    command = ("-m", "algorist.cli.main", "rewards", "explain", "--recipe", "r1-zero-numina")
    done = python(*command, "--completion", completion, "--answer", "$4$")
    told = json.loads(done.stdout)
    assert list(told["rewards"]) == ["accuracy", "format", "reasoning_steps", "cosine", "repetition"]
    assert told["total"] > 3.9, done.stderr


# --- a run with an adapter: SFT alone, then GRPO alone


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


def test_nothing_of_sft_is_alive_while_grpo_trains(tmp_path: Path) -> None:
    watch = Watch()
    overrides = ("device=cpu", "threads=1", f"output_dir={tmp_path}", "eval.enabled=false")
    run_recipe(settings(*overrides, name="smoke-cpu"), display=watch)
    assert watch.alive and set(watch.alive) == {0}


def test_files_of_checkpoints_and_of_the_final_adapter(
    runs: tuple[Path, Watch, Run],
) -> None:
    saved = {"adapter_config.json", "adapter_model.safetensors"}
    tokenizer = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    state = {"optimizer.pt", "scheduler.pt", "trainer_state.json"}
    for stage in ("sft", "grpo"):
        newest = sorted((runs[0] / stage).glob("checkpoint-*"))[-1]
        assert saved | tokenizer | state <= {p.name for p in newest.iterdir()}
        final = {p.name for p in (runs[0] / stage / "final").iterdir()}
        assert saved | tokenizer <= final and not state & final


def test_held_out_evaluation_during_training_keeps_subjects(
    runs: tuple[Path, Watch, Run],
) -> None:
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
    line = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ algorist\.\w+ WARNING 8 held-out problems also stand"
    live: list[bool] = []

    class Reading(Quiet):
        def say(self, text: str) -> None:  # while the run lasts
            log = tmp_path / "smoke-cpu" / "training.log"
            live.append(log.is_file() and re.search(line, log.read_text(encoding="utf-8"), re.M) is not None)

    recipe = settings(*overrides, "device=cpu", f"output_dir={tmp_path}", name="smoke-cpu")
    run_recipe(recipe, display=Reading())
    assert not live[0] and live[-1]


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
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows


@pytest.mark.slow
def test_eval_on_the_command_line_leaves_an_artifact(
    runs: tuple[Path, Watch, Run], shared_data: Path, tmp_path: Path
) -> None:
    file = shared_data / "gsm8k" / "test.jsonl"
    command = ("-m", "algorist.cli.main", "eval", str(runs[0]), "--dataset", "gsm8k", "--path", str(file))
    done = python(
        *command, "--limit", "2", "--samples", "0", "--out", str(tmp_path), "--name", "test", "--json"
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert 0 <= told["metrics"]["greedy_accuracy"]["value"] <= 1, done.stderr
    found = read_artifact(tmp_path, "test")
    assert len(found.samples) == 2 and found.protocol["batch_size"] and found.dataset == "gsm8k"
