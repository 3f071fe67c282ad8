"""Problems written as environments for others: read back they pay the same, and stock TRL trains on them."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from algorist.cli.benchmark_option import read_benchmarks
from algorist.data import load_problems
from algorist.data.base import Source
from algorist.extensions.verifiers import taskset
from algorist.prompts import get_format
from algorist.rewards import build_rewards
from algorist.types import Group, Problem, Rollout
from algorist_grader import grade, grade_completion
from algorist_grader.user_code import import_file
from tests.conftest import Cli
from tests.marks import first
from tests.tiny import TOKENIZER, make_model
from tests.unit.extensions.test_environments import call as tool_call
from tests.unit.extensions.test_environments import form_of, groups_of

STANDIN = Path(__file__).parents[1] / "data" / "verifiers_standin"
REAL = os.environ.get("VERIFIERS_PYTHON", "")
SETS = {
    "arithmetic": ("arithmetic,params={count: 12}", "reasoning_answer", "numeric"),
    "countdown": ("countdown,params={count: 12}", "reasoning_answer", "symbolic"),
    "files": ("local,path=rows.jsonl", "boxed", "symbolic"),
    "own": ("local,path=rows.jsonl,checker=checks.py:even", "think_answer", "symbolic"),
}


@pytest.fixture(params=first(1, SETS))
def exported(request: pytest.FixtureRequest, call: Cli, tmp_path: Path) -> tuple[str, list[Problem]]:
    """Return the name of a package that was written here, and its problems."""
    data, form, matcher = SETS[request.param]
    rows = [("Half of 7?", "7/2"), ("x twice?", "2x"), ("A thousand?", "1,000"), ("Even?", "4")] * 3
    lines = [{"question": f"{n}: {q}", "answer": a} for n, (q, a) in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "checks.py").write_text(
        "def even(problem, answer):\n    return answer.strip()[-1] in '02468'\n"
    )
    done = call(
        "export", "smoke-cpu", f"prompt.format={form}", "prompt.system_prompt=null", f"matcher={matcher}",
        "--environment", "--data", data, "--to", request.param,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return request.param, load_problems(read_benchmarks([data], split="train")[0].section)


def answers(problems: list[Problem], count: int = 144) -> list[tuple[Problem, str]]:
    """Pair problems with right, equal and wrong answers."""
    other = [p.answer for p in problems[1:]] + [problems[0].answer]
    forms = ["{a}", " ${a}$", "{b}", "", "3.5", "x+x", "not {a}", "{a} or {b}", "1000", "6", "abc", "{a}=24"]
    pairs = [(p, f.replace("{a}", p.answer).replace("{b}", b)) for p, b in zip(problems, other, strict=True) for f in forms]  # fmt: skip
    return list(islice(cycle(pairs), count))


def completions(name: str, pairs: list[tuple[Problem, str]]) -> list[str]:
    """Write answers as completions, well formed and not."""
    start, end = ("<think>", "</think>") if name == "own" else ("<reasoning>", "</reasoning>")
    forms = (
        [r"so \boxed{{{}}}", r"\boxed{{1}} or \boxed{{{}}}", "it is {}"]
        if name == "files"
        else [
            f"{start}a{end}<answer>{{}}</answer>", f"{start}<answer>{{}}</answer>", "<answer>{}</answer>",
            f"{start}a{end}<answer>1</answer><answer>{{}}</answer>", f"a{end}\n<answer>{{}}</answer>.",
        ]
    )  # fmt: skip
    return [form.format(answer) for form, (_, answer) in zip(cycle(forms), pairs)]


def test_a_taskset_pays_what_the_grader_says(exported: tuple[str, list[Problem]], tmp_path: Path) -> None:
    name, problems = exported
    if not REAL:
        shutil.copytree(STANDIN, tmp_path / name, dirs_exist_ok=True)
    tasks = taskset.verifiers(Source(path=name, params={"taskset": name, "python": REAL or sys.executable}))
    form, matcher = get_format(SETS[name][1]), SETS[name][2]
    pairs = answers(problems)
    texts, by_question = (
        completions(name, pairs),
        {p.question: t for p, t in zip(problems, tasks, strict=True)},
    )
    (reward,) = build_rewards(["verifiers"], form)
    expected, paid = [], []
    for (problem, _), text in zip(pairs, texts, strict=True):
        verdict = grade_completion(text, problem.answer, parsed=form.parse(text), matcher=matcher, problem=problem.columns())  # fmt: skip
        expected.append(float(verdict.correct))
        group = Group(
            by_question[problem.question], "", [1], [Rollout([1], text, None, False, form.parse(text))]
        )
        paid += reward.values([group])
    assert paid == expected and 8 < sum(expected) < 130
    assert all(form.system_prompt in task.question and p.question in task.question for p, task in zip(problems, tasks, strict=True))  # fmt: skip


def test_the_class_pays_what_the_grader_says(exported: tuple[str, list[Problem]]) -> None:
    name, problems = exported
    rows = load_problems(read_benchmarks([f"{name}/{name}/problems.jsonl"], split="train")[0].section)
    assert [(p.id, p.answer) for p in rows] == [(p.id, p.answer) for p in problems]
    form = form_of(f"{name}/{name}/environment.py:{name.capitalize()}")
    paid, expected = [], []
    pairs = answers(problems)
    for row, problem in zip(rows, problems, strict=True):
        texts = [text for p, text in pairs if p is problem][
            : 3 if name == "own" else None
        ]  # its checker begins a process for each
        (group,) = groups_of(form, [row], *(tool_call("answer", text=text) for text in texts))
        paid += [rollout.reward for rollout in group.rollouts]
        expected += [float(grade(t, problem.answer, matcher=SETS[name][2], problem=problem.columns()).correct) for t in texts]  # fmt: skip
    assert paid == expected and len(paid) == (36 if name == "own" else 144) and 8 < sum(expected) < 130


def test_a_prompt_of_the_file_is_not_that_of_the_rows(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"question": "1 + 1?", "answer": "2", "prompt": "Be brief. 1 + 1?"}\n'
    )
    done = call("export", "smoke-cpu", "--environment", "--data", "rows.jsonl", "--to", "own")
    assert done.returncode == 0, done.stderr
    (row,) = import_file(tmp_path / "own" / "own" / "environment.py").rows()
    assert row["prompt"] == [{"role": "user", "content": "1 + 1?"}] and row["answer"] == "2"


@pytest.mark.long
@pytest.mark.slow
def test_stock_trl_trains_on_the_class(call: Cli, tmp_path: Path) -> None:
    """A tiny model that knows one call by heart is paid by TRL's trainer for it."""
    torch, trl, datasets = (pytest.importorskip(name) for name in ("torch", "trl", "datasets"))
    lines = [{"question": f"{n} + {5 - n}?", "answer": "5"} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = call("export", "smoke-cpu", "--environment", "--data", "rows.jsonl", "--to", "fives")
    assert done.returncode == 0, done.stderr
    package: Any = import_file(tmp_path / "fives" / "fives" / "environment.py")
    model = make_model()
    tokenizer = TOKENIZER.__class__.from_pretrained(_saved(TOKENIZER, tmp_path))
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    environment, answer = package.Fives(), tool_call("answer", text="5") + "<|im_end|>" + tokenizer.eos_token
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(200):
        row = package.rows()[step % 5]
        message = {"role": "user", "content": row["question"] + environment.reset(**row)}
        prompt = tokenizer.apply_chat_template([message], tools=[environment.answer], add_generation_prompt=True, tokenize=False)  # fmt: skip
        ids = torch.tensor([tokenizer(prompt + answer)["input_ids"]])
        labels = ids.clone()
        labels[:, : len(tokenizer(prompt)["input_ids"])] = -100
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trainer = trl.GRPOTrainer(
        model,
        train_dataset=datasets.Dataset.from_list(package.rows()),
        environment_factory=package.Fives,
        processing_class=tokenizer,
        args=trl.GRPOConfig(
            str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=4, num_generations=4, logging_steps=1,
            max_completion_length=160, report_to=[], use_cpu=True, max_tool_calling_iterations=1, save_strategy="no",
        ),
    )  # fmt: skip
    trainer.train()
    steps = [row for row in trainer.state.log_history if "loss" in row]
    assert len(steps) == 2 and all(
        row["rewards/Fives/mean"] == row["tools/call_frequency"] > 0 for row in steps
    )


def _saved(tokenizer: Any, folder: Path) -> Path:
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["prompt.format=r1_zero", "prompt.system_prompt=null", "--to", "x"],
            "prompt.format is r1_zero, whose prompts or answers",
        ),
        (["tools=[calculator]", "--to", "x"], "has tools or an environment.*tools=null"),
        (["--to", "9x"], "--to 9x: its name is that of a Python package"),
        ([], "--to FOLDER, whose name is the package's"),
    ],
)
def test_what_cannot_be_exported_is_refused(words: list[str], message: str, call: Cli) -> None:
    done = call("export", "smoke-cpu", *words, "--environment")
    assert done.returncode == 2
    assert re.search(message, " ".join(done.stderr.split())), done.stderr
