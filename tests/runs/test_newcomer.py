"""What newcomers stumbled over: each on a real call, with what is now said."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from algorist.cli.explain import explain
from algorist.cli.session import command_again
from algorist.cli.terminal import Screen
from algorist.config import load_recipe
from algorist.errors import CheckpointError
from algorist.extensions.iterate.rounds import Drawing
from algorist.runs.pipeline import run_recipe
from algorist.training.checkpoint import write_manifest
from tests.warm import PYTHON

DOCS = Path(__file__).parents[2] / "docs"
SFT_ONLY = ["smoke-cpu", "threads=1", "grpo.enabled=false", "eval.enabled=false"]


def interrupted(folder: Path, ready: Path, *words: str) -> tuple[int, str]:
    """Start ``algorist``, send Ctrl-C as soon as ``ready`` is there, and return exit code and output."""
    process = subprocess.Popen(
        [PYTHON, "-m", "algorist.cli.main", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    deadline = time.monotonic() + 120
    while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (("run", "smoke-cpu"), "loading torch and transformers …"),
        (("preflight", "smoke-cpu"), "loading torch and transformers …"),
    ],
)
def test_the_first_line_on_a_pipe_comes_before_the_slow_imports(
    tmp_path: Path, words: tuple[str, ...], first: str
) -> None:
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text(
            "import os\nos._exit(7)  # nothing that waits in a buffer is written\n"
        )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "algorist.cli.main", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stdout.strip()) == (7, first), done.stderr


MISTAKES = {
    "data.train={name: local, path: a.csv, columns: {answer: answr}}": "Did you mean 'answer'",
    "data.train={name: local, path: a.csv}": "row 1 has no gold answer",
    "data.train={name: local, path: b.csv}": "b.csv:2: ",
    "data.train.name=a.csv": "data.train.name=local data.train.path=a.csv",
    "rewards=[{name: corect}]": "Did you mean 'correct'",
    "matcher=symbolik": "Did you mean 'symbolic'",
}
EACH = """
import sys
from algorist.cli.main import main
for setting in sys.argv[1:]:
    sys.argv = ["algorist", "run", "smoke-cpu", setting]
    try:
        main()
    except SystemExit as ended:
        print("code", ended.code, file=sys.stderr)
"""


@pytest.mark.slow
def test_mistakes_are_said_before_torch_is_imported(tmp_path: Path) -> None:
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "a.csv").write_text("question,answer\n1 + 1?,\n")
    (tmp_path / "b.csv").write_text("question,answer\n1 + 1?,2,3\n")
    done = subprocess.run(
        [sys.executable, "-c", EACH, *MISTAKES],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    *told, rest = " ".join(done.stderr.split()).split("code 2")
    assert (done.returncode, rest, len(told)) == (0, "", len(MISTAKES)), done.stderr
    for text, said in zip(told, MISTAKES.values(), strict=True):
        assert said in text, text
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_grpo_on_a_model_of_ones_own_loads_no_demonstrations(verb: Any) -> None:
    words = ("threads=1", "grpo.max_steps=1", "eval.samples=0", "data.eval.limit=4")
    assert verb("run", *SFT_ONLY, "run_name=a")[0] == 0
    code, out, err = verb(
        "run", "smoke-cpu", "--only", "grpo", *words, "model.name=runs/a/sft/final", "run_name=b"
    )
    assert code == 0 and "demonstrations" not in out and "SFT is skipped" not in out + err
    assert "eval grpo: accuracy" in out and "greedy accuracy:" not in out  # said once
    code, out, err = verb("run", "smoke-cpu", "--only", "grpo", *words, "eval.enabled=false", "run_name=c")
    # Nobody said that the tiny model is to be trained as it is.
    assert code == 0 and "warning: SFT is skipped" in out
    _, out, err = verb("run", "runs/b", "run_name=d")  # a run's folder as recipe: no SFT on top of b's own
    assert "runs/b was made with --only grpo" in err and "SFT" not in out
    assert not (Path("runs/d") / "sft").exists() and (Path("runs/d") / "grpo").is_dir()


@pytest.mark.slow
def test_sigterm_while_torch_loads_has_its_word(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "algorist", "run", *SFT_ONLY, "run_name=r"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.stdout and "loading torch" in run.stdout.readline()
    run.send_signal(signal.SIGTERM)
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 130 and "stopped before the first training step" in output, output
    assert "Traceback" not in output


@pytest.mark.slow
def test_ctrl_c_while_a_process_ends_shows_no_traceback() -> None:
    """The third of three: the first was answered, the second ended the run, exit hooks are at work."""
    code = (
        "import atexit, sys, time\nfrom algorist.cli.main import main\n"
        "atexit.register(lambda: (print('ending', flush=True), time.sleep(1), print('ended', flush=True)))\n"
        "sys.argv = ['algorist', 'grade', '--answer', '1', '--gold', '1']\nmain()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    while process.stdout.readline() != "ending\n":
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "ended\n", "")


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_says_how_to_start_again(verb: Any, tmp_path: Path) -> None:
    words = ["run", *SFT_ONLY, "run_name=early"]
    code, output = interrupted(tmp_path, tmp_path / "runs" / "early" / "config.yaml", *words)
    assert code == 130 and "Traceback" not in output, output
    (line,) = [line for line in output.splitlines() if line.startswith("stopped")]
    assert "before the first training step: nothing was trained" in line
    assert line.endswith(f"Start again: algorist {' '.join(words)}")
    assert not (tmp_path / "runs" / "early" / "sft").exists()
    code, out, _ = verb(*words)  # the same command
    assert code == 0 and "algorist solve" in out
    assert "algorist inspect" not in out and "algorist compare" not in out  # no rollouts, no evaluations
    assert (tmp_path / "runs" / "early" / "sft" / "final").is_dir()


def test_ctrl_c_later_names_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from algorist.cli.session import stopped_at_once

    run_recipe(load_recipe(SFT_ONLY[0], [*SFT_ONLY[1:], f"output_dir={tmp_path}", "run_name=r"]).recipe)
    monkeypatch.setattr(
        sys, "argv", ["algorist", "run", "-n", "2", "smoke-cpu", "--", "--mixed_precision", "no"]
    )
    run = tmp_path / "r"
    goes_on = "Continue: algorist run -n 2 smoke-cpu --resume -- --mixed_precision no"
    assert stopped_at_once(run) == (
        f"stopped at once; {run} keeps finished sft, what came after is done again. {goes_on}"
    )
    (run / "stages.json").unlink()
    assert f"keeps sft/checkpoint-2, what came after is done again. {goes_on}" in stopped_at_once(run)
    for folder in (run / "sft").glob("checkpoint-*"):
        folder.rename(tmp_path / folder.name)
    assert "before the first checkpoint: nothing that was trained is kept" in stopped_at_once(run)
    assert stopped_at_once(tmp_path / "none").endswith(
        "nothing was trained. Start again: algorist run -n 2 smoke-cpu -- --mixed_precision no"
    )


def test_rewards_explain_takes_overrides(verb: Any) -> None:
    words = ["rewards", "explain", "--completion", "<answer>7</answer>", "--answer", "7", "--json"]
    code, out, _ = verb(*words, "rewards=[{name: correct, weight: 3}]")
    assert code == 0 and json.loads(out) == {
        "total": 3.0,
        "rewards": {"correct": {"value": 1.0, "weight": 3.0}},
        "failed": {},
    }
    code, out, _ = verb(*words, "prompt.format=thoughts")
    assert code == 2
    code, _, err = verb(*words, "brief.yaml")
    assert code == 2 and "a recipe follows --recipe: --recipe brief.yaml" in err


class Kept(logging.Handler):
    """Keeps the messages of a library's logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.lines.append(record.getMessage())


@pytest.fixture
def transformers_says() -> Iterator[list[str]]:
    logger, kept = logging.getLogger("transformers"), Kept()
    before = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    yield kept.lines
    logger.removeHandler(kept)
    logger.setLevel(before)


def test_resume_of_a_tied_model_is_quiet_and_a_missing_weight_is_not(
    tmp_path: Path, transformers_says: list[str]
) -> None:
    words = [*SFT_ONLY[1:], f"output_dir={tmp_path}", "run_name=r", "sft.save_steps=1"]
    run_recipe(load_recipe("smoke-cpu", words).recipe)
    run, last = tmp_path / "r", tmp_path / "r" / "sft" / "checkpoint-2"
    weights = load_file(last / "model.safetensors")
    assert "lm_head.weight" not in weights  # tied to the embedding, so saved once
    (run / "stages.json").unlink()
    longer = load_recipe("smoke-cpu", [*words, "sft.max_steps=3"]).recipe
    transformers_says.clear()
    run_recipe(longer, resume=True)
    assert any("Loading model from" in line for line in transformers_says)
    assert not [line for line in transformers_says if "missing keys" in line]
    assert (run / "sft" / "checkpoint-3").is_dir()
    (run / "stages.json").unlink()
    last = (
        run / "sft" / "checkpoint-2"
    )  # the third ended the stage: it has no optimizer's state for a fourth step
    del weights["model.norm.weight"]
    save_file(weights, last / "model.safetensors", metadata={"format": "pt"})
    write_manifest(last, 2)
    with pytest.raises(CheckpointError, match=r"lacks 1 weights of the model: model\.norm\.weight"):
        run_recipe(load_recipe("smoke-cpu", [*words, "sft.max_steps=4"]).recipe, resume=True)


def test_eval_names_columns_as_the_option_takes_them(verb: Any, tmp_path: Path) -> None:
    (tmp_path / "sums.csv").write_text("Frage,Antwort\nWhat is 2 + 3?,5\n", encoding="utf-8")
    code, _, err = verb("eval", "owner/model", "--data", "sums.csv")
    assert code == 2 and "training" not in err and "data.train" not in err
    assert "sums.csv has no 'question' field" in err and "no 'answer' field" in err
    way = re.search(r"--data '([^']*)'", err)
    assert way is not None and way[1] == "sums.csv,columns={question: COLUMN, answer: COLUMN}"
    given = way[1].replace("question: COLUMN", "question: Frage").replace("answer: COLUMN", "answer: Antwort")
    code, _, err = verb("eval", "./nowhere", "--data", given)
    assert code == 2 and "no run or model at './nowhere'" in err
    half = "sums.csv,columns={question: Frage}"
    code, _, err = verb("eval", "owner/model", "--data", half)
    assert code == 2 and "no 'answer' field" in err and "answer: COLUMN as well in columns={…}" in err
    code, _, err = verb("data", "check", "local", "--path", "sums.csv", "--column", "question=Frage")
    assert code == 2 and err.endswith("Name yours: --column answer=COLUMN")
    code, _, err = verb("run", "smoke-cpu", "data.train={name: local, path: sums.csv}")
    assert code == 2 and "data.train.columns.question=COLUMN data.train.columns.answer=COLUMN" in err


def test_another_dataset_does_not_keep_what_was_said_of_the_former(verb: Any, tmp_path: Path) -> None:
    code, out, _ = verb("recipes", "show", "quickstart", "data.train.name=gsm8k")
    train, _, others = out.partition("\n  train:\n")[2].partition("\n  sft:\n")
    assert code == 0 and [line.split(":")[0].strip() for line in train.splitlines()] == ["name", "params"]
    assert "# default; what quickstart says is for the dataset arithmetic" in train
    assert "count: 12000" in others  # the other sections are as they were
    given = load_recipe("quickstart", ["data.train.params.year=24", "data.train.name=aime"])
    assert given.recipe.data.train.params == {"year": 24}
    assert {k: o for k, _, o in explain(given)}["data.train.params.year"] == "command line"
    same = load_recipe("quickstart", ["data.train.name=arithmetic"]).recipe.data.train
    assert same == load_recipe("quickstart").recipe.data.train and same.params
    child = "extends: quickstart\ndata: {train: {name: local, path: a.jsonl}, eval: {params: {count: 5}}}\n"
    (tmp_path / "child.yaml").write_text(child, encoding="utf-8")
    data = load_recipe(str(tmp_path / "child.yaml")).recipe.data
    assert (data.train.path, data.train.params) == ("a.jsonl", {})
    assert data.eval.params["count"] == 5 and "seed" in data.eval.params  # the same dataset: merged
    swapped = load_recipe(str(tmp_path / "child.yaml"), ["data.train.name=gsm8k"]).recipe.data.train
    assert swapped.path is None


def test_a_typo_is_answered_with_the_nearest_name(verb: Any, tmp_path: Path) -> None:
    (tmp_path / "brief.yaml").write_text("extends: smoke-cpu\nname: brief\n", encoding="utf-8")
    (tmp_path / "runs" / "brief" / "eval").mkdir(parents=True)
    for words, answer in (
        (("recipes", "show", "breif.yaml"), "no recipe file at breif.yaml. Did you mean 'brief.yaml'?"),
        (("run", "brief.yaml", "grpo.loss=drgrpo"), "grpo.loss is 'drgrpo'. Did you mean 'dr_grpo'?"),
        (
            ("compare", "runs/breif", "runs/brief"),
            "no run or evaluation at runs/breif. Did you mean 'brief'?",
        ),
        (("rewards", "explain", "--completion", "x", "--answer", "1", "recpe=a"), "recpe: unknown key"),
    ):
        code, _, err = verb(*words)
        assert code == 2 and answer in err, (words, err)


def test_nothing_to_show_is_said(verb: Any, tmp_path: Path) -> None:
    words = ["data.train.params.count=16", f"output_dir={tmp_path}", "run_name=r", "eval.enabled=false"]
    run_recipe(
        load_recipe("smoke-cpu", [*words, "threads=1", "sft.enabled=false", "grpo.max_steps=1"]).recipe
    )
    code, out, err = verb("inspect", "r", "--contains", "no such words")
    assert (code, out) == (0, "") and err.endswith("no rows: no rollout passes these filters")
    code, out, err = verb("inspect", "r", "--wrong", "--limit", "2", "--json")
    assert code == 0 and not err and [row["correct"] for row in json.loads(out)["rows"]] == [False, False]
    code, out, err = verb("inspect", "r", "--sql", "SELECT * FROM rollouts WHERE step = 99")
    assert (code, out, err) == (0, "", "no rows: the SELECT finds none")


def test_the_closing_table_names_what_was_evaluated(verb: Any) -> None:
    code, out, _ = verb(
        "run", "smoke-cpu", "--only", "sft", "run_name=r", "eval.baseline=true", "data.eval.params.count=8"
    )
    (heading,) = [line for line in out.splitlines() if "paired difference" in line]
    assert code == 0 and re.findall(r"\b(base|SFT|GRPO)\b", heading) == ["base", "SFT"]
    assert "algorist compare runs/r/eval/base.json runs/r/eval/sft.json" in out


def test_the_page_of_the_store_lists_what_a_round_writes() -> None:
    page = (DOCS / "store.md").read_text(encoding="utf-8")
    listed = page.partition("`iteration.json` holds ")[2].partition(";")[0]
    assert re.findall(r"`(\w+)`", listed) == list(asdict(Drawing()))


def test_grade_reads_what_a_command_writes(call: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    row = json.dumps({"answer": "0.5", "gold": "1/2"})
    writer = subprocess.Popen(["sh", "-c", f"echo '{row}' > {tmp_path}/pipe"])
    (tmp_path / "rows.jsonl").write_text('{"answer": null, "gold": "3"}\n{"gold": "2"}\n')
    refused = call("grade", "--file", "rows.jsonl")
    assert refused.returncode == 2 and "row 2: expected gold" in refused.stderr
    (tmp_path / "rows.jsonl").write_text('{"answer": null, "gold": "3"}\n')
    none = call("grade", "--file", "rows.jsonl", "--json")
    assert json.loads(none.stdout)["verdicts"][0]["reason"] == "no_answer"
    done = call("grade", "--file", "pipe")
    writer.kill()
    assert (done.returncode, done.stdout.startswith("right: equal_number")) == (0, True), done.stderr


def test_the_advice_on_columns_is_one_that_overlap_takes(verb: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Frage,Antwort\n1 + 1?,2\n")
    _, _, refused = verb("data", "overlap", str(tmp_path / "a.csv"), str(tmp_path / "a.csv"))
    (advice,) = re.findall(r"Name yours: '(.*)'", " ".join(refused.split()))
    words = advice.replace("question: COLUMN", "question: Frage").replace("answer: COLUMN", "answer: Antwort")
    code, out, _ = verb("data", "overlap", words, words)
    assert code == 0 and "the same question" in out


def test_the_command_to_continue_is_whole_on_a_narrow_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [".venv/bin/algorist", "run", "quickstart"])
    screen = Screen(file=io.StringIO(), width=60)
    screen.say(f"stopped; everything is saved in runs/quickstart. Continue: {command_again(resume=True)}")
    assert screen.file.getvalue().splitlines()[-1].endswith("algorist run quickstart --resume")  # type: ignore[attr-defined]
