"""``--json``: every verb that returns something prints one JSON object with the keys that docs/json.md documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from algorist.cli.recipes_command import json_page
from algorist.cli.terminal import keys_of
from algorist.cli.verbs import VERBS, app_of

RECIPE = (
    "threads=1",
    "eval.enabled=false",
    "sft.max_steps=1",
    "grpo.max_steps=1",
    "data.train.params.count=16",
)
DATA = [f"data.{part}={{name: local, path: rows.jsonl}}" for part in ("train", "sft", "eval")]
COMMANDS: dict[str, tuple[str, ...]] = {
    "new": ("new", "sums.csv", "--model", "tiny", "--no-trial"),
    "from-trl": ("from-trl", str(Path(__file__).parents[1] / "data/trl/sft.py")),
    "preflight": ("preflight", "smoke-cpu", *RECIPE[:2], "--problems", "2", "--samples", "2", "--no-trial"),
    "forecast": ("forecast", "runs/first", "eval.enabled=true", "--problems", "4", "--samples", "2"),
    "race": ("race", "smoke-cpu", "threads=1", "--seconds", "1"),
    "run": ("run", "smoke-cpu", *RECIPE, "run_name=second"),
    "iterate": (
        "iterate", "smoke-cpu", *RECIPE[:2], *DATA, "model.name=runs/first/sft/final", "grpo.enabled=false", "--rounds", "1",
        "--questions", "8", "--samples", "4", "run_name=again", "sft.batch_size=4", "grpo.temperature=0.01",
    ),
    "eval": ("eval", "runs/first", "--data", "arithmetic,params={count: 4}", "--out", "e"),
    "solve": ("solve", "What is 1 + 1?", "--model", "runs/first"),
    "grade": ("grade", "--answer", "0.5", "--gold", "1/2"),
    "regrade": ("regrade", "runs/first"),
    "rewards list": ("rewards", "list"),
    "rewards explain": ("rewards", "explain", "--completion", "<answer>7</answer>", "--answer", "7"),
    "data list": ("data", "list"),
    "data show": ("data", "show", "arithmetic"),
    "data check": ("data", "check", "arithmetic"),
    "data rate": ("data", "rate", "smoke-cpu", *RECIPE, "--samples", "2", "--model", "runs/first"),
    "data sample": (
        "data", "sample", "smoke-cpu", *RECIPE[:2], *DATA, "--samples", "2", "--model", "runs/first/sft/final", "--out", "right.jsonl",
        "grpo.temperature=0.01",
    ),
    "data overlap": ("data", "overlap", "arithmetic,params={count: 4}", "arithmetic,params={count: 4}"),
    "inspect": ("inspect", "runs/first", "--limit", "2"),
    "watch": ("watch", "runs/first"),
    "report": ("report", "runs/first"),
    "diagnose": ("diagnose", "runs/first"),
    "bisect": ("bisect", "runs/first", "--like", "runs/first"),
    "compare": ("compare", "e/own.json", "e/own.json"),
    "export": ("export", "runs/first", "--to", "model"),
    "tour": ("tour",),
    "rewards audit": ("rewards", "audit", "correct", "--problems", "2"),
    "recipes list": ("recipes", "list"),
    "recipes show": ("recipes", "show", "quickstart"),
    "doctor": ("doctor", "--no-hub"),
}  # fmt: skip


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def documented() -> dict[str, set[str]]:
    """Return the keys of each verb, from the type that it returns."""
    return {
        f"{verb} {command.name or ''}".strip(): set(keys_of(vars(command.callback)["returns"]))
        for verb in VERBS
        for command in app_of(verb).registered_commands
        if "returns" in vars(command.callback)
    }


def test_each_verb_that_returns_something_is_tried() -> None:
    assert documented().keys() == COMMANDS.keys()
    assert all(key.isidentifier() and keys for keys in documented().values() for key in keys)


def test_the_page_is_what_the_code_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    assert page == json_page(), "write it again: algorist recipes json > docs/json.md"


@pytest.mark.slow
def test_every_verb_prints_one_object_with_its_keys(verb: Any, tmp_path: Path) -> None:
    (tmp_path / "sums.csv").write_text(
        "question,answer\n" + "".join(f"{n} + 1?,{n + 1}\n" for n in range(40))
    )
    rows = [{"question": f"pear {n}?", "answer": "3", "solution": "pear."} for n in range(32)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taught = ("sft.max_steps=80", "sft.learning_rate=5e-3", "sft.save_steps=100", "grpo.max_steps=6")
    code, _, err = verb("run", "smoke-cpu", *RECIPE[:2], *DATA, *taught, "run_name=first")
    assert code == 0, err
    assert verb("eval", "runs/first", "--out", "e", "--name", "own", "--limit", "4")[0] == 0
    wrong = {}
    for name, words in COMMANDS.items():
        code, out, err = verb(*words, "--json")
        try:
            (line,) = out.splitlines()
            keys = set(json.loads(line, parse_constant=refuse))
        except ValueError as error:
            wrong[name] = f"exit {code}: {error}: {out[-300:]} {err[-300:]}"
            continue
        if keys != documented()[name]:
            wrong[name] = f"{keys} instead of {documented()[name]}"
    assert not wrong, wrong
