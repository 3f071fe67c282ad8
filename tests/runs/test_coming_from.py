"""Each row of docs/coming-from.md: commands parse, keys are in the schema, names can be imported, no flag is left out."""

from __future__ import annotations

import importlib
import re
import shlex
import typing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pydantic import BaseModel

from algorist.cli.verbs import VERBS, app_of
from algorist.config.load import load_recipe, parse_override, recipe_names
from algorist.config.schema import Recipe
from algorist.rewards import REWARDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
SPECIFICATION = ROOT.parent / "shared" / "spec" / "reference-systems.md"
ROWS = [
    (number, *(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:3]))
    for number, line in enumerate(PAGE.splitlines(), start=1)
    if line.startswith("| ") and not line.startswith("|---")
]
SPANS = [(number, code) for number, _, ours in ROWS for code in re.findall(r"`([^`]+)`", ours)]
COMMANDS = [(number, code) for number, code in SPANS if code.startswith("algorist ")]
TOP = "|".join(Recipe.model_fields)
KEYS = [(number, code) for number, code in SPANS if re.match(rf"(?:{TOP})(?:[.=]|$)", code)]
NAMES = [(number, code) for number, code in SPANS if re.fullmatch(r"algorist(?:\.\w+)+", code)]


def parse(words: list[str]) -> None:
    """Let the command line read a command without doing it."""
    verb, *arguments = words
    assert verb in VERBS, f"no verb {verb}"
    command: Any = typer.main.get_command(app_of(verb))
    if hasattr(command, "commands"):
        assert arguments and arguments[0] in command.commands, f"algorist {verb} has no {arguments[:1]}"
        command, arguments = command.commands[arguments[0]], arguments[1:]
    command.make_context(verb, list(arguments))


@cache
def key_exists(key: str) -> bool:
    """Return whether a dotted key is in the schema; below a free mapping every key is."""
    model: Any = Recipe
    for part in key.split("."):
        if model is None or part not in model.model_fields:
            return False
        kinds = [model.model_fields[part].annotation, *typing.get_args(model.model_fields[part].annotation)]
        if any(typing.get_origin(kind) is dict for kind in kinds):
            return True
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
    return True


def test_the_tables_are_there() -> None:
    assert len(ROWS) > 70 and len(COMMANDS) > 20 and len(KEYS) > 40 and len(NAMES) > 10
    assert PAGE.count("\n## ") == 5
    assert all(ours for _, _, ours in ROWS)


@pytest.mark.parametrize(("line", "code"), COMMANDS, ids=[code for _, code in COMMANDS])
def test_every_command_parses(line: int, code: str) -> None:
    words = shlex.split(code)[1:]
    parse(words)
    if words[0] in ("run", "preflight"):
        name = next(word for word in words[1:] if word in recipe_names())
        settings = [w for w in words[1:] if re.match(rf"(?:{TOP})[.=]", w)]
        load_recipe(name, settings)
    if words[:2] == ["recipes", "show"]:
        load_recipe(words[2])


@pytest.mark.parametrize(("line", "code"), KEYS, ids=[code for _, code in KEYS])
def test_every_recipe_key_exists(line: int, code: str) -> None:
    key, equals, value = code.partition("=")
    assert key_exists(key), f"line {line}: no key {key}"
    if equals and value.strip("'") not in ("…", "M", "S", "D", "F", "N", "P", "E", "I"):
        assert parse_override(code)[0] == key
        load_recipe("sft-grpo-dapo", [code])


@pytest.mark.parametrize(("line", "code"), NAMES, ids=[code for _, code in NAMES])
def test_every_python_name_can_be_imported(line: int, code: str) -> None:
    found: Any = importlib.import_module("algorist")
    path = ["algorist"]
    for part in code.split(".")[1:]:
        path.append(part)
        found = getattr(found, part, None) or importlib.import_module(".".join(path))
    assert found is not None


def test_rewards_that_the_page_names_exist() -> None:
    named = [row for row in ROWS if row[2].startswith(("rewards `", "parameters of the reward"))]
    names = [name for _, _, ours in named for name in re.findall(r"`(\w+)`", ours)]
    names += [f"{name}" for name in re.findall(r"`(match_\w+|check_\w+)`", PAGE)]
    assert len(names) >= 10
    for name in names:
        assert name in REWARDS, name


def test_no_flag_of_the_systems_is_left_out() -> None:
    if not SPECIFICATION.is_file():
        pytest.skip(f"the specification is not at {SPECIFICATION}")
    text = SPECIFICATION.read_text(encoding="utf-8")
    flags = set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", text))
    told = " ".join(theirs for _, theirs, _ in ROWS)
    left_out = {flag for flag in flags if not re.search(rf"{re.escape(flag)}(?![\w-])", told)}
    assert len(flags) > 35 and left_out == set()
    names = ("ModelManager", "create_", "EVALUATION_GUIDE.md", "GRPOScriptArguments", "MathTrainingSetup")
    assert [name for name in names if name not in told] == []


def test_no_public_function_is_left_out() -> None:
    if not SPECIFICATION.is_file():
        pytest.skip(f"the specification is not at {SPECIFICATION}")
    section = SPECIFICATION.read_text(encoding="utf-8").split("Adapter signatures")[1].split("\n---")[0]
    functions = set(re.findall(r"\b((?:run|get)_\w+)\(", section))
    assert len(functions) == 16
    assert {name for name in functions if f"`{name}`" not in PAGE} == set()


def test_the_functions_of_the_exercises_are_in_the_package() -> None:
    import algorist

    names = re.findall(r"`(?:run_)?(\w+)`", PAGE.partition("without the prefix:")[2].partition("\n\n")[0])
    assert len(names) == 19 and not [name for name in names if not hasattr(algorist, name)]


def test_a_wrong_row_would_be_seen() -> None:
    assert not key_exists("grpo.num_generations") and not key_exists("model.lora.ranks")
    for words in (["run"], ["run", "quickstart", "--skip"], ["frobnicate"], ["data", "shw", "gsm8k"]):
        with pytest.raises(Exception, match=r"no verb|Missing parameter|No such option|has no"):
            parse(words)


# file -> limit, epochs, batch, accumulation, steps between validations.
UNIQUE = {
    "unique_128": (128, 20, 16, 8, 4),
    "unique_256": (256, 20, 32, 4, 8),
    "unique_512": (512, 20, 64, 8, 5),
    "unique_1024": (1024, 20, 64, 8, 5),
    "unique_full": (None, 10, 16, 8, 20),
}


@pytest.mark.parametrize("file", UNIQUE)
def test_the_six_configurations_have_the_originals_numbers(file: str) -> None:
    """The commands of the page, not a copy of them; the sixth is the recipe math-sft-correct-full."""
    (line,) = re.findall(
        rf"^algorist run ([^#\n]+?) +# {file}\.yaml", PAGE.replace("\\\n", " "), re.MULTILINE
    )
    words = shlex.split(line)
    recipe = load_recipe(words[0], words[1:]).recipe
    sft = recipe.sft
    found = (sft.epochs, sft.batch_size, sft.gradient_accumulation_steps, sft.eval_every)
    assert (recipe.data.train.limit, *found) == UNIQUE[file]


def test_every_make_target_exists() -> None:
    named = {target for _, code in SPANS if code.startswith("make ") for target in code.split()[1:2]}
    rules = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"install", "flash", "test", "coverage", "clean"} <= named <= set(rules)
