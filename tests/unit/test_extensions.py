"""The core knows no extension: none is named in it, and each folder can be deleted."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import algorist
from algorist.config.schema import Recipe
from algorist.extension import registered

SOURCE = Path(algorist.__file__).parent
PARTS = sorted(p.name for p in (SOURCE / "extensions").iterdir() if p.name[0] not in "_.")
NOT_CORE = {"extensions", "cli", "recipes"}
"""Who names extensions: themselves, verbs and recipes."""
WORDS = {
    "best",
    "live",
    "pools",
    "reference",
    "replay",
    "tools",
    "hub",
    "teacher",
    "quantization",
    "iterate",
    "tracking",
}
"""Names that are words of the subject too: of these only keys of a recipe's section count."""
SECTIONS = {"recipe", "section", "grpo", "sft", "eval", "model", "held_out"}
EXCEPTIONS = {
    "config/resume.py": "keys that a continued run may change, by name",
    "config/other_names.py": "what other programs call a key is answered with ours",
    "data/load.py": "the key hub of a dataset is its name there",
    "data/reasoning_traces.py": "unsloth is who published the dataset",
    "diagnosis/rules_training.py": "a rule proposes whichever key of the recipe cures a fault",
    "diagnosis/environment.py": "which releases of foreign packages fit each other",
    "evaluation/protocols.py": "where a protocol comes from: lm_eval/tasks",
    "store/run_folder.py": "the packages whose versions a run records",
}


def names_in(path: Path, keys: set[str]) -> set[str]:
    """Return the names that a file's code uses and the words of its texts but for docstrings; ``key NAME`` for each of ``keys``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    documentation = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
            names.add(f"key {node.attr}" if node.attr in keys and owner in SECTIONS else node.attr)
        elif isinstance(node, ast.ImportFrom):
            names |= set((node.module or "").split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            words = "".join(c if c.isalnum() or c in "_." else " " for c in node.value).split()
            names |= {part for word in words for part in word.split(".")}
            for owner, _, key in (word.rpartition(".") for word in words):
                names |= {f"key {key}"} if owner in SECTIONS and key in keys else set()
    return names


def test_the_core_names_no_extension() -> None:
    assert Recipe.model_fields  # the extensions are registered with the schema
    own = [cls for cls in registered() if cls.__module__.startswith("algorist.extensions")]
    keys = {key for cls in own for section in cls.keys.values() for key in section.model_fields} | WORDS
    names = {cls.name for cls in own} | {part.removesuffix(".py") for part in PARTS}
    assert {"quantization", "unsloth", "gguf", "lm_eval", "memory_probe", "toolkit", "vllm"} <= names
    names = names - WORDS | {f"key {key}" for key in keys}
    hits = {}
    for path in sorted(SOURCE.rglob("*.py")):
        relative = path.relative_to(SOURCE)
        if relative.parts[0] not in NOT_CORE and (named := names_in(path, keys) & names):
            hits[relative.as_posix()] = sorted(named)
    assert {file: named for file, named in hits.items() if file not in EXCEPTIONS} == {}
    assert set(EXCEPTIONS) <= set(hits), "an exception that is none"


SMALL = """
from algorist.config.load import load_recipe
from algorist.runs.pipeline import run_recipe
import algorist, sys
assert algorist.__file__.startswith(sys.argv[1]), algorist.__file__
run_recipe(load_recipe("smoke-cpu", ["device=cpu", "threads=1", f"output_dir={sys.argv[1]}/runs"]).recipe)
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", [*PARTS, "all"])
def test_an_extension_can_be_deleted(part: str, tmp_path: Path) -> None:
    """SFT, GRPO and evaluations of a copy in which the extension's folder is not there."""
    copy = shutil.copytree(SOURCE, tmp_path / "algorist", ignore=shutil.ignore_patterns("__pycache__"))
    for name in PARTS if part == "all" else [part]:
        place = copy / "extensions" / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    done = subprocess.run(
        [sys.executable, "-c", SMALL, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert {p.name for p in (tmp_path / "runs/smoke-cpu/eval").glob("*.json")} >= {"sft.json", "grpo.json"}
