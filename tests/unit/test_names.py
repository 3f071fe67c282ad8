"""Local names say what they hold, and messages are in plain English: what DESIGN forbids may only become less."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from zipfile import ZipFile

import pytest

from algorist.config.schema import Recipe
from tests.cuda_host.cures import CURES
from tests.sizes import GRADER, SOURCE
from tests.slow.mutations import MUTATIONS

TESTS = Path(__file__).resolve().parents[1]
FILES = [*SOURCE.rglob("*.py"), *GRADER.rglob("*.py")]
NAMES = {"found", "told", "given", "kept", "asked", "wanted", "chosen", "there"}
CLEAN = {
    "config", "data", "diagnosis", "evaluation", "algorist_grader", "objectives", "preflight", "prompts", "report", "rewards", "store",
}  # fmt: skip
"""Rooms that have none left."""
CEILING = 60
"""Uses of such names in the other rooms: lower it when you rename some."""
PHRASES = re.compile(
    r"\b(behind|stands|goes on|has not(?! (?:been|begun|had|\w+ed)\b)|by itself|of one's own|to say honestly)\b"
)
MOST_PHRASES = 4
"""Lines of the other rooms with such a phrase: lower it too."""
QUESTION = re.compile(
    r"(?:(?:Return|Tell|Give|Yield|Say|Take) (?:what|which|how|why|where|who)|What|Which|How|Where|Why|Who)\b"
)
MOST_QUESTIONS = 67
"""Docstrings that open with a question where a verb and its noun belong: lower it too."""

DATA = {
    "json",
    "jsonl",
    "yaml",
    "pt",
    "parquet",
    "html",
    "j2",
    "css",
    "js",
    "log",
    "csv",
    "safetensors",
    "py",
}
"""Endings of files of data; a Python file has a test of its own."""
ELSEWHERE = {
    "VERB_command", "VERB_app", "RUN_NAME", "PHASE_s",  # patterns of names
    "NAME_reward.py", "test_NAME_reward.py",
    "lite_ppo", "w_reinforce",  # values of recipes
    "answer_type", "is_multiple_answer",  # columns of datasets
    "score_answer", "use_adaptive_entropy", "convert_hf_to_gguf.py", "TrainOutput", "cumem.py", "parse_expr",  # of other programs
    "FSDPQwen2ForCausalLM", "top_entropy_quantile", "vllm_importance_sampling_mode", "off_policy_mask_threshold",
}  # fmt: skip
"""Names in docstrings and comments of the source that are not of this source."""


def uses(path: Path) -> int:
    """Return how often a file uses a forbidden name, as variable, argument or attribute."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = (
        getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None)
        for node in nodes
    )
    return sum(name in NAMES for name in names)


def phrases(path: Path) -> int:
    """Return how many lines of a file have a forbidden phrase."""
    return sum(bool(PHRASES.search(line)) for line in path.read_text(encoding="utf-8").splitlines())


def by_room(count: Counter[str]) -> tuple[dict[str, int], int]:
    """Return the counts of the clean rooms that have one, and the sum of the others."""
    return {room: n for room, n in count.items() if room in CLEAN and n}, sum(
        n for room, n in count.items() if room not in CLEAN
    )


@pytest.mark.slow
def test_forbidden_names_and_phrases_only_become_less() -> None:
    names, lines = Counter[str](), Counter[str]()
    for path in FILES:
        room = path.relative_to(SOURCE).parts[0] if SOURCE in path.parents else GRADER.name
        names[room] += uses(path)
        lines[room] += phrases(path)
    assert by_room(names)[0] == {} and by_room(names)[1] <= CEILING, names
    assert by_room(lines)[0] == {} and by_room(lines)[1] <= MOST_PHRASES, lines


@pytest.mark.slow
def test_a_class_has_a_name_of_its_own() -> None:
    files = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name[0] != "_":
                files[node.name].append(path.name)
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_nothing_cites_a_specification_that_is_not_here() -> None:
    item = re.compile(r"\bS[0-9]\.[0-9]")
    files = [*FILES, *TESTS.rglob("*.py"), *(SOURCE / "recipes").glob("*.yaml")]
    assert [path.name for path in files if item.search(path.read_text(encoding="utf-8"))] == []


def test_files_classes_and_functions_that_comments_name_exist() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in FILES}
    comment = re.compile(r'"""[\s\S]*?"""|#[^\n]*')
    known = {path.name for folder in (SOURCE, GRADER, TESTS) for path in folder.rglob("*.py")} | ELSEWHERE
    for text in texts.values():
        known.update(re.findall(r"\w+", comment.sub("", text)))
    named = re.compile(r"``(?:[\w/]+/)?(\w+\.py|[A-Z]\w*[a-z]\w*|\w+_\w+)``")
    lost = {
        f"{path.name}: {name}"
        for path, text in texts.items()
        for said in comment.findall(text)
        for name in named.findall(said)
        if name not in known
    }
    assert not lost, "names of files, classes or functions that do not exist: " + ", ".join(sorted(lost))


def _names_nothing(dotted: str, folder: Path) -> bool:
    """Return whether a name such as ``store.write.SCHEMA``, seen from a folder, begins with a room or module and ends with nothing."""
    first, *rest = dotted.split(".")
    if first in Recipe.model_fields or rest[-1] in DATA or hasattr(sys.modules.get(first), rest[0]):
        return False
    roots = [
        folder,
        *([GRADER] if GRADER in [folder, *folder.parents] else []),
        SOURCE,
        SOURCE.parent,
        GRADER.parent,
    ]
    for place in (root / first for root in roots):
        names = list(rest)
        while names and ((place / names[0]).is_dir() or (place / f"{names[0]}.py").is_file()):
            place /= names.pop(0)
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if place.is_dir() or file.is_file():
            return bool(
                set(names) - set(re.findall(r"\w+", file.read_text("utf-8") if file.is_file() else ""))
            )
    return False  # of another package, or a plain value


def _docstrings(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        n.value.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) and isinstance(n.value.value, str)
    ]


@pytest.mark.slow
def test_docstrings_open_with_a_verb_and_a_noun() -> None:
    opened = [f"{path.name}: {text}" for path in FILES for text in _docstrings(path) if QUESTION.match(text)]
    assert len(opened) <= MOST_QUESTIONS, "\n".join(opened)


@pytest.mark.slow
def test_every_file_and_module_that_a_docstring_names_exists() -> None:
    lost, seen = [], 0
    for path in FILES:
        for text in _docstrings(path):
            files = re.findall(r"``((?:\w+/)+\w+\.(?:py|yaml|md))``", text)
            modules = re.findall(r"``([a-z]\w*(?:\.\w+)+)``", text)
            seen += len(files) + len(modules)
            roots = (SOURCE, GRADER, TESTS.parent, path.parent)
            lost += [f"{path.name}: {name}" for name in files if not any((r / name).exists() for r in roots)]
            lost += [f"{path.name}: {name}" for name in modules if _names_nothing(name, path.parent)]
    assert not lost and seen > 100, "files or modules that do not exist: " + ", ".join(lost)


def test_the_front_door_of_a_room_names_its_files() -> None:
    doors = [*SOURCE.glob("[!_]*/__init__.py"), GRADER / "__init__.py"]
    lost = []
    for door in doors:
        head, *_ = [*_docstrings(door), ""]
        code = door.read_text(encoding="utf-8").replace(head, "")
        inside = {file.stem for file in door.parent.iterdir()} | set(re.findall(r"\w+", code))
        lost += [
            f"{door.parent.name}: {word}"
            for word in re.findall(r"``([a-z]\w*)``", head)
            if word not in inside
        ]
    assert not lost and len(doors) > 10, "a front door names files that do not exist: " + ", ".join(lost)


def test_every_line_that_a_mutation_or_a_missing_cure_changes_is_there_once() -> None:
    changes = MUTATIONS | {name: change for name, (change, *_) in CURES.items()}
    gone = [
        f"{name}: {text!r} is {count} times in {file}"
        for name, (file, text, _) in changes.items()
        if (count := (SOURCE / file).read_text(encoding="utf-8").count(text)) != 1
    ]
    for name, (_, test, _) in CURES.items():
        file, _, function = test.partition("::")
        if f"def {function}(" not in (TESTS.parent / file).read_text(encoding="utf-8") and function:
            gone.append(f"{name}: no test {test}")
    assert not gone, "\n".join(gone)


def test_recorded_runs_name_no_place_of_the_machine_that_made_them() -> None:
    place = re.compile(rb"/(?:home|root|work|dev|tmp|Users)/")
    for file in (TESTS / "data/runs").glob("*.zip"):
        with ZipFile(file) as pack:
            assert [name for name in pack.namelist() if place.search(pack.read(name))] == [], file.name
