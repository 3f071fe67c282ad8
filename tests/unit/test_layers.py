"""The house stands as DESIGN says: imports go downward, light folders stay light, files stay short."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests import warm

Node = TypeVar("Node", bound=ast.AST)
ROOT = Path(__file__).resolve().parents[2]
SOURCE, GRADER = ROOT / "src" / "algorist", ROOT / "packages/grader/src/algorist_grader"
ROWS = [
    {"extensions"},
    {"cli"},
    {"preflight"},
    {"runs"},
    {"report"},
    {"training", "evaluation"},
    {"diagnosis"},
    {"rollouts"},
    {"data", "rewards"},
    {"config", "prompts", "models", "store", "recipes"},
    {"objectives"},
    {"declared"},
    {"types", "parameters", "user_code"},
    {"errors", "system"},
    {"algorist_grader"},
]
# models are built from the recipe's model section, and prompts from its prompt section: plain typed objects.
# recipes are refused when they hold a secret, or come from elsewhere and name code: plain functions of the store.
# a model's tokenizer carries the prompt of its training: what reads it is a plain function of the prompts.
SAME_ROW = {("prompts", "config"), ("models", "config"), ("models", "prompts"), ("config", "store")}
LIGHT = {"types", "errors", "config", "prompts", "algorist_grader", "store", "cli"}
HEAVY = {"torch", "transformers", "trl", "peft", "datasets", "vllm", "mlx", "mlx_lm"}
NOT_IN_THE_GRADER = HEAVY | {"accelerate", "algorist", "numpy", "pydantic", "typer", "rich"}
"""At whatever level: it is a distribution of its own (``packages/grader/pyproject.toml``)."""
ONLY_IN = {
    "trl": (),
    "vllm": ("extensions/vllm/engine.py", "extensions/vllm/server.py", "diagnosis/environment.py"),
    "mlx": ("extensions/mlx/",),
    "mlx_lm": ("extensions/mlx/",),
    "sympy": ("algorist_grader/math_verify",),
    "math_verify": ("algorist_grader/math_verify",),
}
"""Beginnings of the paths that may import a library, at whatever level."""


def row_of(part: str) -> int:
    return next(i for i, row in enumerate(ROWS) if part in row)


@dataclass(frozen=True)
class Module:
    """A file of the source, parsed once."""

    path: Path

    @functools.cached_property
    def name(self) -> str:
        base = SOURCE if SOURCE in self.path.parents else GRADER.parent
        return self.path.relative_to(base).as_posix()

    @functools.cached_property
    def part(self) -> str:
        return self.name.partition("/")[0].removesuffix(".py")

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    def each(self, *kinds: type[Node]) -> Iterator[tuple[Node, str]]:
        """Yield every node of these kinds, and its file and line."""
        for node in self.nodes:
            if isinstance(node, kinds):
                yield node, f"{self.name}:{node.lineno}"  # type: ignore[attr-defined]

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def imports(self) -> Iterator[tuple[str, str, bool]]:
        """Yield (module, file and line, at module level?) for every import."""
        for node, place in self.each(ast.Import, ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
            yield from ((name, place, node in self.tree.body) for name in names if name)


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    """The whole source, which is given back after these tests: its trees make every later garbage collection slower."""
    return [Module(path) for folder in (SOURCE, GRADER) for path in sorted(folder.rglob("*.py"))]


@pytest.mark.slow
def test_imports_go_downward(modules: list[Module]) -> None:
    upward = [
        f"{place} ({module.part}) imports {name}: not from a lower row"
        for module in modules
        if module.part not in {"__init__", "__main__"}
        for name, place, _ in module.imports()
        if name.startswith("algorist.") and not may_import(module.part, name.split(".")[1])
    ]
    assert not upward, "\n".join(upward)


def may_import(part: str, other: str) -> bool:
    beside = other in (part, "__version__") or (part, other) in SAME_ROW
    return beside or row_of(other) > row_of(part)


def test_heavy_libraries_stay_where_they_belong(modules: list[Module]) -> None:
    elsewhere = []
    for module in modules:
        for name, place, top in module.imports():
            library = name.partition(".")[0]
            if top and module.part in LIGHT and library in HEAVY:
                elsewhere.append(f"{place} imports {name} at module level")
            if module.part == "algorist_grader" and library in NOT_IN_THE_GRADER:
                elsewhere.append(f"{place} imports {name}, which the grader does without")
            if not module.name.startswith(ONLY_IN.get(library, module.name)):
                elsewhere.append(f"{place} imports {name}")
    assert not elsewhere, "\n".join(elsewhere)


def test_sizes(modules: list[Module]) -> None:
    large = [f"{m.name} is longer than 600 lines" for m in modules if m.text.count("\n") > 600]
    large += [
        f"{place}: {node.name} is longer than 100 lines"
        for module in modules
        for node, place in module.each(ast.FunctionDef, ast.AsyncFunctionDef)
        if (node.end_lineno or 0) - node.lineno >= 100
    ]
    large += [
        f"{m.name} says nothing" for m in modules if m.path.stem in {"utils", "helpers", "common", "manager"}
    ]
    assert not large, "\n".join(large)


@pytest.mark.slow
def test_every_module_compiles_and_every_function_has_type_hints(modules: list[Module]) -> None:
    bare = []
    for module in modules:
        compile(module.text, module.name, "exec")
        for node, place in module.each(ast.FunctionDef, ast.AsyncFunctionDef):
            if "triton.jit" in map(ast.unparse, node.decorator_list):
                continue  # pointers and strides; Triton reads an annotation as a constant's mark
            a = node.args
            named = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            without = [one.arg for one in named if one.annotation is None and one.arg not in ("self", "cls")]
            if without or node.returns is None:
                bare.append(f"{place}: {node.name} lacks types: {', '.join(without) or 'what it returns'}")
    assert not bare, "\n".join(bare)


LIBRARIES = {"transformers", "trl", "datasets", "accelerate", "bitsandbytes"}


def test_loggers_are_named_for_their_module(modules: list[Module]) -> None:
    misnamed = []
    for module in modules:
        package = "" if module.part == "algorist_grader" else "algorist."
        own = package + module.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for node, place in module.each(ast.Call):
            if ast.unparse(node.func) == "logging.getLogger" and node.args:
                name = node.args[0].value if isinstance(node.args[0], ast.Constant) else "algorist"
                if (
                    name not in ("algorist", "algorist_grader", own)
                    and name.partition(".")[0] not in LIBRARIES
                ):
                    misnamed.append(f"{place}: logger {name}")
    assert not misnamed, "\n".join(misnamed)


@pytest.mark.slow
def test_each_room_can_be_imported_first() -> None:
    """In a process of its own: a circle of imports shows in whatever verb meets it first (`data check` did)."""
    rooms = sorted({path.parent.relative_to(SOURCE.parent) for path in SOURCE.rglob("__init__.py")})
    names = [".".join(room.parts) for room in rooms]
    assert "algorist.data" in names and len(names) > 15
    code = (
        "import os, sys\n"
        "assert 'torch' in sys.modules and 'algorist' not in sys.modules\n"
        "for name in sys.argv[1:]:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        __import__(name)\n"
        "        os._exit(0)\n"
        "    if os.waitpid(child, 0)[1]:\n"
        "        sys.exit(f'{name} cannot be imported first')\n"
    )
    command, environment = [warm.PYTHON, "-c", code, *names], {**os.environ, warm.BARE: "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr


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


ONLY_SYSTEM = re.compile(
    r"^\s*(?:import|from) (?:fcntl|resource|termios|pwd|grp|ctypes)\b|os\.(?:fork|setsid|killpg|register_at_fork|set_blocking|WNOHANG)\b"
    r"|signal\.SIG(?:HUP|CHLD|KILL|ALRM)\b|select\.e?poll\b|[\"'{]/proc/",
    re.MULTILINE,
)


def test_what_not_every_system_has_is_in_two_modules(modules: list[Module]) -> None:
    """One of each package. Others: the tool that needs Linux and says so, a child process for llama.cpp, whose
    library is called through ctypes, and forks of environments, which run in one process where nothing forks."""
    linux = {
        "system.py",
        "algorist_grader/system.py",
        "extensions/full_python/worker.py",
        "extensions/llama_cpp/child.py",
        "extensions/environments/process.py",
    }
    assert {module.name for module in modules if ONLY_SYSTEM.search(module.text)} == linux


@pytest.mark.slow
def test_a_member_of_a_registry_can_be_imported_by_its_name() -> None:
    """The registry would open, and import it half."""
    code = "import algorist.extensions.published_rewards.systems as s; from algorist.rewards.base import REWARDS; print('accuracy' in REWARDS)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
