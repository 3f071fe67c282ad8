"""Evaluation from the command line's words to artifacts: benchmarks, protocols, progress files, the harness's form."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch

from algorist.cli.benchmark_option import read_benchmarks
from algorist.cli.few_problems import samples_for, too_few
from algorist.config.load import load_recipe
from algorist.config.schema import EvalSection, Recipe
from algorist.config.section import ModelSection, TinySection
from algorist.errors import ConfigError
from algorist.evaluation.artifact import Artifact, read_artifact
from algorist.evaluation.compare import paired_metrics
from algorist.evaluation.console import RolloutNotes, summary_line, trend_line
from algorist.evaluation.estimators import Interval, summarise
from algorist.evaluation.protocols import protocol_name, with_protocol
from algorist.evaluation.record import finished_evaluation, mark_of, record_evaluation
from algorist.evaluation.run import EvaluationSetting, Progress, evaluate, fingerprint
from algorist.extensions.examples import Examples
from algorist.extensions.lm_eval.samples import export_harness, harness_samples
from algorist.extensions.tools.section import ToolsSection
from algorist.extensions.tools.source import Tools
from algorist.models.load import Policy, make_policy
from algorist.preflight.run import preflight
from algorist.prompts import get_format
from algorist.rewards import RewardSet, build_rewards
from algorist.rollouts import make_engine
from algorist.rollouts.base import SamplingParams
from algorist.runs.draft import Draft
from algorist.runs.pipeline import run_recipe
from algorist.runs.plan import make_plan
from algorist.training.extension import Event
from algorist.training.processes import model_on
from algorist.types import Problem
from tests.marks import first

FORM = get_format("reasoning_answer")
PROBLEMS = [
    Problem(f"p{n}", f"What is {n} + 1?", str(n + 1), subject="sums", level=str(n % 2)) for n in range(7)
]


# --- which benchmarks


def test_benchmarks_of_one_call(tmp_path: Path) -> None:
    odd = tmp_path / "a,b.jsonl"
    found = read_benchmarks(
        [
            "gsm8k,limit=20",
            f"math500,path={odd},split=train",
            f"{odd}",
            "runs/x/rows.jsonl,columns={question: q}",
        ],
        limit=5,
    )
    assert [b.label for b in found] == ["gsm8k-test", "math500-train", "a,b", "rows"]
    first, second, third, fourth = (b.section for b in found)
    assert (first.name, first.limit, first.split, first.path) == ("gsm8k", 20, "test", None)
    assert (second.path, second.limit, second.split) == (str(odd), 5, "train")
    assert (third.name, third.path) == ("local", str(odd))
    assert fourth.columns == {"question": "q"} and fourth.path == "runs/x/rows.jsonl"


def test_labels_are_different() -> None:
    found = read_benchmarks(["a/test.jsonl", "b/test.jsonl", "gsm8k", "gsm8k,limit=3"])
    assert [b.label for b in found] == ["test", "test-2", "gsm8k-test", "gsm8k-test-2"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["gsm8j"], "Did you mean 'gsm8k'"),
        (["gsm8k,limt=3"], "Did you mean 'limit'"),
        (["gsm8k,limit=0"], "greater than or equal to 1"),
        (["gsm8k,limit=many"], "limit"),
    ],
)
def test_wrong_benchmarks_are_named(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_benchmarks(given)


def test_one_path_is_not_for_two() -> None:
    with pytest.raises(ConfigError, match="one file for 2 benchmarks"):
        read_benchmarks(["gsm8k", "math"], path="test.jsonl")


# --- protocols


def test_protocol_names_are_read_back() -> None:
    for name in ("greedy", "sampled-8@1", "sampled-16@0.6/0.95", "sampled-1@0.25", "sampled-4@1/1/50"):
        found = with_protocol(EvalSection(samples=3, temperature=2.0), name)
        assert protocol_name(found.samples, found.temperature, found.top_p, found.top_k) == name
    assert with_protocol(EvalSection(), "sampled-4").samples == 4
    for wrong in ("sampled", "sampled-0", "gredy", "sampled-4@0", "sampled-4@1/2", "sampled-x"):
        with pytest.raises(ConfigError, match=f"no protocol '{wrong}'"):
            with_protocol(EvalSection(), wrong)


def test_a_reference_protocol_fixes_prompt_sampling_limit_and_extraction() -> None:
    form = get_format("gsm8k_cot_zeroshot")
    name = "gsm8k_cot_zeroshot"
    section = with_protocol(EvalSection(samples=3), name)
    setting = EvaluationSetting.from_section(section, max_tokens=9, matcher="symbolic", seed=0, protocol=name)
    recorded = setting.recorded(form)
    assert recorded["name"] == "gsm8k_cot_zeroshot@3.0"
    assert (recorded["samples"], recorded["max_completion_tokens"]) == (0, 256)
    assert recorded["stop_strings"] == ["Q:", "</s>", "<|im_end|>"]
    changed = replace(setting, max_completion_tokens=99)
    assert changed.recorded(form)["name"] == "greedy, graded as gsm8k_cot_zeroshot@3.0"
    assert form.render("How many?") == "Q: How many?\nA: Let's think step by step."
    for text, answer in [
        (" 3 + 4 = 7. The answer is 7.", "7"),
        (
            "The answer is 1,250 dollars. The answer is 3.",
            "1,250",
        ),  # the first match, as the harness takes it
        ("The answer is 18", "1"),  # its pattern wants a character behind the number
        ("It is 18.", None),
        ("The answer is $18.", None),
    ]:
        assert form.parse(text).answer == answer, text
    assert form.parse(form.demonstrate("1 + 2 = 3", "3")).answer == "3"


def test_small_benchmarks_are_told_to_average() -> None:
    assert [samples_for(n) for n in (30, 40, 272, 500, 1319)] == [32, 32, 4, 0, 0]
    assert "one of them is 3.3 points" in too_few(30, 0) and "sampled-32@0.6/0.95" in too_few(30, 8)
    assert "sampled" not in too_few(30, 0, "gsm8k") and "--protocol gsm8k fixes" in too_few(30, 0, "gsm8k")
    assert not too_few(30, 32) and not too_few(1319, 0) and not too_few(0, 0)


# --- a tiny model


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    tiny = TinySection(hidden_size=32, layers=1, heads=2, kv_heads=1, vocab_size=300)
    return make_policy(
        ModelSection(name="tiny", tiny=tiny),
        device=torch.device("cpu"),
        seed=0,
        texts=["1 + 1"],
        tags=FORM.tags.all(),
    )


def setting(samples: int = 2) -> EvaluationSetting:
    return EvaluationSetting(samples, 1.0, 1.0, 6, 3, "numeric", 5)


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> RewardSet:
    """One reward that needs the token ids, and a user's own."""
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(
        "def last_letter(completion, *, gold):\n    return ord((completion or ' ')[-1]) % 7 / 7\n"
    )
    overlong = {"name": "soft_overlong", "params": {"max_tokens": 6, "cache_tokens": 4}}
    return build_rewards([overlong, {"name": f"{file}:last_letter", "weight": 0.5}], FORM)


def recorded(
    policy: Policy,
    folder: Path,
    *,
    mark: str | None = None,
    engine: Any = None,
    rewards: RewardSet | None = None,
) -> Artifact:
    return record_evaluation(
        folder,
        "test",
        engine=engine or make_engine("auto", policy.model, policy.tokenizer),
        tokenizer=policy.tokenizer,
        problems=PROBLEMS,
        prompt_format=FORM,
        setting=setting(),
        ks=[1, 2],
        rewards=rewards,
        model="tiny",
        dataset="sums",
        mark=mark,
    )


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_an_artifact_tells_protocol_reasoning_and_each_reward(
    policy: Policy, rewards: RewardSet, tmp_path: Path
) -> None:
    recorded(policy, tmp_path, rewards=rewards)
    found = read_artifact(tmp_path, "test")
    assert found.protocol["name"] == "sampled-2@1" and found.protocol["prompt_format"] == "reasoning_answer"
    assert found.protocol["seed"] == 5 and found.protocol["max_completion_tokens"] == 6
    rows = found.samples
    assert len(rows) == 7 * 3 and all(set(row["rewards"]) == {"soft_overlong", "last_letter"} for row in rows)
    for row in rows:
        total = row["rewards"]["soft_overlong"] + 0.5 * row["rewards"]["last_letter"]
        assert row["reward"] == pytest.approx(total) and row["question"] in row["prompt"]
    greedy = [row for row in rows if row["greedy"]]
    assert found.metrics["reward"].value == pytest.approx(sum(r["reward"] for r in greedy) / 7)
    parts = [found.metrics[f"rewards/{name}"].value for name in ("soft_overlong", "last_letter")]
    assert found.metrics["reward"].value == pytest.approx(parts[0] + 0.5 * parts[1])
    assert all(row["rewards"]["soft_overlong"] == -1 for row in rows if row["completion_tokens"] == 6)
    assert len({row["reward"] for row in rows}) > 1, "equal rewards would show nothing"
    assert {"reasoning_present", "mean_reasoning_characters"} <= set(found.metrics)


def test_reasoning_and_rewards_by_hand() -> None:
    def row(problem: str, characters: int, reward: float, single: dict[str, float]) -> dict[str, Any]:
        same = {
            "greedy": True,
            "correct": False,
            "well_formed": False,
            "truncated": False,
            "completion_tokens": 1,
        }
        told = {"has_reasoning": characters > 0, "reasoning_characters": characters}
        return {"problem_id": problem, **same, **told, "reward": reward, "rewards": single}

    rows = [
        row("a", 30, 2.0, {"x": 2.0, "y": 1.0}),
        row("b", 0, -1.0, {"x": -1.0}),
        row("c", 60, 2.0, {"x": 2.0}),
    ]
    found = summarise(rows)
    assert found["reasoning_present"].value == pytest.approx(2 / 3)
    assert found["mean_reasoning_characters"].value == 30.0
    assert found["reward"].value == found["rewards/x"].value == 1.0
    assert (found["rewards/y"].value, found["rewards/y"].n) == (1.0, 1)  # b and c have no such reward
    later = [r | {"reward": r["reward"] + 0.5, "has_reasoning": True} for r in rows]
    paired = paired_metrics(rows, later)
    assert paired["reward"].value == 0.5 and paired["reasoning_present"].value == pytest.approx(1 / 3)


# --- progress


class Stops(Exception):
    """Stands for a process that dies in the middle of an evaluation."""


class Counting:
    """A real engine that counts prompts and dies before the batch ``dies_at``."""

    def __init__(self, policy: Policy, dies_at: int | None = None) -> None:
        self.name, self.dies_at, self.prompts, self.calls = "counting", dies_at, 0, 0
        self.engine = make_engine("auto", policy.model, policy.tokenizer)

    def generate(self, prompts: Any, group_size: int, params: Any) -> Any:
        """Pass on; greedy calls count as batches."""
        if params.temperature == 0:
            if self.calls == self.dies_at:
                raise Stops
            self.calls += 1
            self.prompts += len(prompts)
        return self.engine.generate(prompts, group_size, params)


def mark(policy: Policy, **changes: Any) -> str:
    given: dict[str, Any] = {
        "model": "tiny",
        "problems": PROBLEMS,
        "prompt_format": FORM,
        "setting": setting(),
    }
    return mark_of(**(given | {"ks": [1], "rewards": None} | changes))


def test_only_missing_problems_are_done_and_the_result_is_the_same(policy: Policy, tmp_path: Path) -> None:
    whole = recorded(policy, tmp_path / "whole")
    broken = Counting(policy, dies_at=2)
    with pytest.raises(Stops):
        recorded(policy, tmp_path, mark=mark(policy), engine=broken)
    file = tmp_path / "test.progress.jsonl"
    assert file.is_file() and not (tmp_path / "test.json").exists()
    with file.open("ab") as left:
        left.write(b'{"start": 6, "rows": [{"probl')  # torn while it was written
    engine = Counting(policy)
    found = recorded(policy, tmp_path, mark=mark(policy), engine=engine)
    assert (broken.prompts, engine.prompts) == (6, 1)
    assert without_times(found.samples) == without_times(whole.samples)
    assert found.metrics == whole.metrics and not file.exists()
    read = read_artifact(tmp_path, "test")
    assert without_times(read.samples) == without_times(read_artifact(tmp_path / "whole", "test").samples)


def test_progress_of_another_evaluation_is_not_used(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(Stops):
        recorded(policy, tmp_path, mark=mark(policy), engine=Counting(policy, dies_at=2))
    engine = Counting(policy)
    recorded(policy, tmp_path, mark=mark(policy, setting=setting(samples=3)), engine=engine)
    assert engine.prompts == len(PROBLEMS)


def test_the_mark_changes_with_all_that_matters(policy: Policy, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    policy.model.save_pretrained(folder)
    same = mark(policy, model=folder)
    assert same == mark(policy, model=folder) and finished_evaluation(tmp_path, "test", same) is None
    other = [
        mark(policy, model="other"),
        mark(policy, problems=PROBLEMS[:-1]),
        mark(policy, prompt_format=get_format("think_answer")),
        mark(policy, setting=setting(samples=4)),
        mark(policy, rewards=build_rewards(["correct"], FORM)),
        mark(policy, rewards=build_rewards([{"name": "correct", "weight": 2.0}], FORM)),
    ]
    tool = tmp_path / "mine.py"
    for text in ("a", "b"):
        tool.write_text(f"def said(text: str) -> str: return {text!r}\n")
        answered = Tools(ToolsSection(use=[f"{tool}:said"])).instructed(FORM)
        other.append(mark(policy, prompt_format=answered))
        (tmp_path / "model.gguf").write_text(text * 4)
        other.append(mark(policy, model=tmp_path / "model.gguf"))
    with torch.no_grad():
        next(policy.model.parameters()).add_(0.0)
    policy.model.save_pretrained(folder)  # written again: another time
    other.append(mark(policy, model=folder))
    assert len({mark(policy), same, *other}) == len(other) + 2


def test_a_damaged_progress_file_is_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "x.progress.jsonl"
    file.write_bytes(b"\xff\xfe not json\n[]\n")
    progress = Progress(file, "mark")
    assert progress.batches == {}
    progress.add(0, [{"problem_id": "p0"}, {"problem_id": "p0"}])
    again = Progress(file, "mark")
    assert again.rows_at(0, PROBLEMS[:1]) == [{"problem_id": "p0"}, {"problem_id": "p0"}]
    assert again.rows_at(0, PROBLEMS[:2]) is None and again.rows_at(3, PROBLEMS[:1]) is None
    assert fingerprint("m", [], FORM, {}) != fingerprint("n", [], FORM, {})


# --- one line, and the trend


def test_summary_line_names_every_number() -> None:
    share = Interval(0.25, 0.2, 0.3, 8)
    summary = {
        "greedy_accuracy": share,
        "format": Interval(0.95, 0.9, 1, 8),
        "reasoning_present": Interval(1, 1, 1, 8),
    }
    summary |= {
        "mean_reasoning_characters": Interval(120.4, 100, 140, 8),
        "mean_tokens": Interval(60.0, 50, 70, 8),
    }
    summary |= {
        "reward": Interval(1.2, 1, 1.4, 8),
        "rewards/correct": share,
        "pass@4": Interval(0.5, 0.4, 0.6, 8),
    }
    assert summary_line("grpo-step-20", summary) == (
        "eval grpo-step-20: accuracy 25.0 % [20.0, 30.0] of 8, pass@4 50.0 %, format 95.0 %, reasoning present 100.0 %, "
        "reasoning 120 characters, 60 tokens, reward 1.20 (correct 0.25)"
    )


def test_trend_has_first_best_and_last(tmp_path: Path) -> None:
    def put(name: str, value: float | None) -> None:
        content = {"metrics": {"greedy_accuracy": {"value": value}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))

    put("base", 0.01)
    put("sft", 0.10)
    assert trend_line(tmp_path, "sft") is None
    for step, value in ((5, 0.2), (100, 0.3), (20, 0.4)):
        put(f"grpo-step-{step}", value)
    put("grpo", 0.35)
    put("sft-step-9", 0.9)  # within the stage before
    put("grpo-final-gsm8k-test", 0.99)  # another benchmark
    (tmp_path / "grpo-step-7.json").write_text("torn")
    assert trend_line(tmp_path, "grpo") == (
        "trend of 5 evaluations: accuracy first 10.0 % (sft), best 40.0 % (grpo-step-20), last 35.0 % (grpo)"
    )
    assert trend_line(tmp_path, "sft") == (
        "trend of 3 evaluations: accuracy first 1.0 % (base), best 90.0 % (sft-step-9), last 10.0 % (sft)"
    )


# --- lm-evaluation-harness


def test_harness_export_is_read_by_the_datasets_library(policy: Policy, tmp_path: Path) -> None:
    artifact = recorded(policy, tmp_path)
    moment = datetime(2026, 11, 21, 9, 30, 0, 123456)
    path = export_harness(artifact, tmp_path / "lm", task="sums-test", time=moment)
    assert path == tmp_path / "lm" / "tiny" / "samples_sums_test_2026-11-21T09-30-00.123456.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(r["doc_id"], r["filter"]) for r in rows] == [
        (n, f) for n in range(7) for f in ("greedy", "sampled")
    ]
    loaded = datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    needed = {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"}
    assert needed | {"doc_hash", "prompt_hash", "target_hash", "exact_match"} <= set(loaded.column_names)
    by_problem = {row["problem_id"]: row for row in artifact.samples if row["greedy"]}
    for row in rows:
        assert all(isinstance(row[name], float) for name in row["metrics"])
        greedy = row["filter"] == "greedy"
        arguments = row["arguments"]["gen_args_0"]
        assert (
            arguments["arg_0"] == by_problem[row["doc"]["id"]]["prompt"] and row["doc"]["subject"] == "sums"
        )
        assert arguments["arg_1"]["do_sample"] is not greedy and arguments["arg_1"]["max_gen_toks"] == 6
        assert len(row["resps"]) == len(row["filtered_resps"]) == 1 and len(row["resps"][0]) == (
            1 if greedy else 2
        )
        assert len(row["prompt_hash"]) == 64 and row["target"] == by_problem[row["doc"]["id"]]["gold"]
    mean = sum(r["exact_match"] for r in rows if r["filter"] == "greedy") / 7
    assert mean == artifact.metrics["greedy_accuracy"].value


def test_names_in_the_export_stay_in_its_folder(tmp_path: Path) -> None:
    row = {
        "problem_id": "a",
        "greedy": True,
        "correct": True,
        "completion": "1",
        "extracted": "1",
        "gold": "1",
    }
    artifact = Artifact("x", "../../owner/model:v1", "../sums", {}, {}, [row])
    path = export_harness(artifact, tmp_path / "lm")
    assert path.parent.parent == tmp_path / "lm" and path.name.startswith("samples_sums_")
    assert harness_samples(artifact)[0]["filtered_resps"] == ["1"]


def test_evaluate_without_rewards_has_none(policy: Policy) -> None:
    engine = make_engine("auto", policy.model, policy.tokenizer)
    rows = evaluate(engine, policy.tokenizer, PROBLEMS[:2], FORM, setting())
    assert all("reward" not in row and "completion_ids" not in row for row in rows)
    assert not any(name.startswith("reward") for name in summarise(rows))
    assert math.isfinite(rows[0]["seconds"])


def test_recipes_may_ask_for_correct_demonstrations() -> None:
    assert load_recipe("smoke-cpu", ["data.sft.correct_only=true"]).recipe.data.sft.correct_only  # type: ignore[union-attr]


# --- while a run trains


def test_least_and_greatest_rewards_since_the_last_line(caplog: pytest.LogCaptureFixture) -> None:
    notes, examples = RolloutNotes(pytest.fail), examples_of(pytest.fail)
    caplog.set_level("INFO")
    for step in range(1, 6):
        for reward in (0.5 * step, -1.0, 2.0):
            row = {
                "reward": reward,
                "rewards": {"x": reward, "y": None},
                "completion": f"r\n{reward}",
                "reason": "different",
            }
            notes.on_rollouts([row])
            examples.seen(Event("rollouts", "grpo", step, rows=[row, {"reward": None}]))
        found = notes.on_metrics("grpo")
        examples.seen(Event("metrics", "grpo", step, values={"loss": 0.1}))
        top = max(2.0, 0.5 * step)
        assert found == {"reward_min": -1.0, "reward_max": top, "rewards/x/min": -1.0, "rewards/x/max": top}
    assert notes.on_metrics("grpo") == {} == notes.on_metrics("sft")
    told = [record.getMessage() for record in caplog.records if "completion:" in record.getMessage()]
    assert len(told) == 2 and "step 5, best completion: reward 2.500" in told[0]
    assert "worst completion: reward -1.000" in told[1] and "\n" not in told[1]


def test_a_change_above_ten_percent_between_windows_is_told() -> None:
    said: list[str] = []
    examples = examples_of(said.append)
    for step in range(1, 201):
        steady, rising = 1.0 + 0.05 * (step > 50), 0.2 if step <= 100 else 0.4
        values = {"reward": steady, "rewards/correct/mean": rising, "rewards/correct/std": step}
        examples.seen(Event("metrics", "grpo", step, values=values))
    assert said == ["step 150: correct rose from 0.200 to 0.400 (means of 50 logged steps)"]


def examples_of(say: Any) -> Examples:
    examples = Examples(Recipe())
    examples.open(SimpleNamespace(display=SimpleNamespace(say=say)))
    return examples


# --- evaluation on a second device


@pytest.mark.slow
@pytest.mark.parametrize("adapter", first(1, [False, True]), ids=["whole", "adapter"])
def test_evaluations_on_a_second_device_are_the_same(tmp_path: Path, adapter: bool) -> None:
    """The copy is made anew for each evaluation: after each step of SFT, within GRPO, and after both."""
    lora = ("model.lora={rank: 4}",) if adapter else ()
    place = ("device=cpu", "threads=1", "sft.max_steps=2", "sft.eval_every=1", "sft.learning_rate=1e-2")
    own = (
        *place,
        *lora,
        "grpo.eval_every=1",
        "eval.max_completion_tokens=12",
        "data.eval.limit=8",
        f"output_dir={tmp_path}",
    )
    plain, second = (
        run_recipe(load_recipe("smoke-cpu", [*own, *told]).recipe).folder.path
        for told in (("run_name=plain",), ("run_name=second", "eval.device=cpu"))
    )
    names = sorted(p.stem for p in (plain / "eval").glob("*.json"))
    assert names == ["grpo", "grpo-step-1", "sft", "sft-step-1"]
    found = [[read_artifact(run / "eval", name) for name in names] for run in (plain, second)]
    for one, other in zip(*found, strict=True):
        assert without_times(one.samples) == without_times(other.samples) and one.metrics == other.metrics
    texts = [[row["completion"] for row in artifact.samples] for artifact in found[1]]
    assert texts[2] != texts[3], "the weights changed between two evaluations, so a stale copy would show"


def test_a_copy_has_the_present_weights_and_leaves_the_policy_alone(policy: Policy) -> None:
    assert model_on(policy.model, None) is policy.model
    copied = model_on(policy.model, "cpu")
    pairs = list(zip(policy.model.named_parameters(), copied.named_parameters(), strict=True))
    assert all(n == m and torch.equal(p, q) and p.data_ptr() != q.data_ptr() for (n, p), (m, q) in pairs)
    tied = policy.model.get_input_embeddings().weight is policy.model.get_output_embeddings().weight
    assert tied == (copied.get_input_embeddings().weight is copied.get_output_embeddings().weight)
    before = [p.detach().clone() for p in policy.model.parameters()]
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert all(torch.equal(p, q) for p, q in zip(policy.model.parameters(), before, strict=True))


def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for device, message in (
        ("cuda:99", r"'cuda:99'.*There is: cpu"),
        ("gpu", r"'gpu'"),
        ("cpux", r"'cpux'.*Did you mean 'cpu'"),
    ):
        own = (f"eval.device='{device}'", f"model.name={tmp_path}/none", f"output_dir={tmp_path}")
        broken = load_recipe("smoke-cpu", own).recipe
        with pytest.raises(ConfigError, match=rf"eval\.device is {message}"):
            run_recipe(broken)
        with pytest.raises(ConfigError, match=rf"eval\.device is {message}"):
            preflight(make_plan(Draft.of(broken, in_folder=False)))
    for key in ("grpo.engine", "eval.engine"):
        with pytest.raises(ConfigError, match=r"their engine is vllm.* take eval\.engine=native"):
            run_recipe(
                load_recipe("smoke-cpu", ["eval.device=cpu", f"{key}=vllm", f"output_dir={tmp_path}"]).recipe
            )
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_copy_lies_on_the_gpu(policy: Policy) -> None:
    copied = model_on(policy.model, "cuda:0")
    assert {t.device.type for t in (*copied.parameters(), *copied.buffers())} == {"cuda"}
    engine = make_engine("auto", copied, policy.tokenizer)
    (group,) = engine.generate([[5, 6, 7]], 2, SamplingParams(temperature=0.0, max_new_tokens=4))
    assert len(group) == 2 and next(policy.model.parameters()).device.type == "cpu"
