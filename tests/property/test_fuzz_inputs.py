"""Whatever a user's files hold, the answer is a message: no traceback for a user's mistake.

Configs, rows, checkpoints and run folders are damaged at random, and every verb that reads them is called as the command
line calls it. Allowed are success and a stated mistake (exit 0, 1 for findings, 2); an exception that only ``--debug``
would show (``failed: KeyError``) is a defect.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from algorist.cli.main import _call
from algorist.config.load import load_recipe, recipe_names
from algorist.config.schema import Recipe
from algorist.data.base import DATASETS, Source
from algorist.errors import AlgoristError, CheckpointError
from algorist.runs.pipeline import run_recipe
from algorist.training.checkpoint import newest_checkpoint
from tests.marks import first

pytestmark = pytest.mark.slow

RELAXED = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=150,
)
ODD: list[Any] = [
    None, True, -1, 0, 1e308, float("nan"), float("inf"), 10**30, "", " ", "\x00", "../..", "~", "{}", "[]", [], {}, [[]],
    {"a": {"b": [1]}}, "💥" * 50, "null", "1e-3", [None], {"name": None}, "name: [", "${HOME}", b"\xff".decode("latin-1"),
]  # fmt: skip


def paths(model: Any, before: str = "") -> list[str]:
    """Return the dotted keys of a recipe."""
    found = []
    for name in type(model).model_fields:
        value = getattr(model, name)
        found.append(before + name)
        if hasattr(type(value), "model_fields"):
            found += paths(value, f"{before}{name}.")
    return found


KEYS = paths(Recipe())


def assert_told(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """Call a verb; anything but success, findings or a stated mistake fails."""
    code = _call(arguments, debug=False)
    told = capsys.readouterr()
    assert code in (0, 1, 2), (arguments, code)
    assert "failed:" not in told.err and "Traceback" not in told.err, (arguments, told.err)
    assert code != 2 or told.err.strip(), arguments


@RELAXED
@given(
    recipe=st.sampled_from(recipe_names()),
    changes=st.lists(
        st.tuples(st.sampled_from([*KEYS, "grpo.x", "", "a.b.c", "."]), st.sampled_from(ODD)), max_size=4
    ),
)
def test_overrides(recipe: str, changes: list[tuple[str, Any]]) -> None:
    try:
        load_recipe(recipe, [f"{key}={json.dumps(value, default=str)}" for key, value in changes])
    except AlgoristError as error:
        assert str(error).strip()


YAML_TEXT = st.recursive(
    st.sampled_from(ODD),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from([*KEYS, "extends", "model", "grpo", "rewards", "data", "x"]), inner, max_size=4
        ),
    ),
    max_leaves=12,
)


@RELAXED
@given(
    content=st.one_of(
        YAML_TEXT.map(lambda c: yaml.dump(c, allow_unicode=True).encode()), st.binary(max_size=200)
    )
)
def test_recipe_files(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(content)
    try:
        load_recipe(str(file), [])
    except AlgoristError as error:
        assert str(error).strip()


ROW = st.one_of(
    st.binary(max_size=60),
    st.dictionaries(
        st.sampled_from(
            [
                "question",
                "answer",
                "solution",
                "problem",
                "id",
                "prompt",
                "level",
                "conversations",
                "reward_model",
                "messages",
            ]
        ),
        st.sampled_from(ODD),
        max_size=5,
    ).map(lambda row: json.dumps(row, default=str).encode()),
)


@RELAXED
@given(
    rows=st.lists(ROW, max_size=5),
    ending=st.sampled_from([".jsonl", ".json", ".csv", ".parquet", ".txt", ""]),
)
@example(rows=[b'{"question":[[]],"answer":null}'], ending=".jsonl")
@example(rows=[b'{"conversations":[[1]],"reward_model":"1"}'], ending=".jsonl")
def test_rows(rows: list[bytes], ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows{ending}"
    file.write_bytes(b"\n".join(rows))
    for name in sorted(set(DATASETS.names()) - {"arithmetic", "mixture", "rollouts"}):
        try:
            DATASETS.get(name)(Source(path=str(file)))
        except AlgoristError as error:
            assert str(error).strip()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run."""
    folder = tmp_path_factory.mktemp("fuzz")
    run_recipe(load_recipe("smoke-cpu", [f"output_dir={folder}", "run_name=r", "threads=1"]).recipe)
    assert _call(["report", str(folder / "r")], debug=True) == 0
    return folder / "r"


def damaged(run: Path, target: Path, seed: int) -> list[str]:
    """Copy a run and damage one to three of its small files; return what was done."""
    chance = random.Random(seed)
    shutil.copytree(run, target, symlinks=True)
    files = [p for p in sorted(target.rglob("*")) if p.is_file()]
    done = []
    for _ in range(chance.randint(1, 3)):
        file = chance.choice(files)
        kind = chance.choice(["delete", "empty", "cut", "flip", "text", "json", "folder", "line"])
        if not file.is_file():
            continue
        data = bytearray(file.read_bytes())
        if kind in ("delete", "folder"):
            file.unlink()
            if kind == "folder":
                file.mkdir()
        elif kind == "empty":
            file.write_bytes(b"")
        elif kind == "cut":
            file.write_bytes(data[: chance.randrange(len(data) + 1)])
        elif kind == "flip" and data:
            for _ in range(chance.randint(1, 8)):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            file.write_bytes(data)
        elif kind == "text":
            file.write_text(str(chance.choice(ODD)), encoding="utf-8", errors="replace")
        elif kind == "json":
            file.write_text(json.dumps(chance.choice(ODD), default=str), encoding="utf-8")
        else:
            with file.open("ab") as stream:
                stream.write(b'\n{"step": "x", "stage": 3, "loss": []}\n[1]\n\xff\xfe\n')
        done.append(f"{kind} {file.relative_to(target)}")
    return done


@pytest.mark.parametrize("seed", first(1, range(60)))
def test_run_folders(seed: int, whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "r"
    print(damaged(whole_run, run, seed))
    capsys.readouterr()
    for arguments in (
        ["inspect", str(run)],
        ["inspect", str(run), "--sql", "SELECT count(*) FROM rollouts"],
        ["diagnose", str(run)],
        ["report", str(run)],
        ["regrade", str(run)],
        ["compare", str(run / "eval" / "sft.json"), str(run / "eval" / "grpo.json")],
    ):
        assert_told(capsys, arguments)


@pytest.mark.parametrize("seed", first(12, range(60)))
def test_checkpoints(seed: int, whole_run: Path, tmp_path: Path) -> None:
    """A checkpoint that is found is whole: its files are those that were saved."""
    run = tmp_path / "r"
    shutil.copytree(whole_run / "grpo", run / "grpo")
    shutil.rmtree(run / "grpo" / "final")
    damaged(run / "grpo", tmp_path / "d", seed)
    try:
        found, refused = newest_checkpoint(tmp_path / "d")
    except CheckpointError as error:
        assert str(error).strip()
        return
    assert all(line.strip() for line in refused)
    if found is not None:
        original = whole_run / "grpo" / found.name
        for file in original.iterdir():
            assert (found / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("seed", first(1, range(8)))
def test_resuming_a_damaged_run(
    seed: int, whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resume continues, repeats, or says what is damaged."""
    run = tmp_path / "r"
    print(damaged(whole_run, run, 1000 + seed))
    stages = run / "stages.json"
    if stages.is_file() and seed % 2:
        stages.unlink()
    assert_told(capsys, ["run", "smoke-cpu", f"output_dir={tmp_path}", "run_name=r", "threads=1", "--resume"])
