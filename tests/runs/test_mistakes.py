"""A user's mistake: one screen, the way out, exit code 2, no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli


def folder_without_tokenizer(where: Path) -> Path:
    from algorist.models.tiny import tiny_model, train_tokenizer

    tokenizer = train_tokenizer(["one two three"], vocab_size=300)
    path = where / "model"
    tiny_model(tokenizer, hidden_size=32, layers=1).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["run", "quikstart"], ["unknown recipe", "Did you mean 'quickstart'"]),
        (["run", "quickstart", "grpo.grop_size=4"], ["unknown key", "Did you mean 'group_size'"]),
        (["run", "quickstart", "grpo.group_size=1"], ["grpo.group_size is 1", "take 8"]),
        (
            ["run", "quickstart", "grpo.group_size=7"],
            ["not divisible by", "grpo.gradient_accumulation_steps=7"],
        ),
        (
            ["run", "quickstart", "grpo.group_size=1000003"],
            ["not divisible by", "grpo.gradient_accumulation_steps=1000003"],
        ),
        (
            ["run", "quickstart", "data.train.name=gsm8k", "data.train.path=nowhere.jsonl"],
            ["no file or folder at nowhere.jsonl"],
        ),
        (["run", "quickstart", "model.name=./nowhere"], ["there is no model folder", "config.json"]),
        (["run", "quickstart", "model.name=Qwen/Qwen2.5-0.5B-Instruct"], ["model.name=FOLDER in a recipe"]),
        (["run", "quickstart", "prompt.format=thoughts"], ["unknown prompt format"]),
        (["run", "quickstart", "rewards=[{name: corect}]"], ["unknown reward", "Did you mean 'correct'"]),
        (
            ["run", "quickstart", "rewards=[{name: repetition, params: {ngram: 99999999999}}]"],
            ["ngram", "less than or equal to 1000"],
        ),
        (["run", "quickstart", "grpo.optim=adamw_trch"], ["grpo.optim is", "Did you mean 'adamw_torch'"]),
        (
            ["run", "quickstart", "sft.enabled=false", "--only", "sft"],
            ["would do nothing", "eval.baseline", "algorist eval"],
        ),
        (["solve", "1 + 1?"], ["no run under runs/"]),
        (["solve", "1 + \udcff?"], ["the question '1 + \\udcff?' is empty or not UTF-8"]),
        (["solve", " "], ["the question ' ' is empty or not UTF-8"]),
        (["eval", "runs/nothing/here"], ["no run or model"]),
        (["run", "quickstart", "--only", "grpo", "--resume"], ["nothing to resume"]),
        (["frobnicate"], ["no verb 'frobnicate'"]),
    ],
)
def test_one_screen_and_exit_code_2(call: Cli, arguments: list[str], parts: list[str]) -> None:
    done = call(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 20
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([], "has no rows"),
        ([{"question": "q", "answer": "no number here"}], "row 1 has no gold answer"),
        ([{"frage": "q", "antwort": "1"}], "row 1 has no question"),
    ],
)
def test_bad_rows(call: Cli, tmp_path: Path, rows: list[dict[str, str]], part: str) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    done = call("run", "quickstart", "data.train.name=gsm8k", "data.train.path=rows.jsonl")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert part in done.stderr


def test_a_model_folder_without_tokenizer(call: Cli, tmp_path: Path) -> None:
    path = folder_without_tokenizer(tmp_path)
    done = call("run", "quickstart", f"model.name={path}")
    assert done.returncode == 2
    assert "has no tokenizer" in done.stderr


@pytest.mark.slow
def test_a_reward_that_fails_on_what_the_model_writes_is_told_at_once(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def broken(completion):\n    if '<answer>' in completion: return 1.0\n    raise ValueError('my bug')\n\n"
        "def always(completion):\n    raise ValueError('my bug')\n"
    )
    done = call("run", "smoke-cpu", "rewards=[{name: 'mine.py:always'}]")
    assert done.returncode == 2 and "ValueError: my bug" in done.stderr and not (tmp_path / "runs").exists()
    done = call(
        "run", "smoke-cpu", "rewards=[correct, {name: 'mine.py:broken'}]", "sft.enabled=false", "eval.enabled=false"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = " ".join((done.stdout + done.stderr).split())
    assert (
        "reward 'broken' failed on 16 of 16 completions (ValueError: my bug in mine.py:3); they get 0" in told
    )
    lines = [
        json.loads(x) for x in (tmp_path / "runs" / "smoke-cpu" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [x["rewards/broken/failures"] for x in lines if "rewards/broken/mean" in x] == [16.0, 16.0]
    no_function = call("run", "smoke-cpu", "run_name=b", "rewards=[{name: mine.py}]")
    assert no_function.returncode == 2 and "mine.py:FUNCTION" in no_function.stderr


def test_a_prompt_file_in_another_encoding(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes("Rechne sorgfältig.".encode("latin-1"))
    done = call("run", "smoke-cpu", "prompt.system_prompt_path=prompt.txt")
    assert done.returncode == 2 and "prompt.system_prompt=null takes the file" in done.stderr
    done = call("run", "smoke-cpu", "prompt.system_prompt=null", "prompt.system_prompt_path=prompt.txt")
    assert done.returncode == 2 and "prompt.txt is not UTF-8 (byte 12)" in done.stderr, done.stderr


def test_a_rewards_fault_is_placed_in_its_own_file(call: Cli, tmp_path: Path) -> None:
    """It was a line of the library, or of algorist, that the user's line had called."""
    (tmp_path / "mine.py").write_text(
        "import json\n\n\ndef read(completion):\n    return json.loads(completion)['x']\n\n\n"
        "def column(rollout, problem):\n    return float(problem['tier'] == 'hard')\n"
    )
    words = ["rewards", "explain", "--completion", "<answer>7</answer>", "--answer", "7"]
    done = call(*words, "rewards=[{name: 'mine.py:read'}]")
    assert done.returncode == 1 and "(char 0) in mine.py:5\n" in done.stderr and "--row" not in done.stderr
    done = call(*words, "rewards=[{name: 'mine.py:column'}]")
    assert (
        "KeyError: 'tier' in mine.py:9\n" in done.stderr
        and "if tier is a column of your data: --row tier=VALUE" in done.stderr
    )
    assert call(*words, "rewards=[{name: 'mine.py:column'}]", "--row", "tier=hard").returncode == 0


@pytest.mark.parametrize(
    ("name", "rc", "said"),
    [
        ("scalar", 1, "TypeError: it returned 0.5; expected a list of one number per completion in mine.py:3"),
        ("missing", 1, "TypeError: there is no column 'ansr'. Did you mean 'answer'? Columns: "),
        ("missing", 1, "if ansr is a column of your data: --row ansr=VALUE"),
        ("keyless", 1, "it returned a dict with acc, but without the key score in mine.py:5"),
        ("array", 0, ""),
        ("forgot", 0, "no reward gave a number for the completion, only None: 'forgot' (mine.py:7). Nothing can"),
    ],
)  # fmt: skip
def test_what_a_reward_should_have_returned_is_said(
    verb: Any, tmp_path: Path, name: str, rc: int, said: str
) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy\n\ndef scalar(completions, **rows): return 0.5\n"
        "def missing(completions, ansr, **rows): return [0.0 for _ in completions]\n"
        "def keyless(data_source, solution_str, ground_truth, extra_info=None): return {'acc': 1.0}\n"
        "def array(rollout): return numpy.array([0.5])\ndef forgot(rollout): len(rollout.text)\n"
    )
    words = ["rewards", "explain", "--completion", "<answer>7</answer>", "--answer", "7"]
    code, out, err = verb(*words, f"rewards=[{{name: 'mine.py:{name}'}}]")
    assert code == rc and said in err and (name != "array" or "0.5" in out), err
