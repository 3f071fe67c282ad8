"""What the verbs say to someone who uses them for the first time: limits, hints, tables, row numbers, names of others."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from algorist.cli.explain import describe, explain, settings_page
from algorist.config import load_recipe, recipe_names
from algorist.errors import ConfigError
from algorist.runs.pipeline import run_recipe
from algorist.store.read import rollouts
from algorist.store.run_log import Quiet
from tests.marks import first
from tests.warm import PYTHON

DOCS = Path(__file__).parents[2] / "docs"
DATA = ["--data", "arithmetic,params={count: 6, seed: 3}"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    settings = ["threads=1", "grpo.enabled=false", "eval.enabled=false", f"output_dir={folder}", "run_name=r"]
    run_recipe(load_recipe("smoke-cpu", settings).recipe, display=Quiet())
    return folder / "r"


def test_eval_says_limit_and_format_and_what_to_do(run: Path, verb: Any) -> None:
    code, out, err = verb("eval", str(run), *DATA, "--out", "e", "--name", "n")
    assert code == 0, err
    assert "prompt format reasoning_answer (its training) · completions of up to 24 tokens" in err
    assert "reasoning_answer, up to 24 tokens" in out
    assert (
        "hint: truncated: Most completions are cut off at 24 tokens" in out and "--max-new-tokens 96" in out
    )
    code, out, err = verb("eval", str(run), *DATA, "--out", "f", "--name", "n", "--max-new-tokens", "5")
    assert "completions of up to 5 tokens" in err and "cut off at 5 tokens" in out
    assert "--max-new-tokens 20" in out
    for words in (("--step", "1"), ("--sort=-advantage",)):  # they were taken and did nothing
        code, _, err = verb("inspect", "e/n.json", *words)
        assert code == 2 and "an evaluation has no steps and no advantages" in err
    code, out, _ = verb("inspect", "e/n.json", "--wrong", "--limit", "2")
    assert code == 0 and out.count("· gold ") == 2 and "→ " in out


@pytest.mark.parametrize(("words", "code"), [(("0.25", "25%"), 0), (("0.25", "26%"), 1), (("0.25",), 2)])
def test_grade_takes_an_answer_and_its_gold_as_two_words(
    words: tuple[str, ...], code: int, verb: Any
) -> None:
    ended, out, err = verb("grade", *words)
    assert ended == code and ("0.25 · gold 2" in out or "algorist grade 0.5 1/2" in err)


def test_sql_gives_a_table(run: Path, verb: Any) -> None:
    code, out, _ = verb(
        "inspect", str(run), "--sql", "select step, name, value from metrics where name = 'loss'"
    )
    head, first, *_ = out.splitlines()
    assert code == 0 and head.split() == ["step", "name", "value"] and first.split()[:2] == ["1", "loss"]
    code, out, _ = verb("inspect", str(run), "--sql", "select 1 as a", "--json")
    assert json.loads(out) == {"rows": [{"a": 1}]}


def test_solve_does_not_ask_the_hub_for_a_folder(run: Path, verb: Any) -> None:
    for name in ("runs/nothere", "outputs/model", f"{run.name}/x/y"):
        code, _, err = verb("solve", "1 + 1?", "--model", name)
        assert code == 2 and f"no run or model at '{name}'" in err
    code, _, err = verb("solve", "--model", str(run), "--file", "none.jsonl")
    assert code == 2 and "--file none.jsonl: there is no such file" in err
    code, out, err = verb("solve", "1 + 1?", "--model", str(run))
    assert (
        code == 0
        and err.startswith(f"loading {run}/sft/final … answering 1 question …")
        and "question: 1 + 1?" in out
    )


@pytest.mark.slow
def test_solve_in_a_terminal_answers_line_by_line(run: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [PYTHON, "-m", "algorist", "solve", "--model", str(run)],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.close(theirs)
    os.write(ours, b"2 + 3?\n4 + 5?\n\n")
    out, _ = process.communicate(timeout=300)
    os.close(ours)
    assert process.returncode == 0, out
    assert out.count("? ") >= 3 and out.count("answer: ") == 2


@pytest.mark.parametrize(
    ("path", "typed"),
    first(
        2,
        [
            (".venv/bin:/usr/bin:/bin", "algorist"),
            ("other:/usr/bin:/bin", ".venv/bin/algorist"),  # another program of that name
            ("/usr/bin:/bin", ".venv/bin/algorist"),
        ],
        together=True,
    ),
)
def test_commands_are_shown_as_they_can_be_typed(tmp_path: Path, path: str, typed: str) -> None:
    for folder in (".venv/bin", "other"):
        (tmp_path / folder).mkdir(parents=True)
        script = tmp_path / folder / "algorist"
        script.write_text(f"#!{sys.executable}\nfrom algorist.cli.main import main\nmain()\n")
        script.chmod(0o755)
    for words, shown in (
        (["solve", "1 + 1?"], f"make one: {typed} run quickstart\n"),
        (["recipes", "--help"], f"Example: {typed} recipes show quickstart --resolved"),
    ):
        environment = {**os.environ, "PATH": path, "COLUMNS": "200"}
        done = subprocess.run(
            [".venv/bin/algorist", *words], cwd=tmp_path, capture_output=True, text=True, env=environment
        )
        assert shown in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (("run", "quickstart", "--use-wandb"), "without dashes. Here it is report_to=[wandb]."),
        (
            ("run", "quickstart", "--wandb-project", "a"),
            "Here it is report_to=[wandb] tracking.project=NAME.",
        ),
        (("run", "quickstart", "--push-to-hub"), "Here it is hub.push=true."),
        (("run", "quickstart", "--hub-private"), "Here it is hub.private=true."),
        (("run", "quickstart", "--hub-token", "a"), "Here it is the variable HF_TOKEN, or hf auth login."),
        (("run", "quickstart", "--wandb-tags", "a"), "Here it is tracking.tags=[TAG]."),
        (("run", "quickstart", "--run-name", "a"), "Here it is run_name=VALUE."),
        (("run", "quickstart", "--output-dir", "a"), "Here it is output_dir=VALUE."),
        (("run", "--config", "a.yaml"), "Here it is the first word after the verb, FILE.yaml or the name"),
        (("run", "math-sft", "--num-train-epochs", "3"), "Here it is sft.epochs=VALUE."),
        (("run", "quickstart", "--only", "sft", "--lr", "3"), "Here it is sft.learning_rate=VALUE."),
        (("run", "math-sft", "batch_size=16"), "batch_size: unknown key. Here it is sft.batch_size=VALUE."),
        (("run", "quickstart", "--max-steps", "3"), "Here it is grpo.max_steps=VALUE."),
        (("run", "quickstart", "--learning-rate", "1e-5"), "Here it is grpo.learning_rate=VALUE."),
        (
            ("run", "quickstart", "num_generations=4"),
            "num_generations: unknown key. Here it is grpo.group_size=VALUE.",
        ),
        (("run", "quickstart", "sft.lr=1e-5"), "sft.lr: unknown key. Here it is sft.learning_rate=VALUE."),
        (("run", "quickstart", "model.lora.lora_alpha=8"), "Here it is model.lora.alpha=VALUE."),
    ],
)
def test_names_of_other_programs_are_answered_with_ours(verb: Any, words: tuple[str, ...], ours: str) -> None:
    code, _, err = verb(*words)
    assert code == 2 and ours in err


def test_a_text_is_shown_once_with_its_copies(run: Path, verb: Any, tmp_path: Path) -> None:
    from algorist.store.read import rollouts
    from algorist.store.write import RolloutWriter

    one = {
        "stage": "grpo",
        "step": 1,
        "problem_id": "p",
        "reward": 1.0,
        "reason": "equal_string",
        "completion_tokens": 3,
        "advantage": 0.5,
        "question": "6 and 6?",
        "gold": "12",
    }
    rows = [
        one | {"sample": n, "completion": text}
        for n, text in enumerate(["twelve", "twelve", "twelve", "two"])
    ]
    (tmp_path / "r").mkdir()
    for name in ("config.yaml", "run.json"):
        if (run / name).is_file():
            shutil.copy(run / name, tmp_path / "r" / name)
    with RolloutWriter(tmp_path / "r" / "rollouts") as store:
        store.write(rows)
    assert len(rollouts(tmp_path / "r")) == 4
    code, out, err = verb("inspect", str(tmp_path / "r"), "--sort=-reward", "--limit", "2")
    assert code == 0 and out.count("twelve\n") == 1 and "· 3 times\n" in out and out.count("two\n") == 1, (
        out + err
    )
    assert out.count("gold 12 · 3 tokens") == 2 and "\n6 and 6?\n→ twelve\n" in out


def test_a_folder_that_is_taken_is_refused_before_torch_is_loaded(tmp_path: Path, run: Path) -> None:
    shutil.copytree(run, tmp_path / "runs" / "smoke-cpu")
    (tmp_path / "torch.py").write_text("import os\nos._exit(7)\n")
    done = subprocess.run(
        [sys.executable, "-m", "algorist", "run", "smoke-cpu"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 2 and "already holds a run" in done.stderr and not done.stdout, done


def test_rows_are_numbered_as_in_the_file(verb: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer\n1+1?,2\n2+2?,\n3+3?,6\n")
    code, _, err = verb("data", "check", "local", "--path", "a.csv")
    assert code == 2 and "row 2 has no gold answer" in err and "data." not in err
    assert err.endswith(
        "leave such rows out (adapter local): local,params.skip_bad_rows=true, as in: "
        "algorist data check local,params.skip_bad_rows=true --path a.csv"
    )
    code, out, _ = verb("data", "check", "local,params.skip_bad_rows=true", "--path", "a.csv")
    assert code == 0 and "2 problems" in out
    (tmp_path / "b.csv").write_text('question,answer\n"a\nb",1\n1,2,3\n')
    code, _, err = verb("data", "check", "local", "--path", "b.csv")
    assert code == 2 and "b.csv:4: 3 cells, expected 2 (question, answer)" in err
    recipe = load_recipe(
        "smoke-cpu", ["data.train={name: local, path: a.csv, params: {skip_bad_rows: true}}"]
    ).recipe
    from algorist.data import load_problems

    assert [p.answer for p in load_problems(recipe.data.train)] == ["2", "6"]
    code, _, err = verb("run", "smoke-cpu", "--only", "grpo", "data.train.name=a.csv")
    assert code == 2 and "write name: local and path: a.csv" in err


def test_decimal_commas_are_named_and_read(verb: Any, tmp_path: Path) -> None:
    rows = ["1.234,5", "12,5 %", "12,5", "-0,75", "7", "(1,5; 2,5)", "1.234", "12{,}5", "2, 3", "0.125"]
    (tmp_path / "a.csv").write_text(
        "question,answer\n" + "".join(f'{n}?,"{row}"\n' for n, row in enumerate(rows))
    )
    code, out, _ = verb("data", "check", "local", "--path", "a.csv")
    assert (
        code == 0
        and "5 may be decimal commas" in out
        and "params: {decimal: ','}" in out
        and "'1.234,5'" in out
    )
    named = json.loads(verb("data", "check", "local", "--path", "a.csv", "--json")[1])["decimal_commas"]
    assert [row["gold"] for row in named] == [rows[n] for n in (0, 1, 2, 3, 7)]
    name = "local,params={decimal: ','}"
    code, out, _ = verb("data", "check", name, "--path", "a.csv")
    assert code == 0 and "decimal" not in out
    golds = [
        json.loads(text + "}")["answer"]
        for text in verb("data", "show", name, "--path", "a.csv", "-n", "10")[1].split("\n}\n")[:-1]
    ]
    assert golds == ["1234.5", "12.5 %", "12.5", "-0.75", "7", "(1.5; 2.5)", "1234", "12.5", "2, 3", "0.125"]
    code, _, err = verb("data", "check", "local,params={decimal: x}", "--path", "a.csv")
    assert code == 2 and "expected '.' or ','" in err


def test_golds_grouped_as_in_india_or_in_accounts_are_named(verb: Any, tmp_path: Path) -> None:
    rows = [
        "1,23,456",
        "(1,200)",
        "Rs. 12,34,567.50",
        "($4,500)",
        "1,234,567",
        "(1, 200)",
        "(3,4)",
        "1,2,300",
        "1,23,45",
        "7",
    ]
    (tmp_path / "a.csv").write_text(
        "question,answer\n" + "".join(f'{n}?,"{row}"\n' for n, row in enumerate(rows))
    )
    code, out, _ = verb("data", "check", "local", "--path", "a.csv")
    assert code == 0 and "4 may be one number" in out and "write 123456 or -1200" in " ".join(out.split())
    named = json.loads(verb("data", "check", "local", "--path", "a.csv", "--json")[1])["grouped"]
    assert [row["gold"] for row in named] == rows[:4]
    assert (
        "4 answers such as '1,23,456' are read as several numbers"
        in verb("new", "a.csv", "--model", "tiny", "--no-trial")[1]
    )


def test_data_check_lists_golds_that_are_compared_as_text(verb: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "question,answer\nq1,about twelve or so\nq2,12\nq3,\\frac{1}{2}\nq4,12 apples\n"
    )
    code, out, _ = verb("data", "check", "local", "--path", "a.csv")
    assert code == 0 and "1 are compared as text only" in out and "'about twelve or so'" in out
    assert "equal_string" not in out and "against itself" not in out


def test_no_table_begins_with_a_line_of_blanks(verb: Any) -> None:
    code, out, _ = verb("doctor", "--no-hub")
    assert code == 0 and out.startswith("python  ")


def test_rewards_explain_counts_tokens_and_says_a_failure_once(verb: Any, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def brief(completion, *, completion_ids):\n    return 1 / len(completion_ids)\n"
        "def broken(completion):\n    return 1 / 0\n"
        "def level(rollout, problem):\n    return rollout.grade.correct + int(problem['level']) + problem['size']\n"
    )
    words = ["rewards", "explain", "--completion", "a b c d", "--answer", "1", "--json"]
    code, out, _ = verb(*words, "rewards=[{name: 'r.py:brief'}]")
    assert code == 0 and json.loads(out)["total"] == 0.25
    code, out, _ = verb(*words, "rewards=[{name: 'r.py:brief'}]", "--tokens", "10")
    assert json.loads(out)["total"] == 0.1
    code, out, _ = verb(*words, "rewards=[{name: 'r.py:level'}]", "--row", "level=3", "--row", "size=0.5")
    assert code == 0 and json.loads(out)["total"] == 3.5
    code, _, err = verb(*words, "rewards=[{name: 'r.py:broken'}]")
    assert code == 1 and err.count("ZeroDivisionError") == 1 and "error: reward 'broken' failed" in err
    code, out, _ = verb("rewards", "explain", "--help")
    assert "rewards=[ correct, {name:" in " ".join(out.replace("│", "").split())


def test_compare_takes_the_common_problems(run: Path, verb: Any) -> None:
    for name, count in (("a", 6), ("b", 10)):
        data = f"arithmetic,params={{count: {count}, seed: 3}}"
        assert verb("eval", str(run), "--data", data, "--out", "c", "--name", name, "--samples", "0")[0] == 0
    code, out, err = verb("compare", "c/a.json", "c/b.json")
    assert code == 0, err
    assert "6 problems · greedy" in out and "only the 6 problems that both evaluations have" in " ".join(
        out.split()
    )
    verb("eval", str(run), "--data", "arithmetic,params={count: 6, seed: 9}", "--out", "c", "--name", "d")
    code, _, err = verb("compare", "c/a.json", "c/d.json")
    assert code == 2 and "have no problem in common" in err


def test_an_evaluation_replaces_no_other(run: Path, verb: Any) -> None:
    for count in (6, 10, 6):
        data = f"arithmetic,params={{count: {count}, seed: 3}}"
        assert verb("eval", str(run), "--data", data, "--out", "k", "--samples", "0")[0] == 0
    first, second = sorted(Path("k").glob("*.json"), key=lambda file: len(file.stem))
    assert second.stem == f"{first.stem}-2"
    assert [json.loads(file.read_text())["n"] for file in (first, second)] == [6, 10]


def test_every_setting_is_on_its_page() -> None:
    page = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert page == settings_page(), "write it again: algorist recipes settings > docs/settings.md"
    keys = [key for key, *_ in explain(load_recipe("quickstart")) if key not in ("rewards", "model.lora")]
    for key in ("model.lora.target_modules", "rewards[N].params", *keys):
        assert f"`{key}`" in page or key.startswith(("data.eval", "data.sft", "data.train.params.")), key
    assert describe("sft.source").endswith("Takes `problems` or `prompt_response`.")


def test_the_page_of_recipes_is_current(verb: Any) -> None:
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    assert verb("recipes", "overview")[1] == page, (
        "write it again: algorist recipes overview > docs/recipes.md"
    )


def test_recipes_show_describes(verb: Any) -> None:
    code, out, _ = verb("recipes", "show", "quickstart", "--describe")
    assert (
        code == 0
        and "  # Completions per problem (G). Takes an integer ≥ 1.\n  group_size: 8  # quickstart" in out
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", first(2, [(), ("--describe",), ("--resolved",)]))
def test_what_recipes_show_prints_is_a_recipe(verb: Any, tmp_path: Path, options: tuple[str, ...]) -> None:
    for name in recipe_names():
        more = ('description="a\\n: b # c"',) if name == "quickstart" else ()
        code, out, _ = verb("recipes", "show", name, *more, *options)
        (tmp_path / "shown.yaml").write_text(out)
        assert (
            code == 0 and load_recipe(str(tmp_path / "shown.yaml")).recipe == load_recipe(name, more).recipe
        )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_asks_this_program(verb: Any, shell: str) -> None:
    code, out, _ = verb("completion", shell)
    assert code == 0 and "_ALGORIST_COMPLETE" in out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("pref", "preflight"),
        ("eval --max", "--max-new-tokens"),
        ("run quickst", "quickstart"),
        ("data ov", "overlap"),
    ],
)
def test_completion_knows_verbs_options_and_recipes(
    typed: str, offered: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"algorist {typed}"
    monkeypatch.setenv("_ALGORIST_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    done = call()
    assert offered in done.stdout.split(), done.stderr


def test_an_unknown_shell_is_refused(verb: Any) -> None:
    code, _, err = verb("completion", "bahs")
    assert code == 2 and "Did you mean 'bash'?" in err
    with pytest.raises(ConfigError):
        load_recipe("quickstart", ["completions=3"])


def test_the_page_of_rules_is_current(verb: Any) -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert verb("recipes", "rules")[1] == page, (
        "write it again: algorist recipes rules > docs/troubleshooting.md"
    )


def test_control_tokens_in_the_data_are_counted(verb: Any, tmp_path: Path) -> None:
    rows = [
        {"question": "1+1?<|im_end|>\n<|im_start|>assistant", "answer": "2", "solution": "2"},
        {"question": "Is |x| < 3 or x < |y|>2?", "answer": "yes", "solution": "a<|b| and |c|>d, <b>x</b>"},
        {"question": "3+3?", "answer": "6", "solution": "6</s> so"},
        {"question": "4+4?", "answer": "8", "solution": "<start_of_turn>8<｜end▁of▁sentence｜>"},
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = verb("data", "check", "local", "--path", "c.jsonl")
    assert code == 0 and "3 hold control tokens as text" in " ".join(out.split())
    assert "<|im_end|> <|im_start|>" in out and "<start_of_turn> <｜end▁of▁sentence｜>" in out
    code, out, _ = verb("data", "check", "local", "--path", "c.jsonl", "--json")
    assert [row["tokens"] for row in json.loads(out)["control_tokens"]][1] == "</s>"


def test_diagnose_judges_the_runs_own_evaluations_alone(tmp_path: Path, verb: Any) -> None:
    short = ("threads=1", "sft.max_steps=1", "grpo.max_steps=2", "eval.samples=0", f"output_dir={tmp_path}")
    folder = run_recipe(load_recipe("smoke-cpu", [*short, "run_name=r"]).recipe, display=Quiet()).folder.path
    trained = sorted({row["question"] for row in rollouts(folder, limit=None)})[:4]
    file = tmp_path / "trained.jsonl"
    file.write_text("".join(json.dumps({"question": text, "answer": "1"}) + "\n" for text in trained))
    code, _, err = verb("eval", str(folder), "--data", str(file), "--samples", "0")
    assert code == 0, err
    assert "held_out_leaks" not in verb("diagnose", str(folder))[1]
