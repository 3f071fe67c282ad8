"""Each cause of a run that does not learn is named in a run that has it; healthy runs are left in peace.

The runs are real: one short SFT of a tiny model on sums, then GRPO runs of a few seconds, each with one fault.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from algorist.config import load_recipe
from algorist.config.schema import Recipe
from algorist.data.load import key_of, read_table
from algorist.data.problems import Problems
from algorist.diagnosis.diagnose import diagnose
from algorist.diagnosis.rule import Facts, apply
from algorist.diagnosis.rules import all_rules
from algorist.diagnosis.settings import Settings
from algorist.diagnosis.signals import read_signals
from algorist.errors import ConfigError, DataError
from algorist.report.build import build_report
from algorist.runs.asking import recipe_format
from algorist.runs.draft import Draft, check_names
from algorist.runs.pass_rates import with_pass_rates
from algorist.runs.rate import rate
from algorist.store.stages import STAGES
from tests.runs.sums import SMALL, Runs, sums

pytestmark = pytest.mark.slow

REWARDS = """
def long(completions, **_):
    return [min(len(c), 400) / 100 for c in completions]


def shouting(completions, **_):
    return [float(c.count("9")) for c in completions]


def short(completions, **_):
    return [-len(c) / 100 for c in completions]


def any_text(completions, **_):
    return [float(len(c) > 0) for c in completions]


def nothing(completions, **_):
    return [0.0 for _ in completions]


def astronomic(log_probs, advantages):
    return -advantages * log_probs * 1e38 * 1e38
"""


@pytest.fixture(scope="module")
def paying(runs: Runs) -> Path:
    """A file with rewards that pay for something else than solving."""
    path = runs.folder / "paying.py"
    path.write_text(REWARDS, encoding="utf-8")
    return path


def names(run: Path) -> list[str]:
    """Return the causes that ``diagnose`` names, checking that each is told in full."""
    found = diagnose(run)
    for finding in found:
        assert finding.sentence and finding.evidence and finding.severity in (1, 2, 3)
        advised = run.parent / "advised.yaml"
        advised.write_text(f"extends: {run / 'config.yaml'}\n", encoding="utf-8")
        changed = load_recipe(str(advised), finding.change).recipe
        check_names(changed, recipe_format(changed))
        assert json.loads(json.dumps(finding.as_dict()))["change"] == list(finding.change)
    return [finding.name for finding in found]


def symptom(run: Path, name: str) -> bool:
    """See whether a rule alone names a run, whatever it follows from."""
    signals = read_signals(run)
    return bool(
        apply(
            [all_rules()[name]], *(Facts(signals.settings, signals=signals, stage=stage) for stage in STAGES)
        )
    )


def changed_copy(source: Path, target: Path, **eos: object) -> Path:
    """Copy a model folder and set another end-of-sequence token."""
    shutil.copytree(source, target)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        file = target / name
        if file.is_file():
            values = json.loads(file.read_text(encoding="utf-8"))
            values |= {
                k: v for k, v in eos.items() if (k == "eos_token") == (name == "tokenizer_config.json")
            }
            file.write_text(json.dumps(values), encoding="utf-8")
    return target


def test_a_change_that_is_made_already_is_not_advised() -> None:
    settings = Settings({"sft": {"enabled": True}, "grpo": {"max_completion_tokens": 24}})
    changed = settings.changed({"sft.enabled": True, "grpo.max_completion_tokens": 96})
    assert changed == (("grpo.max_completion_tokens=96",), ("24",))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_healthy_run_is_left_in_peace(runs: Runs, seed: int) -> None:
    assert names(runs(f"healthy-{seed}", f"seed={seed}", "grpo.learning_rate=3e-4")) == []


def test_all_right(runs: Runs) -> None:
    assert names(runs("all_right", "grpo.temperature=0.2", model=runs.careful)) == ["all_right"]


def test_all_wrong(runs: Runs) -> None:
    wrong = sums(runs.folder / "shifted.jsonl", 200, seed=3, shift=100)
    assert names(runs("all_wrong", data=wrong)) == ["all_wrong"]


def test_flat_reward(runs: Runs, paying: Path) -> None:
    assert names(runs("flat_reward", f"rewards=[{{name: '{paying}:any_text'}}]")) == ["flat_reward"]


def test_identical_completions(runs: Runs) -> None:
    cold = runs("identical", "grpo.temperature=0.01", data=runs.hard)
    assert names(cold) == ["identical_completions"]


def test_held_out_leaks(runs: Runs) -> None:
    """Named while the run begins and by ``diagnose``; the proposed sections cut a part off that is not trained on."""
    rows = [{"question": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(1, 7) for b in range(1, 30)]
    (file := runs.folder / "many.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    same, checks = (
        f"{{name: local, path: {file}}}",
        ("eval.enabled=true", "eval.samples=0", "grpo.max_steps=4"),
    )
    leaking = runs("leaking", f"data.train={same}", f"data.eval={same}", *checks)
    assert names(leaking) == ["held_out_leaks"]
    (finding,) = diagnose(leaking)
    text = "of 174 held-out problems are also in the training data, such as: "
    assert text in finding.evidence[0] and text in (leaking / "training.log").read_text(encoding="utf-8")
    assert names(runs("cut-off", *checks, *finding.change)) == []


def test_lines_change_what_is_to_blame(runs: Runs, paying: Path) -> None:
    """What narrows, overheats or overflows is put back, and nothing beside it is touched."""
    narrow = runs("narrow", "grpo.top_k=1", data=runs.hard)
    assert diagnose(narrow)[0].change == ("grpo.top_k=0",)
    assert diagnose(runs("hot", "grpo.temperature=5"))[0].change == ("grpo.temperature=1.0",)
    assert diagnose(runs("not_finite", f"grpo.loss={paying}:astronomic"))[0].change == ("grpo.loss=dapo",)


def test_truncated(runs: Runs) -> None:
    assert names(runs("truncated", "grpo.max_completion_tokens=6")) == ["truncated"]


def test_unparseable(runs: Runs) -> None:
    run = runs("unparseable", "prompt.format=question_only")
    assert names(run) == ["prompt_changed"]  # the model was trained with another one
    unknown = runs.folder / "unparseable_elsewhere"
    shutil.copytree(run, unknown)
    config = (run / "config.yaml").read_text(encoding="utf-8").replace(str(runs.model), "some/model")
    (unknown / "config.yaml").write_text(config, encoding="utf-8")
    assert names(unknown) == ["unparseable"]


def test_no_stop(runs: Runs) -> None:
    model = changed_copy(runs.model, runs.folder / "deaf", eos_token_id=5, eos_token="!")
    assert names(runs("no_stop", "grpo.max_completion_tokens=64", model=model)) == ["no_stop"]


def test_not_finite(runs: Runs, paying: Path) -> None:
    assert names(runs("not_finite", f"grpo.loss={paying}:astronomic")) == ["not_finite"]


def test_weights_unchanged(runs: Runs) -> None:
    stiff = runs("weights_unchanged", "model.dtype=bfloat16", "grpo.learning_rate=1e-8", "grpo.max_steps=8")
    assert names(stiff) == ["weights_unchanged"]


def test_weights_barely_move(runs: Runs) -> None:
    coarse = runs("barely", "model.dtype=bfloat16", "grpo.learning_rate=2e-6", "grpo.max_steps=8")
    assert names(coarse) == ["weights_barely_move"]


def test_learning_rate_too_small(runs: Runs) -> None:
    assert names(runs("too_small", "grpo.learning_rate=1e-10")) == ["learning_rate_too_small"]


def test_learning_rate_too_large(runs: Runs) -> None:
    assert names(runs("too_large", "grpo.learning_rate=0.1")) == ["learning_rate_too_large"]


def test_entropy_collapse(runs: Runs, paying: Path) -> None:
    """Only shortness pays and nothing is ever right: the policy shrinks to one certain text."""
    wrong = sums(runs.folder / "shifted3.jsonl", 200, seed=3, shift=100)
    sure = runs(
        "entropy_collapse",
        f"rewards=[{{name: '{paying}:short'}}]",
        "grpo.learning_rate=3e-3",
        "grpo.max_steps=40",
        data=wrong,
    )
    assert names(sure) == ["reward_pays_others"] and symptom(sure, "entropy_collapse")


def test_entropy_that_rose_before_it_collapsed(runs: Runs) -> None:
    """A policy that was certain at the start: its first entropy says nothing of what it lost since."""
    cold = runs("identical", "grpo.temperature=0.01", data=runs.hard)  # hardly a group differs in reward
    copy = runs.folder / "rose"
    shutil.copytree(cold, copy)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "entropy" in line and line["stage"] == "grpo"]
    for place, line in enumerate(logged):
        line["entropy"] = (0.14, 0.6, 0.6, 0.08)[4 * place // len(logged)]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "entropy_collapse" in names(copy)


def test_reward_fails(runs: Runs) -> None:
    broken = runs.folder / "broken.py"
    text = "def broken(rollout):\n    if len(rollout.completion_ids) != 2:  # as it is tried before the run\n        raise ValueError('not this one')\n    return 1.0\n"
    broken.write_text(text, encoding="utf-8")
    alone = runs("reward_fails", f"rewards=[{{name: '{broken}:broken'}}]")
    assert names(alone) == ["reward_fails"]
    beside = runs("reward_fails_beside", f"rewards=[correct, {{name: '{broken}:broken', weight: 0.1}}]")
    assert "reward_fails" in names(beside)


def test_length_growth(runs: Runs, paying: Path) -> None:
    wrong = sums(runs.folder / "shifted2.jsonl", 200, seed=3, shift=100)
    grown = runs(
        "length_growth",
        f"rewards=[{{name: '{paying}:long'}}]",
        "grpo.max_completion_tokens=96",
        "grpo.learning_rate=3e-3",
        "grpo.max_steps=20",
        data=wrong,
    )
    assert names(grown) == ["reward_pays_others"] and symptom(grown, "length_growth")


def test_kl_blow_up(runs: Runs) -> None:
    assert "kl_blow_up" in names(
        runs("kl_blow_up", "grpo.beta=1e-6", "grpo.learning_rate=1e-2", "grpo.max_steps=20")
    )


def test_reward_hacking(runs: Runs, paying: Path) -> None:
    hacked = runs(
        "reward_hacking",
        f"rewards=[{{name: '{paying}:shouting'}}]",
        "grpo.learning_rate=2e-3",
        "grpo.max_steps=24",
    )
    assert names(hacked) == ["reward_pays_others"] and symptom(hacked, "reward_hacking")


def test_log_prob_mismatch(runs: Runs) -> None:
    noisy = runs("mismatch", "model.lora={rank: 8, alpha: 256, dropout: 0.5}", "grpo.learning_rate=2e-3")
    assert names(noisy) == ["log_prob_mismatch"]  # what it breaks follows from it


def test_no_signal_after_two_steps(runs: Runs, paying: Path) -> None:
    unpaid = runs(
        "unpaid", f"rewards=[{{name: '{paying}:nothing'}}]", "grpo.max_steps=2", "grpo.warmup_steps=0"
    )
    assert names(unpaid) == ["no_signal"]
    assert "WARNING no_signal: Nothing can be learned so far: every reward is 0" in (
        unpaid / "training.log"
    ).read_text(encoding="utf-8")


def test_nothing_answered_after_one_step(runs: Runs) -> None:
    cut = runs("unanswered", "grpo.max_completion_tokens=6", "grpo.max_steps=1", "grpo.warmup_steps=0")
    assert names(cut) == ["nothing_answered"]


def test_a_run_that_collapses_ends_at_its_best_checkpoint(runs: Runs) -> None:
    """A learning rate a hundred times too large, ended within the patience; the report and ``diagnose`` say it."""
    run = runs(
        "ended_early",
        "grpo.learning_rate=0.1",
        "grpo.max_steps=40",
        "grpo.save_total_limit=1",
        "eval.enabled=true",
        f"data.eval={{name: local, path: {runs.train}, limit: 40}}",
        "grpo.eval_every=2",
        "grpo.stop={patience: 4, on: [collapse, plateau]}",
    )
    best = json.loads((run / "grpo" / "best.json").read_text())
    assert best["ended"]["reason"] == "collapse" and best["greedy_accuracy"] > 0.3
    assert best["ended"]["step"] <= best["step"] + 2 + 4 < 12
    kept = load_file(run / "grpo" / best["checkpoint"] / "model.safetensors")
    final = load_file(run / "grpo" / "final" / "model.safetensors")
    assert all(torch.equal(final[name], weight) for name, weight in kept.items())
    last = max(run.glob("grpo/checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
    assert int(last.name.rpartition("-")[2]) == best["ended"]["step"]
    assert "ended_early" in names(run)
    evaluated = json.loads((run / "stages.json").read_text())["eval-grpo"]["greedy_accuracy"]
    assert evaluated == best["greedy_accuracy"]
    sentence = f"The run was ended after step {best['ended']['step']} because it collapsed"
    assert sentence in build_report(run).read_text(encoding="utf-8")
    assert "grpo/final is the best checkpoint" in (run / "training.log").read_text(encoding="utf-8")


@pytest.mark.long
def test_rated_problems_are_filtered_and_a_killed_rating_continues(runs: Runs, tmp_path: Path) -> None:
    """Here for its model: it solves some of the sums, and none of those whose gold answer is wrong."""
    small = ["eval.batch_size=25", "grpo.max_completion_tokens=32", "sft.enabled=false", *SMALL]

    def recipe(folder: Path, *changes: str) -> Recipe:
        data = f"data.train={{name: local, path: {runs.hard}}}"
        return load_recipe("quickstart", [*small, data, f"output_dir={folder}", *changes]).recipe

    whole = read_table(rate(recipe(tmp_path / "whole"), samples=4, model=runs.model))
    rights = {entry["id"]: entry["right"] for entry in whole["problems"].values()}
    shifted = {key_of(p) for p in Problems.load(recipe(tmp_path)).train if int(p.answer) > 100}
    assert not any(whole["problems"][key]["right"] for key in shifted) and max(rights.values()) == 4
    assert len({entry["right"] for entry in whole["problems"].values()}) > 2

    done: list[int] = []

    def stop(count: int, _: int) -> None:
        done.append(count)
        if count >= 50:  # two batches of 25
            raise KeyboardInterrupt

    again = recipe(tmp_path / "again")
    with pytest.raises(KeyboardInterrupt):
        rate(again, samples=4, model=runs.model, on_progress=stop)
    progress = next((tmp_path / "again" / "pass_rates").glob("*.progress.jsonl"))
    before = progress.read_text().splitlines()
    assert len(before) == 3 and not [*progress.parent.glob("*.json")]
    path = rate(again, samples=4, model=runs.model)
    assert read_table(path) == whole and not progress.exists()
    moved: list[float] = []
    rate(again, samples=4, model=runs.model, on_progress=lambda count, _: moved.append(count))
    assert not any(moved)  # nothing is left to sample

    with pytest.raises(ConfigError, match=r"has not been rated.*algorist data rate RECIPE"):
        with_pass_rates(recipe(tmp_path / "again", "data.train.pass_rate=[0.2,0.8]"), recipe_format(again))
    named = [f"model.name={runs.model}", f"data.train.pass_rates={path}"]
    chosen = Problems.load(recipe(tmp_path, *named, "data.train.pass_rate=[0.2,0.8]"))
    expected = {key for key, entry in whole["problems"].items() if 0.2 <= entry["right"] / 4 <= 0.8}
    assert {key_of(p) for p in chosen.train} == expected and 0 < len(expected) < len(whole["problems"])
    with_sft = recipe(
        tmp_path, "sft.enabled=true", f"data.train.pass_rates={path}", "data.train.pass_rate=[0.2,0.8]"
    )
    assert len(Problems.load(with_sft).sft) > len(chosen.train), "demonstrations are not filtered"
    of_model = recipe(tmp_path / "again", f"model.name={runs.model}", "data.train.pass_rate=[0,0.1]")
    drafted = Draft.of(of_model, in_folder=False)
    assert drafted.recipe.data.train.pass_rates == str(path), "found by model and protocol"
    with pytest.raises(DataError, match=r"0 of \d+ problems of 'local' lie within 0.9 and 0.95"):
        Problems.load(recipe(tmp_path, *named, "data.train.pass_rate=[0.9,0.95]"))


OTHER_FILES = (
    "unit/diagnosis/test_rules.py",
    "unit/diagnosis/test_signals.py",
    "runs/test_causes.py",
    "runs/test_tools.py",
)


def test_every_rule_has_a_test() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    here += "".join((Path(__file__).parents[1] / name).read_text(encoding="utf-8") for name in OTHER_FILES)
    assert [name for name in all_rules() if f'"{name}"' not in here] == []


def test_a_run_says_a_cause_once_while_it_trains(runs: Runs) -> None:
    run = runs("truncated", "grpo.max_completion_tokens=6")
    told = [
        line
        for line in (run / "training.log").read_text(encoding="utf-8").splitlines()
        if "truncated:" in line
    ]
    assert len(told) == 1 and f"algorist diagnose {run}" in told[0]
