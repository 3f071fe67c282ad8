"""The keywords that ``extensions/unsloth.py`` gives, against the source of Unsloth's newest wheel (which a CPU cannot import)."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.unit.extensions.test_unsloth import ADAPTED, LOADED


@pytest.mark.network
def test_the_newest_unsloth_has_the_keywords(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), "unsloth"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "No matching distribution" in done.stderr:
        pytest.skip(f"the package index has no unsloth: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("unsloth-*.whl")
    assert keywords(wheel, "unsloth/models/loader.py", "FastLanguageModel", "from_pretrained") >= LOADED
    assert keywords(wheel, "unsloth/models/llama.py", "FastLlamaModel", "get_peft_model") >= ADAPTED


def keywords(wheel: Path, file: str, owner: str, function: str) -> set[str]:
    """Return the names of a method's parameters, read from the source."""
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read(file))
    (found,) = (
        method
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == owner
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == function
    )
    return {argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)}
