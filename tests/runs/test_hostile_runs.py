"""A run folder from a stranger: no verb lets its text rule the terminal or a page, and none runs its code unasked."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from algorist.cli.main import main
from algorist.config.load import load_recipe, load_run_recipe
from algorist.config.own_files import inputs_of
from algorist.errors import CheckpointError, ConfigError
from algorist.evaluation.artifact import read_artifact, write_artifact
from algorist.extensions.model_folder.card import model_card
from algorist.report.build import build_report
from algorist.runs.begin import hold_folder
from algorist.store.read import query
from algorist.store.run_folder import RunFolder
from algorist.store.safe_text import json_text, markdown
from algorist.store.write import MetricsWriter
from tests.unit.report.test_build import make_run
from tests.warm import PYTHON

BAD = "\x1b[31m\x1b]0;title\x07\x9b31m\u202e\u2066\u200b[/red][bold]<img src=x onerror=alert(1)>`|**x**\x00"
NAME = BAD.replace("\x00", "").replace("/", "\u2215")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose every text is hostile: completions, questions, names of metrics, of datasets, of models, errors."""
    folder = tmp_path_factory.mktemp("runs") / f"run{NAME}"
    run = make_run(folder, steps=3, problems=6, text=BAD)
    with MetricsWriter(run.metrics) as writer:
        writer.write("grpo", 4, {f"reward/{NAME}": 1.0, "reward": 1.0, f"[/x]{NAME}": 2.0})
    for name in ("sft", "grpo"):
        found = read_artifact(run.evaluations, name)
        metrics = found.metrics | {f"[/x]{NAME}": next(iter(found.metrics.values()))}
        write_artifact(
            run.evaluations, name, samples=found.samples, metrics=metrics,
            protocol={NAME: NAME}, model=NAME, dataset=NAME,
        )  # fmt: skip
    recipe = {"name": "x", "description": NAME, "prompt": {"system_prompt": NAME}}
    run.config.write_text(json.dumps(recipe))
    (run.path / "environment.json").write_text(json.dumps({"command": NAME, "versions": {NAME: NAME}}))
    run.finish("sft", {"note": NAME})
    (run.path / "rows.jsonl").write_text(json.dumps({"question": BAD, "answer": BAD + "1"}) + "\n")
    return folder


def call(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["algorist", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


VERBS: dict[str, Callable[[str], list[str]]] = {
    "inspect": lambda run: ["inspect", run],
    "inspect json": lambda run: ["inspect", run, "--json"],
    "inspect sql": lambda run: ["inspect", run, "--sql", "SELECT * FROM rollouts LIMIT 2"],
    "inspect metrics": lambda run: ["inspect", run, "--sql", "SELECT DISTINCT name FROM metrics"],
    "inspect samples": lambda run: ["inspect", run, "--sql", "SELECT * FROM samples LIMIT 2"],
    "inspect wrong sql": lambda run: ["inspect", run, "--sql", f"SELECT '{NAME}' FROM nothing"],
    "diagnose": lambda run: ["diagnose", run],
    "diagnose json": lambda run: ["diagnose", run, "--json"],
    "compare": lambda run: ["compare", f"{run}/eval/sft.json", f"{run}/eval/grpo.json"],
    "compare json": lambda run: ["compare", f"{run}/eval/sft.json", f"{run}/eval/grpo.json", "--json"],
    "compare nothing": lambda run: ["compare", f"{run}/eval/{NAME}", run],
    "regrade": lambda run: ["regrade", run],
    "regrade json": lambda run: ["regrade", run, "--json"],
    "regrade unknown": lambda run: ["regrade", run, "--matcher", NAME],
    "report": lambda run: ["report", run],
    "watch": lambda run: ["watch", run, "--once"],
    "watch json": lambda run: ["watch", run, "--json"],
    "grade": lambda run: ["grade", BAD.replace("\0", ""), "1"],
    "rewards": lambda run: ["rewards", "explain", "--completion", NAME, "--answer", "1"],
    "data": lambda run: ["data", "show", "local", "--path", f"{run}/rows.jsonl"],
    "data check": lambda run: ["data", "check", "local", "--path", f"{run}/rows.jsonl"],
    "recipe": lambda run: ["recipes", "show", f"{run}/config.yaml"],
    "recipe unknown": lambda run: ["recipes", "show", NAME],
    "override": lambda run: ["recipes", "show", "quickstart", f"{NAME}=1"],
    "solve": lambda run: ["solve", "1 + 1", "--model", f"{run}/none"],
    "eval": lambda run: ["eval", f"{run}/none"],
    "export": lambda run: ["export", run, "--to", f"{run}/out"],
    "run": lambda run: ["run", f"{run}/none.yaml"],
    "verb": lambda run: [NAME],
    "option": lambda run: ["inspect", run, f"--{NAME}"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_lets_hostile_text_through(
    verb: str,
    hostile: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = call(VERBS[verb](str(hostile)), monkeypatch)
    out, err = capfd.readouterr()
    assert code in (0, 1, 2, None) and "Traceback" not in err and "failed:" not in err, err
    wrong = sorted({c for c in out + err if not (c in "\n\t" or c.isprintable())})
    assert not wrong, (wrong, out[:300], err[:300])
    if verb.endswith("json"):
        for line in out.splitlines():
            json.loads(line)


def test_json_for_the_terminal_reads_back_the_same() -> None:
    value = {BAD: [BAD, "\ud800", "日本 🙂 é", 1.5, None], "\U000e0001": True}
    text = json_text(value)
    assert json.loads(text) == value and "日本 🙂 é" in text
    assert all(c.isprintable() for c in text)


def test_markdown_has_no_markup_left() -> None:
    shown = markdown("<b>x</b> | `code` **bold** [link](javascript:1)\n# head \u202e")
    assert "<" not in shown and "\n" not in shown and "\u202e" not in shown
    assert all(sign not in shown.replace(f"\\{sign}", "") for sign in "`*[]|#")


def test_the_card_and_the_page_hold_no_html_of_the_run(hostile: Path) -> None:
    (hostile / "model").mkdir(exist_ok=True)
    card = model_card(hostile / "model", hostile)
    outside = [part for index, part in enumerate(card.split("```")) if index % 2 == 0]
    assert "<img" not in "".join(outside)
    assert all(c == "\n" or c.isprintable() for c in card)
    page = build_report(hostile).read_text("utf-8")
    assert "<img src=x" not in page
    assert not {"\u202e", "\u2066", "\x1b", "\x9b"} & set(page)


def test_a_part_that_is_a_link_to_outside_is_not_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    part = sorted(run.rollouts.glob("*.parquet"))[-1]
    shutil.move(part, tmp_path / "outside.parquet")
    part.symlink_to(tmp_path / "outside.parquet")
    with pytest.raises(CheckpointError, match="leads out of the run folder"):
        query(run.path, "SELECT count(*) FROM rollouts")


# --- code of a foreign run


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A run that names a reward file, made by this user; and the file that its reward writes."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ALGORIST_TRUST", raising=False)
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(
        f"open({str(ran)!r}, 'a').write('x')\ndef f(completion):\n    return 1.0\n"
    )
    recipe = load_recipe(
        "smoke-cpu", [f"output_dir={tmp_path}", "run_name=run", f"rewards=['{tmp_path / 'own.py'}:f']"]
    )
    with hold_folder(recipe.recipe, inputs_of(recipe.recipe), resume=False) as folder:
        config = folder.config.read_text()
    make_run(tmp_path / "run", steps=1)
    folder.config.write_text(config)
    return tmp_path / "run", ran


def test_a_run_made_here_runs_its_rewards(
    with_code: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ran = with_code
    assert call(["regrade", str(run)], monkeypatch) in (0, 1) and ran.exists()


@pytest.mark.parametrize("foreign", ["no mark", "changed", "another mark"])
def test_a_run_from_elsewhere_runs_no_code_unless_trusted(
    foreign: str,
    with_code: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run, ran = with_code
    if foreign == "no mark":
        (run / ".origin").unlink()
    elif foreign == "changed":
        with (run / "config.yaml").open("a") as file:
            file.write("\n# changed\n")
    else:
        (run / ".origin").write_text("0" * 64)
    shutil.rmtree(run.parent / "state") if foreign == "another mark" else None
    (run / "sft" / "final").mkdir(parents=True)
    for verb in (["regrade", str(run)], ["eval", str(run)], ["preflight", str(run)], ["rewards", "explain", "--completion", "x",
                 "--answer", "1", "--recipe", str(run / "config.yaml")]):  # fmt: skip
        assert call(verb, monkeypatch) == 2
        err = capfd.readouterr().err
        assert "own.py:f" in err and "--trust" in err, err
    assert not ran.exists()
    assert load_run_recipe(run).rewards  # reading is no running
    assert call(["regrade", str(run), "--trust"], monkeypatch) in (0, 1)
    assert ran.exists()


def test_remote_code_of_a_foreign_run_is_not_obeyed(with_code: tuple[Path, Path]) -> None:
    run, _ = with_code
    (run / "config.yaml").write_text("model: {name: x/y, trust_remote_code: true}\n")
    for runs in ("model", "all"):
        with pytest.raises(ConfigError, match=r"model\.trust_remote_code=true.*--trust"):
            load_run_recipe(run, runs=runs)


def test_a_reward_that_the_user_names_beside_a_foreign_run_needs_no_trust(
    with_code: tuple[Path, Path],
) -> None:
    run, _ = with_code
    (run / ".origin").unlink()
    mine = run.parent / "mine.py"
    mine.write_text("def g(completion):\n    return 1.0\n")
    assert (
        load_recipe(str(run / "config.yaml"), [f"rewards=['{mine}:g']"])
        .recipe.rewards[0]
        .name.endswith("mine.py:g")
    )


# --- the end of a terminal


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_hang_up_saves_like_sigterm(number: signal.Signals, tmp_path: Path) -> None:
    settings = [
        "sft.enabled=false",
        "eval.enabled=false",
        "grpo.max_steps=500",
        f"output_dir={tmp_path}",
        "run_name=r",
    ]
    command = [PYTHON, "-m", "algorist", "run", "smoke-cpu", *settings]
    run = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )
    deadline = time.monotonic() + 240
    while not RunFolder(tmp_path / "r").metrics.is_file() and time.monotonic() < deadline:
        assert run.poll() is None, run.stderr and run.stderr.read()
        time.sleep(0.1)
    time.sleep(1.0)
    run.send_signal(number)
    out, err = run.communicate(timeout=240)
    assert run.returncode == 130, err
    assert "Continue:" in out and list((tmp_path / "r" / "grpo").glob("checkpoint-*"))
