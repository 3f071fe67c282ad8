"""``training.log`` tells the run, and a script sees it work: start, data, model, steps, evaluations, warnings, end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from algorist.config import load_recipe
from algorist.errors import AlgoristError
from algorist.runs.pipeline import run_recipe
from algorist.store.run_log import Quiet

OWN = ["threads=1", "sft.logging_steps=1", "grpo.eval_every=1", "data.eval.limit=4"]


def run(folder: Path, *more: str, **settings: object) -> str:
    recipe = load_recipe("smoke-cpu", [*OWN, f"output_dir={folder}", "run_name=r", *more]).recipe
    run_recipe(recipe, **settings)
    return (folder / "r" / "training.log").read_text()


def test_the_log_tells_the_run_in_order(tmp_path: Path) -> None:
    log = run(tmp_path, "prompt.system_prompt=Hm.", "data.eval.params={count: 16, seed: 1}", display=Quiet())
    told = [
        r"algorist [\d.]+.* torch [\d.]+.* cores",
        rf"run folder {re.escape(str(tmp_path / 'r'))} .* seed 42",
        r"64 training problems \(arithmetic\), 200 demonstrations, 4 held out \(arithmetic\)",
        r"model tiny: [\d.]+ M parameters",
        r"sft begins",
        r"sft 1/2 · loss \d.*learning rate .*left",
        r"sft 2/2 · loss",
        r"eval sft: accuracy",
        r"grpo begins",
        r"eval grpo-step-1: accuracy",
        r"grpo 1/2 · loss .* reward .* gradient norm",
        r"grpo 2/2 · loss",
        r"eval grpo: accuracy",
        r"the run finished after 0:\d\d; its model: .*grpo/final",
    ]
    lines = iter(log.splitlines())
    for pattern in told:
        assert any(re.search(pattern, line) for line in lines), (
            f"{pattern} is missing or out of order in\n{log}"
        )
    texts = [line.split(" ", 4)[-1] for line in log.splitlines()]
    assert len(texts) == len(set(texts)), "a line is there twice"


def test_a_script_sees_the_run_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "eval.enabled=false")
    told = capsys.readouterr()
    assert "sft 2/2 · loss" in told.err and "grpo 2/2 · loss" in told.err and not told.out


def test_a_failed_run_says_so_in_its_log(tmp_path: Path) -> None:
    (tmp_path / "nan.py").write_text("def f(completion):\n    return 1.0\n")
    with pytest.raises(AlgoristError):
        run(tmp_path, "data.train.max_prompt_tokens=1", display=Quiet())
    assert "ERROR the run ended: DataError: no prompt has" in (tmp_path / "r" / "training.log").read_text()


def test_what_is_said_while_data_is_loaded_stands_in_the_log(tmp_path: Path) -> None:
    solved = [f'{{"problem": "1 + {n}?", "solution": "It is \\\\boxed{{{n + 1}}}."}}' for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*solved, '{"problem": "what?", "solution": "No."}']))
    data = f"data.train={{name: math, path: {tmp_path}/rows.jsonl}}"
    log = run(tmp_path, data, "sft.enabled=false", "grpo.max_steps=1", "eval.enabled=false", display=Quiet())
    assert re.search(r"WARNING .*1 of 9 rows.* left out", log) and log.count("left out") == 1, log
