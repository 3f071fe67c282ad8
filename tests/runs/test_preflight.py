"""Preflight: the numbers it foretells against what then happens."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from algorist.config import load_recipe
from algorist.errors import ConfigError
from algorist.models.load import load_policy
from algorist.preflight import preflight
from algorist.preflight.completions import PassRates, fit_pass_rates
from algorist.runs.draft import Draft
from algorist.runs.plan import make_plan
from tests.marks import first

TINY = "model.tiny={vocab_size: 300, hidden_size: 32, layers: 1}"


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.3), (2.0, 2.0), (0.5, 4.0), (30.0, 30.0)])
def test_useful_share_is_the_share_of_simulated_groups(a: float, b: float) -> None:
    chance = random.Random(1)
    for size in (4, 16):
        useful = 0
        for _ in range(20_000):
            rate = chance.betavariate(a, b)
            right = sum(chance.random() < rate for _ in range(size))
            useful += 0 < right < size
        assert PassRates(a, b).useful_share(size) == pytest.approx(useful / 20_000, abs=0.012)


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.3), (2.0, 2.0), (0.5, 4.0)])
def test_eight_samples_foretell_larger_groups(a: float, b: float) -> None:
    chance = random.Random(2)
    rates = [chance.betavariate(a, b) for _ in range(400)]
    counts = [sum(chance.random() < rate for _ in range(8)) for rate in rates]
    fitted = fit_pass_rates(counts, 8)
    assert fitted.a / (fitted.a + fitted.b) == pytest.approx(a / (a + b), abs=0.05)
    for size in (4, 8, 16, 32):
        assert fitted.useful_share(size) == pytest.approx(PassRates(a, b).useful_share(size), abs=0.06)


def test_right_groups_teach_where_no_baseline_is_taken_off() -> None:
    rates = fit_pass_rates([8, 8, 8, 0], 8)
    assert rates.useful_share(8) < 0.3 < 0.6 < rates.useful_share(8, right_teach=True)


def test_nothing_right_is_not_taken_for_impossible() -> None:
    shares = [fit_pass_rates([0] * 24, 8).useful_share(size) for size in (4, 8, 16, 32)]
    assert shares == sorted(shares) and shares[0] > 0 and shares[-1] < 0.2


def test_counts_outside_the_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0 … 8"):
        fit_pass_rates([9], 8)


def test_batch_arithmetic_is_that_of_the_trainers(tmp_path: Path) -> None:
    """The step counts foretold without max_steps are those that TRL's trainers then take."""
    from algorist.runs.pipeline import run_recipe
    from algorist.store.read import metrics, query

    recipe = load_recipe(
        "smoke-cpu",
        [
            TINY, f"output_dir={tmp_path}", "run_name=r", "threads=1", "sft.max_steps=null", "grpo.max_steps=null",
            "sft.epochs=1", "data.sft.params.count=70", "data.train.params.count=22", "grpo.epochs=2", "eval.enabled=false",
            "grpo.num_iterations=2", "grpo.max_completion_tokens=4",
        ],
    ).recipe  # fmt: skip
    found = preflight(make_plan(Draft.of(recipe, in_folder=False)), trial=False, problems=2, samples=2)
    run_recipe(recipe)
    for stage in ("sft", "grpo"):
        assert metrics(tmp_path / "r", stage)[-1]["step"] == found.batch[stage]["steps"], stage
    assert found.batch["sft"]["passes"] == metrics(tmp_path / "r", "sft")[-1]["epoch"] == 1.0
    stored = query(tmp_path / "r", "SELECT count(*) AS n FROM rollouts")[0]["n"]
    assert stored == found.batch["grpo"]["rollouts"]


def test_what_is_wrong_is_advised(tmp_path: Path) -> None:
    rows = [{"question": f"{n} and " * 12, "answer": "see figure" if n % 2 else str(n)} for n in range(12)]
    file = tmp_path / "odd.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    recipe = load_recipe(
        "smoke-cpu",
        [
            "model.tiny={vocab_size: 300, hidden_size: 32, layers: 1, max_position_embeddings: 64}", "threads=1",
            f"data.train={{name: local, path: {file}}}", "data.sft=null", "sft.enabled=false", "eval.enabled=false",
            "grpo.max_completion_tokens=40",
        ],
    ).recipe  # fmt: skip
    found = preflight(make_plan(Draft.of(recipe, in_folder=False)), trial=False, problems=12, samples=4)
    assert found.prompts["do_not_fit"] == 12
    text = " ".join(finding.sentence for finding in found.advice)
    assert "leave no room for 40 tokens" in text and "cut off at 40 tokens" in text and "be useful" in text
    changes = [line for finding in found.advice for line in finding.change]
    assert "data.train.max_prompt_tokens=24" in changes and "sft.enabled=true" in changes
    assert text.count("no worked solutions for SFT") == 1 and "algorist data sample" in text
    assert changes.count("sft.enabled=true") == changes.count("data.sft={name: local, path: right.jsonl}")
    assert {finding.name for finding in found.advice} >= {
        "prompts_too_long",
        "truncated",
        "few_useful_groups",
    }
    load_recipe("smoke-cpu", ["data.sft=null", *changes])
    with_them = make_plan(
        Draft.of(load_recipe("smoke-cpu", [TINY, "threads=1", "sft.enabled=false"]).recipe, in_folder=False)
    )
    shown = preflight(with_them, trial=False, problems=12, samples=4).advice
    assert any("sft.enabled=true" in each.change for each in shown)
    assert "worked solutions" not in " ".join(each.sentence for each in shown)


def planned(*overrides: str) -> dict[str, Any]:
    """Run preflight in a process of its own and return its JSON: memory is that of a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "algorist.cli.main", "preflight", "quickstart", *overrides, "--problems", "8", "--minutes", "10", "--json"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "lora"), [("sft", "null"), ("grpo", "{rank: 16}")])
def test_planned_peak_is_near_the_measured_one(stage: str, lora: str) -> None:
    """Within 15 %, without the evaluations, which are not tried; benchmarks/memory_plan.py shows three sizes."""
    other = {"sft": "grpo", "grpo": "sft"}[stage]
    memory = planned(
        "model.tiny={hidden_size: 192, layers: 4, vocab_size: 700}", f"model.lora={lora}", f"{other}.enabled=false",
        "grpo.batch_size=64", "eval.enabled=false",
    )[stage]["memory"]  # fmt: skip
    assert memory["peak"] == pytest.approx(memory["measured_peak"], rel=0.15), memory


CHECKPOINT = [
    "model.tiny={vocab_size: 420, hidden_size: 64, layers: 2}", "threads=1", "device=cpu", "eval.enabled=false",
    "data.train.params.count=24", "data.sft.params.count=400", "sft.learning_rate=4e-3", "sft.max_steps=60",
    "sft.save_steps=30", "grpo.max_completion_tokens=64",
]  # fmt: skip


@pytest.fixture(scope="module", params=first(1, ["adapter", "weights"]))
def sft_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run after its SFT stage: of an adapter, or of all weights."""
    from algorist.runs.pipeline import run_recipe

    folder = tmp_path_factory.mktemp("sft")
    lora = "model.lora={rank: 32, alpha: 64}" if request.param == "adapter" else "model.lora=null"
    recipe = load_recipe("smoke-cpu", [*CHECKPOINT, lora, f"output_dir={folder}", "run_name=r"]).recipe
    run_recipe(recipe, stages=("sft",))
    is_adapter = (folder / "r/sft/final/adapter_config.json").is_file()
    assert is_adapter == (request.param == "adapter")
    return folder / "r"


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return what the verb prints as JSON."""
    from algorist.cli.preflight_command import app

    assert app([*arguments, "--no-trial", "--json"], standalone_mode=False) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", "sft/final", "sft/checkpoint-30"])
@pytest.mark.long
def test_a_run_or_an_sft_checkpoint_is_looked_at(
    sft_run: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Completions at GRPO's settings from what SFT made, each tag's share, how different they are; the run is not touched."""
    before = sorted(p.relative_to(sft_run) for p in sft_run.rglob("*"))
    found = called(capsys, str(sft_run / where), "--problems", "6", "grpo.temperature=0.9")
    assert found["model"] == str(sft_run / (where or "sft/final"))
    sampled = found["sampling"]
    assert (sampled["problems"], sampled["samples"], sampled["temperature"]) == (6, 8, 0.9)
    assert set(sampled["tags"]) == {"<reasoning>", "</reasoning>", "<answer>", "</answer>"}
    assert len(sampled["shown"]) == 5 and max(sampled["tokens"]) <= 64
    assert 1 / 8 <= sampled["distinct"] <= 1 and set(sampled["rewards"]) == {"correct", "well_formed"}
    assert "sft" not in found["batch"] and found["tokenization"] == {}
    assert sorted(p.relative_to(sft_run) for p in sft_run.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.long
def test_identical_completions_and_missing_tags_are_diagnosed(
    sft_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(sft_run / "sft/final")
    cold = called(capsys, model, "--problems", "10", "grpo.temperature=0.00001")
    assert cold["sampling"]["identical_groups"] >= 0.7 and cold["sampling"]["distinct"] < 0.3
    (advice,) = [a for a in cold["advice"] if a["name"] == "identical_completions"]
    assert "grpo.temperature 1e-05" in texts(advice) and "grpo.temperature=1.0" in advice["change"]
    narrow = called(capsys, model, "--problems", "10", "grpo.top_k=1")
    (advice,) = [a for a in narrow["advice"] if a["name"] == "identical_completions"]
    assert narrow["sampling"]["identical_groups"] == 1 and "grpo.top_k=0" in advice["change"]
    warm = called(capsys, model)
    assert not [a for a in warm["advice"] if a["name"] == "identical_completions"]
    assert warm["sampling"]["ended"] >= 12, "the model has learned to end"
    found = [a for a in warm["advice"] if a["name"] == "unparseable"]
    # So few steps teach to end; an adapter on random weights learns no tag, all weights learn tags, but not yet a whole answer.
    is_adapter = (sft_run / "sft/final/adapter_config.json").is_file()
    assert warm["sampling"]["ended_unreadable"] >= 0.7 * warm["sampling"]["ended"] and len(found) == 1
    assert (warm["sampling"]["tags"]["<answer>"] < 0.3) == is_adapter
    other = called(capsys, model, "prompt.format=working_solution")
    (advice,) = [a for a in other["advice"] if a["name"] == "unparseable"]
    assert "<SOLUTION> 0%" in texts(advice) and "sft.max_steps=120" in advice["change"]
    assert "well_formed" in " ".join(advice["change"])
    assert "<start_working_out>" not in texts(advice)  # the prompt has it


def texts(advice: dict[str, Any]) -> str:
    """Return a finding's sentence and evidence."""
    return " ".join([advice["explanation"], *(e["text"] for e in advice["evidence"])])


@pytest.mark.long
@pytest.mark.slow
def test_tokenization_faults_are_diagnosed(
    sft_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same weights with a tokenizer that drops the answer tag, and with one that has ids without embeddings."""
    policy = load_policy(sft_run / "sft/final", device=torch.device("cpu"))
    merged = policy.model.merge_and_unload() if hasattr(policy.model, "peft_config") else policy.model
    merged.save_pretrained(tmp_path / "model")
    tokenizer = policy.tokenizer
    tokenizer.save_pretrained(tmp_path / "model")
    recipe = str(sft_run / "config.yaml")
    whole = called(capsys, recipe, "--model", str(tmp_path / "model"), "--problems", "2")
    assert whole["tokenization"] == {}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>"]})
    tokenizer.save_pretrained(tmp_path / "model")
    found = called(capsys, recipe, "--model", str(tmp_path / "model"), "--problems", "2")
    (advice,) = [a for a in found["advice"] if a["name"] == "tags_lost"]
    assert "cannot write <answer>" in advice["explanation"] and found["sampling"]["tags"]["<answer>"] == 0
    tokenizer.add_tokens(["Zyx"])
    tokenizer.save_pretrained(tmp_path / "model")
    new_word = "prompt.system_prompt=Zyx"
    found = called(capsys, recipe, new_word, "--model", str(tmp_path / "model"), "--problems", "2")
    assert "ids_without_embeddings" in [a["name"] for a in found["advice"]] and not found["sampling"]


def test_a_model_folder_needs_a_recipe(tmp_path: Path) -> None:
    from algorist.cli.preflight_command import app

    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=r"belongs to no run.*algorist preflight RECIPE --model"):
        app([str(tmp_path / "model")], standalone_mode=False)


REWARDS = """
import time

def sometimes(completion, *, gold):
    if len(gold) % 2:
        raise KeyError("no such column")
    return 1.0

def hangs(completions, **kwargs):
    time.sleep(60)

def of_the_trainer(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step)] * len(completions)
"""


def test_rewards_that_fail_are_named(tmp_path: Path) -> None:
    """As in a run: the reward's name, how many completions, the first error, what they get instead."""
    mine = tmp_path / "mine.py"
    mine.write_text(REWARDS)
    rows = [{"question": f"what is {n}", "answer": "1" * (n % 3 + 1)} for n in range(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = load_recipe(
        "smoke-cpu",
        [
            TINY, "threads=1", f"data.train={{name: local, path: {tmp_path}/data.jsonl}}", "data.sft=null", "sft.enabled=false",
            "eval.enabled=false", "grpo.max_completion_tokens=4",
            f"rewards=[{{name: '{mine}:sometimes'}}, {{name: '{mine}:of_the_trainer'}}, {{name: correct}}]",
        ],
    ).recipe  # fmt: skip
    found = preflight(make_plan(Draft.of(recipe, in_folder=False)), trial=False, problems=6, samples=4)
    rewards = found.sampling["rewards"]
    assert set(rewards) == {"sometimes", "correct"}  # the third asks for what only a trainer has
    assert rewards["sometimes"]["failures"] == 16 and rewards["correct"]["failures"] == 0
    (advice,) = [a.as_dict() for a in found.advice if a.name == "reward_fails"]
    assert "'sometimes' failed on 16 of 24 completions" in texts(advice) and "no such column" in texts(advice)
    assert "they get its floor" in texts(advice) and "algorist rewards explain" in texts(advice)


def test_a_reward_that_hangs_is_named_and_no_step_is_tried(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(REWARDS.replace("completions, **kwargs):\n    time", "completion):\n    time"))
    recipe = load_recipe(
        "smoke-cpu",
        [
            TINY, "threads=1", "sft.enabled=false", "eval.enabled=false", "grpo.max_completion_tokens=4",
            f"rewards=[{{name: '{mine}:hangs', timeout_s: 0.3}}, {{name: correct}}]",
        ],
    ).recipe  # fmt: skip
    found = preflight(make_plan(Draft.of(recipe, in_folder=False)), problems=2, samples=2)
    (advice,) = [a for a in found.advice if a.name == "reward_hangs"]
    assert "reward 'hangs' hangs" in advice.sentence and found.grpo is not None and "tried" not in found.grpo
    assert "longer than 0.3 s 3 times in a row" in advice.sentence


COUNTED = """from pathlib import Path

class Length:
    low, high = 0.0, 1.0
    __name__ = "length"

    def __init__(self):
        with Path(__file__).with_name("made.txt").open("a") as file:
            file.write("once\\n")

    def __call__(self, rollout, problem):
        return min(1.0, len(rollout.text) / 100)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

length = Length()
"""


def test_sampling_and_trial_take_the_rewards_of_the_plan(tmp_path: Path) -> None:
    """A reward with a state is made once more by nobody: neither for the sampling nor for the tried steps."""
    (tmp_path / "own.py").write_text(COUNTED)
    made, rewards = tmp_path / "made.txt", f"rewards=[{tmp_path}/own.py:length]"
    recipe = load_recipe("smoke-cpu", [TINY, rewards, "threads=1", "sft.enabled=false"]).recipe
    plan = make_plan(Draft.of(recipe, in_folder=False))
    before = made.read_text()
    seen = preflight(plan, problems=2, samples=2)
    assert seen.grpo["tried"] and seen.sampling["rewards"]["length"]["mean"] > 0
    assert made.read_text() == before


@pytest.mark.long
def test_recomputed_layers_are_in_the_plan_of_a_tried_step() -> None:
    """The trainer switches activation checkpointing on when it begins, after the plan is made: the recipe says it."""
    settings = ["model.tiny={vocab_size: 300, hidden_size: 32, layers: 6}", "threads=1", "eval.enabled=false"]

    def planned(*more: str) -> dict[str, int]:
        found = preflight(
            make_plan(Draft.of(load_recipe("smoke-cpu", [*settings, *more]).recipe, in_folder=False)),
            problems=2,
            samples=2,
            minutes=0.0,
        )
        tried = {"sft": found.sft, "grpo": found.grpo}
        return {stage: part["memory"]["activations"] for stage, part in tried.items() if part is not None}

    kept = planned()
    recomputed = planned("sft.gradient_checkpointing=true", "grpo.gradient_checkpointing=true")
    assert set(recomputed) == {"sft", "grpo"}
    assert all(recomputed[stage] < 0.5 * kept[stage] for stage in kept), (kept, recomputed)
