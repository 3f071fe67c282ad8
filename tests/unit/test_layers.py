"""The house stands as DESIGN says: imports go downward, light folders stay light, files stay short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "algorist"
ROWS = [
    {"cli"},
    {"extensions"},
    {"preflight"},
    {"runs"},
    {"report"},
    {"training", "evaluation"},
    {"diagnosis"},
    {"rollouts"},
    {"data", "rewards"},
    {"config", "prompts", "grading", "models", "store", "recipes"},
    {"objectives"},
    {"declared"},
    {"types", "parameters", "child_process", "user_code"},
    {"registry"},
    {"errors", "system"},
]
# models are built from the recipe's model section, and prompts from its prompt section: plain typed objects.
# recipes are refused when they hold a secret, or come from elsewhere and name code: plain functions of the store.
# a model's tokenizer carries the prompt of its training: what reads it is a plain function of the prompts.
SAME_ROW = {
    ("prompts", "grading"),
    ("prompts", "config"),
    ("models", "config"),
    ("models", "prompts"),
    ("config", "store"),
}
LIGHT = {"types", "errors", "registry", "config", "prompts", "grading", "store", "cli"}
HEAVY = {"torch", "transformers", "trl", "peft", "datasets", "vllm"}
ONLY_IN = {
    "trl": {"training/sft.py", "training/trl_seam.py", "extensions/toolkit/oneshot.py"},
    "vllm": {"extensions/vllm/engine.py", "diagnosis/environment.py"},
}


def row_of(part: str) -> int:
    return next(i for i, row in enumerate(ROWS) if part in row)


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """Return (module, at module level?) for every import."""
    top = {id(n) for n in getattr(tree, "body", [])}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, id(node) in top))
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_downward(path: Path) -> None:
    part = part_of(path)
    if part in {"__init__", "__main__"}:
        return
    for module, _ in imports(ast.parse(path.read_text(encoding="utf-8"))):
        if not module.startswith("algorist."):
            continue
        other = module.split(".")[1]
        if other == part or (part, other) in SAME_ROW or other == "__version__":
            continue
        assert row_of(other) > row_of(part), f"{path.name} ({part}) imports {module}: not from a lower row"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_heavy_libraries_stay_where_they_belong(path: Path) -> None:
    part, relative = part_of(path), path.relative_to(SOURCE).as_posix()
    for module, top in imports(ast.parse(path.read_text(encoding="utf-8"))):
        library = module.split(".")[0]
        if part in LIGHT and library in HEAVY:
            assert not top, f"{relative} imports {module} at module level"
        if library in ONLY_IN:
            assert relative in ONLY_IN[library], f"{relative} imports {module}"
        if library in {"sympy", "math_verify"}:
            assert relative.startswith("grading/math_verify"), f"{relative} imports {module}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 600, f"{path.name} is longer than 600 lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < 100, (
                f"{path.name}: {node.name} is longer than 100 lines"
            )
    assert path.stem not in {"utils", "helpers", "common", "manager"}


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['algorist', '--help']\n"
        "from algorist.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert not {'torch', 'transformers', 'trl', 'pydantic', 'sympy'} & set(sys.modules), 'heavy import'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Example: algorist run quickstart" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80, "the first screen breaks words in a narrow terminal"


LIBRARIES = {"transformers", "trl", "datasets", "accelerate", "bitsandbytes"}


def test_loggers_are_named_for_their_module() -> None:
    for path in modules():
        check_loggers(path)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_module_compiles_and_every_function_has_type_hints(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    compile(text, str(path), "exec")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if "triton.jit" in map(ast.unparse, node.decorator_list):
                continue  # pointers and strides; Triton reads an annotation as a constant's mark
            a = node.args
            named = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            bare = [one.arg for one in named if one.annotation is None and one.arg not in ("self", "cls")]
            assert not bare and node.returns is not None, f"{path.name}: {node.name} lacks types: {bare}"


def check_loggers(path: Path) -> None:
    module = "algorist." + path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger" and node.args:
            name = ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else "algorist"
            library = name.partition(".")[0] in LIBRARIES
            own = name in ("algorist", module.removesuffix(".__init__"))
            assert library or own, f"{path.name}: logger {name}"


ONLY_SYSTEM = re.compile(
    r"^\s*(?:import|from) (?:fcntl|resource|termios|pwd|grp|ctypes)\b|os\.(?:fork|setsid|killpg|register_at_fork|set_blocking|WNOHANG)\b"
    r"|signal\.SIG(?:HUP|CHLD|KILL|ALRM)\b|select\.e?poll\b|[\"'{]/proc/",
    re.MULTILINE,
)


def test_what_not_every_system_has_is_in_one_module() -> None:
    """Others: the tool that needs Linux and says so, and a child process for llama.cpp, whose library is called through ctypes."""
    linux = {"system.py", "extensions/full_python/worker.py", "extensions/gguf/child.py"}
    users = {
        str(p.relative_to(SOURCE)) for p in modules() if ONLY_SYSTEM.search(p.read_text(encoding="utf-8"))
    }
    assert users == linux
