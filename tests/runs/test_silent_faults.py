"""What a run has measured, stored or been told stays as it was: evaluations, verdicts, rewards, columns, ids and sampling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from algorist.config.load import load_recipe
from algorist.config.schema import DatasetSection
from algorist.config.yaml_text import to_yaml
from algorist.data import load_problems
from algorist.errors import DataError
from algorist.evaluation.artifact import read_artifact, write_artifact
from algorist.extensions.regrade.differences import differences
from algorist.extensions.tools.replies import Replies
from algorist.objectives.advantages import per_reward_normalized
from algorist.prompts import get_format
from algorist.runs.pipeline import Run, run_recipe
from algorist.runs.sample import sample_problems
from algorist.store.read import rollouts
from tests.conftest import Cli
from tests.marks import first
from tests.tiny import save_writer, tiny_policy

OPENS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<reasoning>\\n' }}{% endif %}"
)
"""A chat template that opens the reasoning, as R1's does."""
ONLY_RIGHT = '''def only_right(rollout, problem):
    """Pay for right answers; no verdict on the others."""
    return 1.0 if rollout.grade and rollout.grade.correct else None

def column(rollout, problem):
    """Pay what the row says."""
    return float(problem.extra["worth"])
'''


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def trained(folder: Path, *settings: str, **how: Any) -> Run:
    place = ("device=cpu", "threads=1", f"output_dir={folder}", "run_name=r", "eval.samples=0")
    return run_recipe(load_recipe("smoke-cpu", [*place, *settings]).recipe, **how)


@pytest.mark.parametrize("rest", first(1, [("grpo",), ("sft", "grpo")]), ids=["only grpo", "all"])
def test_a_continued_run_keeps_the_evaluation_of_its_start(tmp_path: Path, rest: tuple[str, ...]) -> None:
    settings = ("eval.baseline=true", "sft.max_steps=60", "sft.learning_rate=5e-3", "grpo.max_steps=1")
    trained(tmp_path, *settings, stages=("sft",))
    before = [read_artifact(tmp_path / "r" / "eval", name).samples for name in ("base", "sft")]
    assert before[0] != before[1], "the model has learned something"
    trained(tmp_path, *settings, resume=True, stages=rest)
    after = [read_artifact(tmp_path / "r" / "eval", name).samples for name in ("base", "sft")]
    assert after == before
    trained(tmp_path, *settings, resume=True)
    assert read_artifact(tmp_path / "r" / "eval", "base").samples == before[0]


def test_an_evaluation_is_made_anew_for_another_checker(cli: Cli, tmp_path: Path) -> None:
    model = save_writer(tmp_path / "writer", "<reasoning>", "a", "</reasoning>", "<answer>", "7", "</answer>")
    rows = jsonl(tmp_path / "t.jsonl", [{"question": f"{n} + 1?", "answer": str(n)} for n in range(4)])
    checker = tmp_path / "chk.py"
    found = []
    for data, code in (
        (str(rows), "True"),
        (f"{rows},checker={checker}:judge", "True"),
        (f"{rows},checker={checker}:judge", "False"),
    ):
        checker.write_text(f"def judge(problem, answer):\n    return {code}\n")
        words = ("--format", "reasoning_answer", "--samples", "0", "--out", str(tmp_path / "e"), "--json")
        result = cli("eval", str(model), "--data", data, *words)
        assert result.returncode == 0, result.stderr
        (evaluated,) = json.loads(result.stdout)["evaluations"]
        found.append(evaluated["metrics"]["greedy_accuracy"]["value"])
    assert found == [0.0, 1.0, 0.0]


def test_completions_of_a_template_that_opens_the_reasoning_are_well_formed() -> None:
    form, rest = get_format("reasoning_answer"), "3 + 4 = 7\n</reasoning>\n<answer>\n7\n</answer>"
    opened = form.read(rest, "Q<|im_start|>assistant\n<reasoning>\n")
    assert opened.well_formed and opened.reasoning == "3 + 4 = 7" and opened.answer == "7"
    assert not form.read(rest, "Q<|im_start|>assistant\n").well_formed
    assert form.read("<reasoning>\n" + rest, "Q<|im_start|>assistant\n").well_formed


def test_demonstrations_are_drawn_from_a_model_whose_template_opens_the_reasoning(
    cli: Cli, tmp_path: Path
) -> None:
    model = save_writer(tmp_path / "w", "<reasoning>", "a", "</reasoning>", "<answer>", "7", "</answer>")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "chat_template.jinja").write_text(OPENS.replace("<reasoning>\\n", "<reasoning>"))
    rows = jsonl(tmp_path / "t.jsonl", [{"question": f"{n} + 1?", "answer": "7"} for n in range(4)])
    made = tmp_path / "made.jsonl"
    result = cli(
        "data", "sample", "smoke-cpu", f"data.train={{name: local, path: {rows}}}", "--model", str(model),
        "--samples", "1", "--out", str(made), "grpo.temperature=0.1", f"output_dir={tmp_path}", "threads=1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert [json.loads(line)["solution"] for line in made.read_text().splitlines()] == ["a"] * 4


def test_a_reward_without_a_verdict_stops_nothing(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ONLY_RIGHT)
    trained(
        tmp_path,
        f"rewards=[{{name: '{tmp_path}/own.py:only_right'}}]",
        "report_to=[tensorboard]",
        "sft.max_steps=5",
        "grpo.max_steps=2",
        "grpo.samples_every=1",
    )
    run = tmp_path / "r"
    assert None in [row["reward"] for row in rollouts(run, limit=None)]
    shown = cli("inspect", str(run), "--limit", "100")
    assert shown.returncode == 0 and "reward none" in shown.stdout
    again = cli("regrade", str(run))
    assert again.returncode == 0 and "0 rewards change" in again.stdout


def test_rewards_that_read_a_column_are_the_same_when_they_are_graded_again(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ONLY_RIGHT)
    rows = jsonl(
        tmp_path / "t.jsonl", [{"question": f"{n} + 1?", "answer": str(n + 1), "worth": n} for n in range(16)]
    )
    trained(
        tmp_path,
        f"rewards=[{{name: correct}}, {{name: '{tmp_path}/own.py:column'}}]",
        f"data.train={{name: local, path: {rows}}}",
        "grpo.max_steps=2",
        "sft.max_steps=1",
    )
    assert differences(tmp_path / "r", None)["rewards_changed"] == 0


def test_own_rollouts_are_found_again_behind_a_filter_and_a_limit(tmp_path: Path) -> None:
    texts = [f"{n} + 1?" + " please" * (n % 5) for n in range(40)]
    rows = jsonl(tmp_path / "t.jsonl", [{"question": text, "answer": "1"} for text in texts])
    trained(
        tmp_path,
        f"data.train={{name: local, path: {rows}, limit: 16, max_prompt_percentile: 50}}",
        "grpo.max_steps=2",
        "sft.max_steps=1",
    )
    params = {"run": str(tmp_path / "r"), "correct": False, "well_formed": False, "truncated": True}
    with pytest.raises(DataError) as error:  # the untrained model writes nothing that can be shown
        load_problems(DatasetSection.model_validate({"name": "rollouts", "params": params}))
    assert "does not give" not in str(error.value)


def test_min_p_is_that_of_grpo_wherever_it_is_sampled(tmp_path: Path) -> None:
    policy, form = tiny_policy(), get_format("reasoning_answer")
    problems = load_problems(DatasetSection.model_validate({"name": "arithmetic", "limit": 4}))
    different = []
    for least in (0.0, 0.999):
        recipe = load_recipe(
            "smoke-cpu", [f"grpo.min_p={least}", "grpo.max_completion_tokens=8", "grpo.temperature=1.0"]
        ).recipe
        rows, _ = sample_problems(
            recipe, policy, problems, form, samples=8, seed=1, keep=tmp_path / f"{least}.jsonl"
        )
        different.append(len({(row["problem_id"], row["completion"]) for row in rows}))
    assert different[0] > 16 and different[1] == 4


def test_an_environments_reply_is_a_message_as_it_stands() -> None:
    policy = tiny_policy("boxed")
    from algorist.runs.asking import attach_asking

    recipe = load_recipe("smoke-cpu", ["prompt.format=boxed"]).recipe
    attach_asking(policy.tokenizer, recipe, get_format("boxed"))
    replies = Replies.__new__(Replies)
    replies.tokenizer, replies.form = policy.tokenizer, get_format("boxed")
    before, after = replies._message("user", True)
    assert "boxed" not in before + after


def test_the_last_marked_line_is_the_gold(tmp_path: Path) -> None:
    rows = jsonl(
        tmp_path / "t.jsonl", [{"question": "3 + 4?", "answer": "#### Step 1: add\n3 + 4 = 7\n#### 7"}]
    )
    (problem,) = load_problems(DatasetSection.model_validate({"name": "local", "path": str(rows)}))
    assert problem.answer == "7"
    (problem,) = load_problems(DatasetSection.model_validate({"name": "gsm8k", "path": str(rows)}))
    assert (problem.answer, problem.solution) == ("7", "#### Step 1: add\n3 + 4 = 7")


def test_columns_of_later_rows_count(tmp_path: Path) -> None:
    first_row = {"question": "1 + 1?", "answer": "2"}
    rows = jsonl(tmp_path / "t.jsonl", [first_row, {**first_row, "question": "1 + 2?", "level": "hard"}])
    problems = load_problems(DatasetSection.model_validate({"name": "local", "path": str(rows)}))
    assert [p.level for p in problems] == ["", "hard"]
    boxed = {"problem": "2 + 3?", "solution": "It is \\boxed{5}."}
    rows = jsonl(
        tmp_path / "t.jsonl", [boxed, {"problem": "2 + 4?", "solution": "\\boxed{6}", "answer": "7"}]
    )
    with pytest.raises(DataError, match="row 1"):  # its answer column is empty, where another row has one
        load_problems(DatasetSection.model_validate({"name": "local", "path": str(rows)}))


def test_groups_without_a_signal_get_exact_zeros() -> None:
    torch.manual_seed(0)
    for _ in range(20):
        parts_PGK = torch.rand(8, 6, 2)
        parts_PGK[:4] = torch.rand(4, 1, 2)
        values_PG = per_reward_normalized(parts_PGK.sum(-1), parts_PGK, torch.tensor([1.0, 0.3]))
        assert not values_PG[:4].any() and bool((values_PG[4:] != 0).all())


def test_ids_that_stand_for_two_questions_are_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        "from algorist.data import dataset\nfrom algorist.types import Problem\n\n\n"
        "@dataset('twice')\ndef twice(source):\n"
        "    return [Problem(f'topic{n % 4}', f'{n} + 1?', str(n + 1)) for n in range(32)]\n"
    )
    result = cli(
        "run",
        "smoke-cpu",
        f"plugins=[{tmp_path}/twice.py]",
        "data.eval={name: twice}",
        f"output_dir={tmp_path}",
    )
    assert result.returncode == 2 and "has two questions with the id 'topic0'" in result.stderr
    assert not (tmp_path / "smoke-cpu" / "sft").exists()


def test_demonstrations_are_counted_without_rows_that_have_none(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(64)]
    for row in rows[:8]:
        row["solution"] = "Count on."
    file, said = jsonl(tmp_path / "t.jsonl", rows), []

    class Display:
        def __getattr__(self, name: str) -> Any:
            return said.append if name == "say" else lambda *_: None

    trained(
        tmp_path, f"data.sft={{name: local, path: {file}}}", "sft.max_steps=1", "grpo.enabled=false",
        display=Display(),
    )  # fmt: skip
    assert any(" 8 demonstrations" in line for line in said), said
    assert any("56 of 64 problems are left out: they have no worked solution" in line for line in said)


def test_options_are_taken(cli: Cli, tmp_path: Path) -> None:
    trained(tmp_path, "sft.max_steps=1", "grpo.enabled=false")
    run = tmp_path / "r"
    result = cli("eval", str(run), "--split", "train", "--limit", "4", "--samples", "0", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["evaluations"][0]["artifact"].endswith("-train.json")
    cut, config = "data.eval={name: holdout, params: {of: arithmetic, part: held_out}}", run / "config.yaml"
    config.write_text(to_yaml(load_recipe(config, [cut]).recipe))
    result = cli("eval", str(run), "--split", "train", "--limit", "4", "--samples", "0")
    assert result.returncode == 2 and "chosen by data.eval.params.part" in " ".join(result.stderr.split())
    old = read_artifact(run / "eval", "sft")
    rows = [row | {"completion_tokens": n % 5} for n, row in enumerate(old.samples)]
    common: dict[str, Any] = {"metrics": old.metrics, "protocol": old.protocol, "model": "m", "dataset": "d"}
    write_artifact(run / "eval", "other", samples=rows, **common)
    shown = cli("inspect", str(run / "eval" / "other.json"), "--sort=-completion_tokens", "--json")
    lengths = [row["completion_tokens"] for row in json.loads(shown.stdout)["rows"]]
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) > 1


def test_a_finished_stage_without_its_model_is_made_again_and_not_passed_over(
    cli: Cli, tmp_path: Path
) -> None:
    settings = ("sft.max_steps=2", "grpo.max_steps=2", "grpo.save_steps=1")
    trained(tmp_path, *settings)
    run = tmp_path / "r"
    before = (run / "grpo" / "final" / "model.safetensors").read_bytes()
    shutil.rmtree(run / "grpo" / "final")
    refused = cli("solve", "1 + 1?", "--model", str(run))
    assert refused.returncode == 2 and "grpo of" in refused.stderr and "is gone" in refused.stderr
    trained(tmp_path, *settings, resume=True)
    assert (run / "grpo" / "final" / "model.safetensors").read_bytes() == before
    shutil.rmtree(run / "sft" / "final")  # saves space: GRPO has gone on from it
    trained(tmp_path, *settings, resume=True)
    assert (
        not (run / "sft" / "final").exists() and cli("solve", "1 + 1?", "--model", str(run)).returncode == 0
    )


def test_a_run_is_no_model_to_train_and_an_empty_file_no_recipe(cli: Cli, tmp_path: Path) -> None:
    trained(tmp_path, "sft.max_steps=1", "grpo.enabled=false")
    result = cli("run", "smoke-cpu", f"model.name={tmp_path}/r", f"output_dir={tmp_path}", "run_name=s")
    assert result.returncode == 2 and f"it is a run, whose models are {tmp_path}/r/sft/final" in result.stderr
    (tmp_path / "empty.yaml").write_text("")
    result = cli("run", str(tmp_path / "empty.yaml"))
    assert result.returncode == 2 and "found nothing" in result.stderr


@pytest.mark.parametrize("section", ["sft", "train"])
def test_long_prompts_are_left_out_of_sft_too(section: str, tmp_path: Path) -> None:
    rows = [
        {"question": f"{n} + 1?" + " please" * (n % 2), "answer": str(n + 1), "solution": "so"}
        for n in range(32)
    ]
    place = jsonl(tmp_path / "rows.jsonl", rows)
    settings = [
        "grpo.enabled=false",
        "eval.enabled=false",
        "sft.max_steps=null",
        "sft.epochs=1",
        "sft.batch_size=4",
    ]
    data = [f"data.{part}={{name: local, path: {place}}}" for part in {"train", section}]
    data += ["data.sft=null"] if section == "train" else []
    half = f"data.{section}.max_prompt_percentile=50"
    for name, more in {"all": [], "short": [half], "few": [half, f"data.{section}.limit=16"]}.items():
        trained(tmp_path, *settings, *data, *more, f"run_name={name}")
    steps = [
        len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) for name in ("all", "short", "few")
    ]
    assert steps[0] == 8 and 4 <= steps[1] < 8
    assert steps[2] == 4, "the limit counts what the filters leave"


def test_a_resumed_run_evaluates_as_its_finished_stage_was(cli: Cli, tmp_path: Path) -> None:
    trained(tmp_path, "eval.baseline=true", "sft.max_steps=2", "grpo.max_steps=1", stages=("sft",))
    more = ["eval.max_completion_tokens=9", "eval.batch_size=7", "grpo.max_steps=2"]
    refused = cli("run", str(tmp_path / "r"), *more, "--resume", "--yes")
    assert refused.returncode == 2 and "eval.max_completion_tokens: None in the run, 9 now" in refused.stderr
    assert "batch_size" not in refused.stderr
    assert cli("run", str(tmp_path / "r"), *more[1:], "--resume", "--yes").returncode == 0


def test_a_run_is_continued_by_its_folder(cli: Cli, tmp_path: Path) -> None:
    trained(tmp_path, "sft.max_steps=2", "grpo.max_steps=1", stages=("sft",))
    other = cli("run", "smoke-cpu", f"output_dir={tmp_path}", "run_name=r", "--resume", "--yes")
    assert other.returncode == 2 and f"algorist run {tmp_path}/r --resume" in other.stderr
    done = cli("run", str(tmp_path / "r"), "--resume", "--yes")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r" / "grpo" / "final").is_dir()


def test_rewards_that_take_most_of_a_step_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("algorist.extensions.examples.SLOW_S", 0.2)
    (tmp_path / "own.py").write_text(
        "import time\n\n\ndef slow(rollout, problem):\n    time.sleep(0.1)\n    return 1.0\n"
    )
    trained(
        tmp_path,
        f"rewards=[{{name: '{tmp_path}/own.py:slow'}}]",
        "sft.max_steps=1",
        "grpo.max_steps=3",
        "eval.enabled=false",
    )
    assert capsys.readouterr().err.count("warning: the rewards take ") == 1


def test_a_reward_is_explained_with_its_verdict(cli: Cli) -> None:
    shown = cli("rewards", "explain", "--completion", "The answer is 12.", "--answer", "12")
    assert "graded no_answer; read as the answer: None" in shown.stderr
