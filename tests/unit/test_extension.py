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
from algorist.declared import registered
from algorist.training.extension import Extension
from tests import warm
from tests.marks import first

SOURCE = Path(algorist.__file__).parent
PARTS = sorted(p.name for p in (SOURCE / "extensions").iterdir() if p.name[0] not in "_.")
NOT_CORE = {"extensions", "recipes"}
"""Who names extensions: themselves and recipes."""
WORDS = {
    "best",
    "ledger",
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
    "weights",
}
"""Names that are words of the subject too: of these only keys of a recipe's section count."""
SECTIONS = {"recipe", "section", "grpo", "sft", "eval", "model", "held_out"}
EXCEPTIONS = {
    "data/load.py": "the key hub of a dataset is its name there",
    "config/schema.py": "the key hub of a dataset is its name there",
    "diagnosis/rules.py": "a rule proposes whichever key of the recipe cures a fault",
    "cli/diagnose_command.py": "doctor says whether the engine vllm can be used",
    "cli/trl_script.py": "which keys the arguments of another trainer become",
    "cli/main.py": "which allocator the engine vllm bears",
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


@pytest.mark.slow
def test_the_core_names_no_extension() -> None:
    assert Recipe.model_fields  # the extensions are registered with the schema
    own = [cls for cls in registered() if cls.__module__.startswith("algorist.extensions")]
    keys = {key for cls in own for section in cls.keys.values() for key in section.model_fields} | WORDS
    names = {cls.name for cls in own} | {part.removesuffix(".py") for part in PARTS}
    assert {
        "quantization",
        "unsloth",
        "gguf",
        "llama_cpp",
        "inspect_log",
        "lm_eval",
        "memory_probe",
        "toolkit",
        "vllm",
    } <= names
    names = names - WORDS | {f"key {key}" for key in keys}
    hits = {}
    for path in sorted(SOURCE.rglob("*.py")):
        relative = path.relative_to(SOURCE)
        if relative.parts[0] not in NOT_CORE and (named := names_in(path, keys) & names):
            hits[relative.as_posix()] = sorted(named)
    assert {file: named for file, named in hits.items() if file not in EXCEPTIONS} == {}
    assert set(EXCEPTIONS) <= set(hits), "an exception that is none"


def test_the_seam_has_few_hooks_and_each_is_called_and_explained() -> None:
    hooks = {name: hook for name, hook in vars(Extension).items() if callable(hook) and name[0] != "_"}
    assert len(hooks) <= 13, sorted(hooks)
    texts = "".join(
        path.read_text(encoding="utf-8")
        for path in SOURCE.rglob("*.py")
        if "extensions" not in path.relative_to(SOURCE).parts
    )
    for name, hook in hooks.items():
        assert f".{name}(" in texts, f"nobody calls {name}"
        assert hook.__doc__, name


TOGETHER = {
    ("model_folder", "hub"): "export uploads it",
    ("model_folder", "llama_cpp"): "export writes it for llama.cpp",
    ("model_folder", "environments"): "export writes it for other trainers",
    ("iterate", "model_folder"): "a round's model is exported as one that is given away",
    ("hub", "model_folder"): "it is what is uploaded",
    ("serve", "model_folder"): "its card knows the settings that nobody used",
    ("full_python", "toolbox"): "it is one of the tools",
    ("tools", "toolbox"): "what may be called",
    ("gain_parts", "toolbox"): "who works a sum out",
    ("tools", "environments"): "who answers",
    ("environments", "toolbox"): "what an answer is",
    ("served_teacher", "teacher"): "it is a teacher, elsewhere",
    ("served_teacher", "openai_server"): "how a server is asked",
    ("toolkit", "published_rewards"): "its default rewards",
    ("mlx", "vllm"): "an adapter is merged for either of them alike",
}
"""Extensions that import another one."""


def test_no_extension_imports_another() -> None:
    pairs = set()
    for path in sorted((SOURCE / "extensions").rglob("*.py")):
        own = path.relative_to(SOURCE / "extensions").parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("algorist.extensions.") and own != "__init__":
                pairs.add((own, module.split(".")[2]))
    assert {(one, other) for one, other in pairs if one != other} == set(TOGETHER)


SMALL = """
from algorist.config.load import load_recipe
from algorist.runs.pipeline import run_recipe
import algorist, json, sys
assert algorist.__file__.startswith(sys.argv[1]), algorist.__file__
rows = [{"question": f"{n} + 1?", "answer": str(n + 1), "solution": f"{n} + 1 = {n + 1}"} for n in range(64)]
open("rows.jsonl", "w").write("\\n".join(map(json.dumps, rows)))  # problems that are made are an extension
data = [f"data.{part}={{name: local, path: rows.jsonl, limit: 32}}" for part in ("train", "sft", "eval")]
run_recipe(load_recipe("smoke-cpu", ["device=cpu", "threads=1", f"output_dir={sys.argv[1]}/runs", *data]).recipe)
"""
NAMES = """
from algorist.config.load import load_recipe
from algorist.data.base import DATASETS
from algorist.prompts import FORMATS
from algorist.rewards.base import REWARDS
from algorist_grader import MATCHERS
load_recipe("quickstart")
assert all([*registry] for registry in (DATASETS, FORMATS, MATCHERS, REWARDS))
"""
"""Looks everything up that a recipe names: what registers it is imported."""


def without(parts: list[str], folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a copy of the package in which the folders of these extensions are not there."""
    copy = shutil.copytree(SOURCE, folder / "algorist")  # compiled as it is
    for name in parts:
        place = copy / "extensions" / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    return subprocess.run(
        [warm.PYTHON, *command, str(folder)],
        env={**os.environ, "PYTHONPATH": str(folder), warm.BARE: "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts", first(1, [PARTS, PARTS[1::2], PARTS[::2]]), ids=["all", "one half", "the other half"]
)
def test_extensions_can_be_deleted(parts: list[str], tmp_path: Path) -> None:
    """SFT, GRPO and evaluations where these folders are not there; where that fails, each alone says which one is to blame."""
    done = without(parts, tmp_path / "group", "-c", SMALL)
    if done.returncode:
        alone = [part for part in parts if without([part], tmp_path / part, "-c", SMALL).returncode]
        raise AssertionError(f"not without {alone or 'all of them together'}: {done.stderr[-2000:]}")
    artifacts = {path.name for path in (tmp_path / "group/runs/smoke-cpu/eval").glob("*.json")}
    assert artifacts >= {"sft.json", "grpo.json"}


@pytest.mark.slow
@pytest.mark.parametrize("part", first(1, sorted({other for _, other in TOGETHER})))
def test_an_extension_that_others_build_on_can_be_deleted_alone(part: str, tmp_path: Path) -> None:
    done = without([part], tmp_path, "-c", NAMES)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "part"), [("export", "hub"), ("iterate", "iterate"), ("serve", "serve")])
def test_a_verb_of_a_deleted_extension_says_so(verb: str, part: str, tmp_path: Path) -> None:
    words = {"export": ["--to", "x"], "iterate": [], "serve": []}[verb]
    model = {"export": str(SOURCE), "iterate": "smoke-cpu", "serve": "x"}[verb]
    code = f"import sys; sys.argv = ['algorist', {verb!r}, {model!r}, *{words}]; from algorist.cli.main import main; main()"
    done = without([part], tmp_path, "-c", code)
    assert done.returncode == 2, done.stderr
    of_itself = f"error: no verb '{verb}'." in done.stderr
    assert of_itself == (verb == part), done.stderr
    assert of_itself or f"error: this installation is without the extension '{part}'" in done.stderr


@pytest.mark.slow
def test_the_package_is_imported_without_the_extension_that_gives_it_names(tmp_path: Path) -> None:
    code = "import algorist; print(hasattr(algorist, 'compute_entropy'), hasattr(algorist, 'load_recipe'))"
    assert without(["toolkit"], tmp_path, "-c", code).stdout == "False True\n"


@pytest.mark.slow
def test_an_installed_extension_brings_its_verb(tmp_path: Path) -> None:
    """``VERB_command.py`` in the package that an entry point names is a verb; nothing is imported to find it."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("import sys\nprint('imported')\n")
    (package / "hello_command.py").write_text(
        '"""Say hello."""\nimport typer\napp = typer.Typer()\n@app.command()\ndef hello(): print("hello from mine")\n'
    )
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[algorist.extensions]\nmine = mine\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def call(*words: str) -> str:
        command = [sys.executable, "-m", "algorist.cli.main", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert "  hello       Say hello.\n" in (text := call("--help")) and "imported" not in text
    assert call("hello") == "imported\nhello from mine\n"
