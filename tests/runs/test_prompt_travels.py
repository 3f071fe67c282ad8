"""How a model was asked in training goes with the model: final, checkpoint, export, merge, copy; and every verb reads it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from algorist.cli.arguments import find_model
from algorist.cli.main import main
from algorist.config import load_recipe
from algorist.evaluation.artifact import artifact_names, read_artifact
from algorist.prompts import get_format
from algorist.prompts.attached import attached
from algorist.runs.draft import Draft
from algorist.runs.pipeline import run_recipe
from algorist.runs.plan import make_plan
from algorist.runs.solve import Solver
from algorist.store.read import query
from algorist.store.run_log import Quiet

SYSTEM = "Work it out, then answer."
TAGS = {"reasoning_open": "<work>", "reasoning_close": "</work>"}
QUESTION = "Tom has 4 pens. Tom buys 3 more. How many pens does Tom have now?"
SETTINGS = [
    "threads=1",
    "grpo.enabled=false",
    f"prompt.system_prompt={SYSTEM}",
    "prompt.tags={reasoning_open: <work>, reasoning_close: </work>}",
    "grpo.max_completion_tokens=23",
    "eval.stop_strings=[</answer>]",
]
DATA = ["--data", "arithmetic,params={count: 12, seed: 3}"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_recipe(load_recipe("smoke-cpu", [*SETTINGS, f"output_dir={folder}", "run_name=r"]).recipe)
    return folder / "r"


def test_every_saved_model_carries_its_prompt(run: Path, output_of: Any, tmp_path: Path) -> None:
    output_of("export", str(run), "--to", "given")
    for folder in (run / "sft" / "final", *(run / "sft").glob("checkpoint-*"), tmp_path / "given"):
        asked = attached(folder)
        assert asked is not None and asked.max_completion_tokens == 23, folder
        assert asked.stop_strings == ("</answer>",)
        assert asked.prompt_format == get_format("reasoning_answer", system_prompt=SYSTEM, tags=TAGS)
        assert (folder / "chat_template.jinja").is_file()


def test_an_export_answers_as_the_run_does(run: Path, output_of: Any, tmp_path: Path) -> None:
    output_of("export", str(run), "--to", "given")
    shutil.copytree(run / "sft" / "final", tmp_path / "copied")
    rows = [
        json.loads(output_of("solve", QUESTION, "--json", "--model", str(model), *more))["answers"]
        for model in (run, "given", "copied")
        for more in ([], ["--format", "reasoning_answer"])
    ]
    assert all(row == rows[0] for row in rows)
    solver = Solver.load(tmp_path / "copied")
    assert solver.prompt_format.system_prompt == SYSTEM and solver.max_new_tokens == 23
    for model, out in ((str(run), "a"), ("given", "b")):
        output_of("eval", model, *DATA, "--out", out, "--json")
    first, second = (
        [row["completion"] for row in read_artifact(folder, name).samples if row["greedy"]]
        for folder in (tmp_path / "a", tmp_path / "b")
        for name in artifact_names(folder)
    )
    assert first == second and len(first) == 12


def test_another_format_asks_in_its_own_words(run: Path) -> None:
    solver = Solver.load(run / "sft" / "final", prompt_format="r1_zero")
    assert solver.prompt_format == get_format("r1_zero")
    assert solver.stop_strings == ("</answer>",)  # raw text has no end of turn


def test_a_config_above_a_model_is_not_a_run(run: Path, output_of: Any, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("my_app: {port: 80}\n")
    shutil.copytree(run / "sft" / "final", tmp_path / "models" / "m")
    assert find_model(str(tmp_path / "models" / "m"))[1] is None
    assert output_of("solve", QUESTION, "--model", "models/m")
    (tmp_path / "models" / "m" / "config.yaml").write_text("lr: 1\n")
    assert find_model(str(tmp_path / "models" / "m")) == (tmp_path / "models" / "m", None)
    assert find_model(str(run / "sft" / "final"))[1] == run


def test_an_adapter_and_its_merge_carry_it(tmp_path: Path, output_of: Any) -> None:
    settings = [*SETTINGS, "model.lora={rank: 2}", f"output_dir={tmp_path}", "run_name=r"]
    run_recipe(load_recipe("smoke-cpu", settings).recipe)
    output_of("export", "r", "--to", "merged", "--merge")
    for folder in (tmp_path / "r" / "sft" / "final", tmp_path / "merged"):
        asked = attached(folder)
        assert asked is not None and asked.prompt_format.system_prompt == SYSTEM


@pytest.mark.parametrize(
    "damage",
    [
        {"system_prompt": ["x"]},
        {"tags": {"answer_open": "\n", "answer_close": ""}},
        {"prompt_format": "of theirs", "tags": {}},
        {"raw_template": "{question}" + "x" * 300_000},
    ],
)
def test_a_damaged_entry_is_named(
    damage: dict[str, Any],
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tags that are empty would be looked for without an end; a text of megabytes would be in every prompt."""
    shutil.copytree(run / "sft" / "final", tmp_path / "m")
    file = tmp_path / "m" / "tokenizer_config.json"
    content = json.loads(file.read_text())
    content["algorist"] |= damage
    file.write_text(json.dumps(content))
    monkeypatch.setattr(sys, "argv", ["algorist", "solve", QUESTION, "--model", str(tmp_path / "m")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "a damaged entry 'algorist'" in capsys.readouterr().err


def test_a_run_from_the_folder_asks_as_it_was_trained(run: Path, tmp_path: Path) -> None:
    """A recipe's own wording is for its own model; what is written beside ``model.name`` counts, and is named."""
    model = f"model.name={run / 'sft' / 'final'}"
    later = ["threads=1", "sft.enabled=false", "eval.enabled=false", f"output_dir={tmp_path}"]
    form = get_format("reasoning_answer", system_prompt=SYSTEM, tags=TAGS)
    done = run_recipe(load_recipe("smoke-cpu", [*later, model, "run_name=later"]).recipe, display=Quiet())
    (prompt,) = {row["prompt"] for row in query(done.folder.path, "SELECT prompt FROM rollouts LIMIT 1")}
    assert SYSTEM in prompt
    asked = attached(done.folder.path / "grpo" / "final")
    assert asked is not None and asked.prompt_format == form and asked.stop_strings == ("</answer>",)
    (tmp_path / "mine.yaml").write_text(f"extends: smoke-cpu\nmodel: {{name: {run / 'sft' / 'final'}}}\n")
    for name, more in ((str(tmp_path / "mine.yaml"), []), ("quickstart", [model])):
        plan = make_plan(Draft.of(load_recipe(name, [*later, *more, "data.train.limit=16"]).recipe))
        assert plan.form == form and plan.recipe.grpo.stop_strings == ["</answer>"], name
        assert not [line for line in plan.remarks if "another prompt" in line or "never shows" in line]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("prompt.system_prompt=null", "leave prompt.system_prompt out"),
        ("prompt.tags={answer_open: <x>}", "leave prompt.tags out"),
        ("prompt.format=think_answer", "prompt.format=reasoning_answer"),
        ("eval.stop_strings=[]", "leave eval.stop_strings out"),
    ],
)
def test_another_prompt_than_the_folders_is_named(
    run: Path, tmp_path: Path, output_of: Any, change: str, named: str
) -> None:
    settings = ["threads=1", "sft.enabled=false", "grpo.max_steps=1", "eval.enabled=false", change]
    words = ["smoke-cpu", f"model.name={run / 'sft' / 'final'}", *settings, f"output_dir={tmp_path}"]
    shown = " ".join(output_of("run", *words).split())
    assert "was trained with another prompt than this recipe asks with" in shown and named in shown


def test_demonstrations_with_another_prompt_are_named_when_sft_begins(tmp_path: Path, output_of: Any) -> None:
    rows = [
        {"prompt": f"Q: {n} + 1? A:", "response": f"<answer>{n + 1}</answer>", "ground_truth": str(n + 1)}
        for n in range(12)
    ]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"data.sft={{name: sft_jsonl, path: {tmp_path}/sft.jsonl}}"
    settings = ["sft.source=prompt_response", "grpo.enabled=false", "eval.enabled=false", "sft.max_steps=1"]
    shown = output_of("run", "smoke-cpu", "threads=1", *settings, data, f"output_dir={tmp_path}")
    assert "12 of 12 prompts of SFT differ from those that are sampled with" in " ".join(shown.split())
