"""Expert iteration: a round teaches, rounds are runs of their own, a stopped one goes on, what is wrong is said."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from algorist.cli.main import main
from algorist.config.load import load_recipe, load_run_recipe
from algorist.config.schema import Recipe
from algorist.errors import CheckpointError, ConfigError, DataError
from algorist.extensions.iterate.rounds import Drawing, iterate, round_recipe
from algorist.models.load import make_policy
from algorist.prompts import get_format
from algorist.runs.pipeline import Quiet, run_recipe
from algorist.store.read import query

pytestmark = pytest.mark.slow

FRUIT = ("apple", "pear", "plum", "fig")
FEW = Drawing(samples=4, questions=16, epochs=1.0)


class Lines(Quiet):
    """A display that keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        """Keep a line."""
        self.lines.append(text)


def problems(path: Path, count: int, seed: int, right: float = 1.0) -> str:
    """Write problems "pear 17?" with the fruit's number as answer; the others of ``right`` get the next fruit's."""
    draw, rows = random.Random(seed), []
    for n in range(count):
        fruit = draw.randrange(4)
        answer = fruit + 1 if draw.random() < right else (fruit + 1) % 4 + 1
        question = f"{FRUIT[fruit]} {1000 * seed + n}?"
        rows.append({"question": question, "answer": str(answer), "solution": f"{FRUIT[fruit]}."})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def settings(folder: Path, *overrides: str) -> list[str]:
    return [
        "device=cpu",
        "threads=1",
        f"data.train={{name: local, path: '{folder}/train.jsonl'}}",
        f"data.eval={{name: local, path: '{folder}/test.jsonl'}}",
        "model.tiny.hidden_size=64",
        "sft.learning_rate=5e-3",
        "sft.batch_size=8",  # few demonstrations: more than the one step that a warm-up takes
        "sft.save_steps=1000",
        "sft.logging_steps=20",
        "eval.samples=0",
        "grpo.max_completion_tokens=40",
        *overrides,
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that learned the format, and the answers from teachers who are wrong 60 % of the time."""
    folder = tmp_path_factory.mktemp("iterate")
    problems(folder / "train.jsonl", 256, 1)
    problems(folder / "test.jsonl", 64, 2)
    demos = f"data.sft={{name: local, path: '{problems(folder / 'demos.jsonl', 400, 3, right=0.4)}'}}"
    own = (
        demos,
        "sft.batch_size=16",
        "sft.max_steps=200",
        "eval.enabled=false",
        f"output_dir={folder}",
        "run_name=first",
    )
    run_recipe(load_recipe("smoke-cpu", settings(folder, *own)).recipe, stages=("sft",))
    return folder


def recipe(place: Path, folder: Path, *overrides: str) -> Recipe:
    own = (f"model.name={place}/first/sft/final", f"output_dir={folder}", "run_name=r")
    return load_recipe("smoke-cpu", settings(place, *own, *overrides)).recipe


@pytest.mark.long
def test_a_round_raises_held_out_accuracy(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = (f"model.name={place}/first/sft/final", f"output_dir={tmp_path}", "run_name=r")
    words = ["iterate", "smoke-cpu", *settings(place, *own), "--rounds", "1", "--questions", "128", "--json"]
    monkeypatch.setattr(sys, "argv", ["algorist", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    assert stop.value.code == 0, said.err
    told = json.loads(said.out.strip().splitlines()[-1])
    assert stop.value.code == 0 and not told["stopped"]
    (first,) = told["rounds"]
    before, after = (m["greedy_accuracy"] for m in (told["start"], first["metrics"]))
    assert before["high"] < after["low"], (before, after)  # intervals that do not touch
    assert (first["questions"], first["completions"]) == (128, 1024) and 0 < first["right"] < 1024
    run = Path(first["folder"])
    assert run == tmp_path / "r-round-1" and (run / "report.html").is_file()
    rows = query(run, "SELECT * FROM rollouts")
    assert len(rows) == 1024 and {row["stage"] for row in rows} == {"iterate"}
    assert sum(row["correct"] for row in rows) == first["right"]
    assert len({row["problem_id"] for row in rows if row["correct"]}) == first["solved"]
    assert not list(run.rglob("*.progress.jsonl"))
    assert abs(sum(row["advantage"] for row in rows)) < 1e-6 and any(row["advantage"] > 0 for row in rows)
    monkeypatch.setattr(sys, "argv", ["algorist", "inspect", str(run), "--limit", "2"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0 and "pear" in capsys.readouterr().out.replace("apple", "pear")


@pytest.mark.long
def test_rounds_go_on_where_they_stopped(place: Path, tmp_path: Path) -> None:
    whole = iterate(recipe(place, tmp_path / "whole"), rounds=2, drawing=FEW)
    cut = recipe(place, tmp_path / "cut")
    iterate(cut, rounds=1, drawing=FEW)
    first = tmp_path / "cut" / "r-round-1"
    for name in ("sft", "eval"):  # as if it had been killed after the completions were stored
        shutil.rmtree(first / name)
    (first / "stages.json").unlink()
    display = Lines()
    again = iterate(cut, rounds=2, drawing=FEW, display=display, resume=True)
    assert [(r.completions, r.right, r.solved) for r in again.rounds] == [
        (r.completions, r.right, r.solved) for r in whole.rounds
    ]
    assert [r.completions for r in whole.rounds] == [64, 64] and whole.start == again.start
    for one, other in zip(whole.rounds, again.rounds, strict=True):
        assert one.metrics == other.metrics
        counts = [query(r.folder, "SELECT count(*) AS n FROM rollouts")[0]["n"] for r in (one, other)]
        assert counts == [64, 64]  # drawn again, stored once
        left, right = (load_file(r.folder / "sft/final/model.safetensors") for r in (one, other))
        assert all(torch.equal(left[name], right[name]) for name in left)
    start = load_file(place / "first/sft/final/model.safetensors")
    finals = [load_file(r.folder / "sft/final/model.safetensors") for r in whole.rounds]
    for before, after in ((start, finals[0]), (finals[0], finals[1])):
        assert not all(torch.equal(before[name], after[name]) for name in before)
    asked = [{row["problem_id"] for row in query(r.folder, "SELECT * FROM rollouts")} for r in whole.rounds]
    assert len(asked[0]) == len(asked[1]) == 16 and asked[0] != asked[1]
    second = load_run_recipe(whole.rounds[1].folder)
    assert second.model.name == str(tmp_path / "whole/r-round-1/sft/final")
    display.lines.clear()
    iterate(cut, rounds=2, drawing=FEW, display=display, resume=True)
    assert [line.partition(" · ")[0] for line in display.lines] == ["round 1 of 2", "round 2 of 2"]
    with pytest.raises(ConfigError, match=r"begun with --samples 4, .*not with --samples 8, .*run_name="):
        iterate(cut, rounds=2, drawing=Drawing(8, 16, 1.0), resume=True)
    hotter = cut.model_copy(update={"grpo": cut.grpo.model_copy(update={"temperature": 0.3})})
    with pytest.raises(
        ConfigError, match=r"(?s)grpo.temperature: .*as the first algorist iterate command with --resume"
    ):
        iterate(hotter, rounds=2, drawing=FEW, resume=True)
    with pytest.raises(CheckpointError, match="already holds a run"):
        iterate(cut, rounds=1, drawing=FEW)


@pytest.mark.long
def test_an_adapter_is_merged_between_rounds(place: Path, tmp_path: Path) -> None:
    done = iterate(
        recipe(place, tmp_path, "model.lora={rank: 4}", "grpo.enabled=false", "rewards=[]"),
        rounds=2,
        drawing=FEW,
    )
    one, two = (r.folder for r in done.rounds)
    assert (one / "sft/final/adapter_config.json").is_file() and (
        two / "sft/final/adapter_config.json"
    ).is_file()
    assert load_run_recipe(two).model.name == str(one / "sft" / "merged")
    merged, start = (
        load_file(p / "model.safetensors") for p in (one / "sft/merged", place / "first/sft/final")
    )
    assert merged.keys() == start.keys() and not all(torch.equal(merged[k], start[k]) for k in start)


def test_a_round_without_a_right_completion_says_what_to_do(place: Path, tmp_path: Path) -> None:
    form = get_format("reasoning_answer")
    section = recipe(place, tmp_path).model.model_copy(update={"name": "tiny"})
    policy = make_policy(
        section, device=torch.device("cpu"), seed=0, texts=["pear 17?"], tags=form.tags.all()
    )
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    untrained = recipe(place, tmp_path, f"model.name={tmp_path}/model")
    with pytest.raises(
        DataError, match=r"round 1: none of 64 completions for 16 problems is right.*--samples 32"
    ):
        iterate(untrained, rounds=2, drawing=FEW)
    assert len(query(tmp_path / "r-round-1", "SELECT * FROM rollouts")) == 64
    assert not (tmp_path / "r-round-2").exists()


def test_what_cannot_work_is_refused_before_anything_is_made(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.name is tiny.*algorist run RECIPE --only sft run_name=r-start"
    ):
        iterate(recipe(place, tmp_path, "model.name=tiny"), rounds=1)
    with pytest.raises(CheckpointError, match="nothing to resume"):
        iterate(recipe(place, tmp_path), resume=True)
    with pytest.raises(DataError):
        iterate(recipe(place, tmp_path, "data.eval.path=nowhere.jsonl"))
    with pytest.raises(DataError):
        iterate(recipe(place, tmp_path, "data.train.path=nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"there is no model folder at .*nowhere"):
        iterate(recipe(place, tmp_path, "model.name=./nowhere"))
    with pytest.raises(ConfigError, match=r"eval\.device is 'cuda:99'"):
        iterate(recipe(place, tmp_path, "eval.device='cuda:99'"))
    for words, message in (
        (["sft.epochs=3"], "sft.epochs is decided by --epochs"),
        (["sft.max_steps=3"], "sft.max_steps is decided by --epochs"),
        (["--epochs", "0"], "expected more than 0"),
    ):
        monkeypatch.setattr(sys, "argv", ["algorist", "iterate", "smoke-cpu", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


AGAIN = """
class Again:
    def start(self, problem):
        self.replies = 0

    def reply(self, rollout):
        self.replies += 1
        return "pear 17?" if self.replies == 1 else None


def always(problem, answer):
    return True
"""


def test_a_round_keeps_what_a_rollout_had(place: Path, tmp_path: Path) -> None:
    """Without its turns, an answer to an environment's message was trained on as the answer to the question."""
    (tmp_path / "own.py").write_text(AGAIN)
    own = [
        f"data.train.checker={tmp_path}/own.py:always",
        "eval.enabled=false",
        "grpo.max_completion_tokens=20",
    ]
    (alone,) = iterate(recipe(place, tmp_path, *own, "run_name=checked"), rounds=1, drawing=FEW).rounds
    assert (
        alone.right == alone.completions == 64
    )  # a checker of one's own file decides in the round's SFT, too
    asked = recipe(
        place, tmp_path, *own, f"environment={tmp_path}/own.py:Again", "grpo.max_completion_tokens=150"
    )
    with pytest.raises(DataError, match=r"that an environment or a chat's tool answered"):
        iterate(asked, rounds=1, drawing=FEW)
    columns = "turns", "sampled_tokens", "prompt_tokens", "checker", "sampler_log_prob_sum"
    (kept,) = query(
        tmp_path / "r-round-1", f"SELECT {', '.join(f'count({c})' for c in columns)} FROM rollouts"
    )
    assert set(kept.values()) == {64}


def test_the_recipe_of_a_round(place: Path, tmp_path: Path) -> None:
    given = recipe(place, tmp_path, "hub.model_id=me/x", "tracking.run_name=t", "sft.enabled=false")
    first, last = (round_recipe(given, n, 3, Drawing(), model) for n, model in ((1, None), (3, "before")))
    assert (first.run_name, last.run_name) == ("r-round-1", "r-round-3")
    assert (first.model.name, last.model.name) == (given.model.name, "before")
    assert first.eval.baseline and not last.eval.baseline
    assert not first.hub.push and last.hub.model_id == "me/x"
    assert last.tracking.run_name == "t-round-3"
    for own in (first, last):
        assert own.sft.enabled and not own.grpo.enabled and own.data.train == given.data.train
        assert (own.sft.epochs, own.sft.max_steps) == (2.0, None)
        assert own.data.sft is not None and own.data.sft.params == {"run": str(tmp_path / str(own.run_name))}
    assert Drawing() == Drawing(samples=8, questions=1024, epochs=2.0)
