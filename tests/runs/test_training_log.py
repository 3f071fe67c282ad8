"""``training.log`` tells the run, and a script sees it work: start, data, model, steps, evaluations, warnings, end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from algorist.cli.terminal import TerminalDisplay
from algorist.config import load_recipe
from algorist.errors import AlgoristError
from algorist.runs.pipeline import run_recipe
from algorist.store.run_log import Display, Lines, Quiet
from tests.tiny import tiny_policy

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


@pytest.mark.parametrize("display", [Lines, TerminalDisplay])
def test_what_is_left_out_and_what_modules_warn_of_is_in_the_log_and_on_the_screen_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], display: type[Display]
) -> None:
    policy = tiny_policy()
    for part in (policy.model, policy.tokenizer):
        part.save_pretrained(tmp_path / "model")
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in (*range(16), *range(6), *range(3))]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in [*rows, {"question": "what?"}]))
    parts = ["eval.samples=0", "sft.enabled=false", "grpo.max_steps=1"]
    for key, part in (("train", "train"), ("eval", "held_out")):
        params = f"{{of: local, share: 0.7, skip_bad_rows: true, part: {part}}}"
        parts.append(f"data.{key}={{name: holdout, path: {tmp_path}/rows.jsonl, params: {params}}}")
    log = run(
        tmp_path, *parts, "data.train.unique=true", f"model.name={tmp_path}/model", "prompt.system_prompt=Hm.", "grpo.eval_every=null",
        display=display(),
    )  # fmt: skip
    told = capsys.readouterr()
    screen = " ".join((told.out + told.err).split())
    for text in (
        "dataset '.*rows.jsonl': 1 of 26 rows are left out, the first: row 26 has no gold answer",
        r"dataset 'holdout': \d of 1\d problems are left out: they repeat a question",
        r"dataset 'local': \d of 8 held-out problems are also in the training part and are left out; \d remain",
        "the system prompt never shows <reasoning>",
    ):
        assert len(re.findall(f"warning: {text}", screen.replace(" warning:", "\nwarning:"))) == 1, (
            text,
            screen,
        )
        assert len(re.findall(f"WARNING {text}", log)) in (1, 2), (text, log)  # train and eval read one file
    assert "demonstrations" not in screen and re.search(r"grpo: 1 steps?, reward .*, 0:\d\d", screen)
    assert re.search(r"grpo 1/1 · .* · correct 0\.\d+ · well_formed 0\.\d+ ·", log)
