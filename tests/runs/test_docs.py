"""What the documents say is true: code runs, commands parse and run, keys, links and paths exist.

A block that cannot run here has ``<!-- not run: REASON -->`` on the line above it. A block with ``title="NAME"`` is the
content of that file, which later blocks of the page use. Pages are read from top to bottom, each in one folder that
holds a small finished run called ``runs/quickstart``."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import pkgutil
import re
import shlex
import shutil
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from algorist.cli.main import main
from algorist.cli.verbs import VERBS, app_of
from algorist.config.load import load_recipe, recipe_names, sections_of
from algorist.config.schema import Recipe
from algorist.objectives import LOSSES
from algorist.runs.asking import recipe_format
from algorist.runs.draft import check_names
from algorist.store.read import query
from tests import sizes

ROOT = Path(__file__).resolve().parents[2]
SKILL = ROOT / "skills" / "algorist" / "SKILL.md"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "packages/grader/README.md")),
    SKILL,
    *sorted((ROOT / "docs").glob("*.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LONG_PAGES = {
    "docs/quickstart.md", "docs/your-own.md", "docs/extending.md", "docs/recipes.md", "skills/algorist/SKILL.md",
}  # fmt: skip
"""Pages whose commands take long."""
SECTIONS = ("model", "data", "prompt", "sft", "grpo", "eval")
RUNS = ("run", "preflight")
NO_KEYS = ("model.generate",)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
ONLY_PARSED = {"doctor": "looks at the machine", "export": "writes to the hub"}
GENERATED = ("arithmetic", "countdown", "reasoning_gym", "story_problems")
"""Datasets that need neither a file nor the hub."""
SMALL = (
    *(
        "threads=1",
        "model.tiny.hidden_size=32",
        "model.tiny.layers=2",
        "model.tiny.max_position_embeddings=2048",
    ),
    *("sft.max_steps=2", "sft.batch_size=4", "sft.gradient_accumulation_steps=1", "sft.logging_steps=1"),
    *("grpo.max_steps=2", "grpo.group_size=4", "grpo.batch_size=8", "grpo.gradient_accumulation_steps=1"),
    *("grpo.max_completion_tokens=16", "eval.max_completion_tokens=16", "eval.samples=2", "eval.ks=[1, 2]"),
    *("data.train.limit=16", "data.eval.limit=8"),
)
"""What makes a run on a tiny model from scratch a matter of seconds."""


@dataclass(frozen=True)
class Block:
    """A fenced block: where it starts, its language, its file name if it has one, and why it is not run."""

    page: str
    line: int
    language: str
    title: str | None
    text: str
    not_run: str | None

    place = property(lambda self: f"{self.page}:{self.line}")


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start = -1
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if start < 0:
            start = number
            continue
        info = lines[start].strip().removeprefix("```")
        above = next((text for text in reversed(lines[:start]) if text.strip()), "")
        title = re.search(r'title="([^"]+)"', info)
        reason = NOT_RUN.search(above)
        found.append(
            Block(
                str(page.relative_to(ROOT)),
                start + 1,
                (info.split() or [""])[0],
                title[1] if title else None,
                "\n".join(lines[start + 1 : number]) + "\n",
                reason[1] if reason else None,
            )
        )
        start = -1
    assert start < 0, f"{page}:{start + 1}: a fence is not closed"
    return found


def prose_of(page: Path) -> str:
    """Return a page without its fenced blocks and comments."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def inline_code(page: Path) -> list[str]:
    return [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", prose_of(page))]


def commands_of(block: Block) -> list[list[str]]:
    """Return the arguments of each ``algorist`` line of a block, shell arrays filled in."""
    text = block.text.replace("\\\n", " ")
    arrays: dict[str, str] = dict(re.findall(r"^(\w+)=\((.*?)\)$", text, re.MULTILINE | re.DOTALL))
    ARRAYS.setdefault(block.page, {}).update({name: " ".join(body.split()) for name, body in arrays.items()})
    found = []
    for line in text.splitlines():
        words = line.strip().removeprefix("$ ")
        if not words.startswith("algorist "):
            continue
        for name, body in ARRAYS[block.page].items():
            words = words.replace(f'"${{{name}[@]}}"', body)
        arguments = shlex.split(words, comments=True)[1:]
        stop = next((i for i, word in enumerate(arguments) if word in ("|", "<", ">", ">>", "&&")), None)
        found.append(arguments[:stop])
    return found


ARRAYS: dict[str, dict[str, str]] = {}


def command_of(arguments: list[str]) -> tuple[Any, list[str]]:
    """Return the parser of a command line and what is left for it.

    Raises:
        AssertionError: There is no such verb.
    """
    verb, *rest = arguments[: arguments.index("--")] if "--" in arguments else arguments
    assert verb in VERBS, f"there is no verb '{verb}'"
    command = typer.main.get_command(app_of(verb))
    inner = getattr(command, "commands", None)
    if inner is None:
        return command, rest
    assert rest and rest[0] in inner, f"'algorist {verb}' has {sorted(inner)}, not {rest[:1]}"
    return inner[rest[0]], rest[1:]


def check_options(arguments: list[str]) -> None:
    command, rest = command_of(arguments)
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in rest:
        if re.match(r"--?[a-z]", word):
            assert word.partition("=")[0] in known | {"--help", "--debug"}, (
                f"{word}: known are {sorted(known)}"
            )


def parse(arguments: list[str]) -> dict[str, Any]:
    """Return the parameters of a command line as the verb receives them; a wrong one raises."""
    command, rest = command_of(arguments)
    if rest == ["--help"]:
        return {}
    with command.make_context(f"algorist {arguments[0]}", [w for w in rest if w != "--debug"]) as context:
        return dict(context.params)


def recipe_of(arguments: list[str]) -> Recipe | None:
    """Return the recipe that a command line names, with its overrides; unknown keys and values raise."""
    given = parse(arguments)
    name = given.get("recipe") or (given.get("name") if arguments[:2] == ["recipes", "show"] else None)
    if not isinstance(name, str):
        return None
    name = "quickstart" if name.isupper() else name
    return load_recipe(name, given.get("overrides") or []).recipe


def why_only_resolved(recipe: Recipe) -> str | None:
    """Return why a ``run`` is not done here, or None: it needs the hub, or a file that the reader has."""
    if recipe.model.name != "tiny" and not Path(recipe.model.name).is_dir():
        return f"needs the model {recipe.model.name}"
    for section in (recipe.data.train, recipe.data.sft, recipe.data.eval):
        if section is not None and section.path is not None and not Path(section.path).exists():
            return f"needs {section.path}"
        if section is not None and section.name == "reasoning_gym" and find_spec("reasoning_gym") is None:
            return "needs the extra reasoning-gym"
        if section is not None and section.path is None and section.name not in GENERATED:
            return f"needs {section.name} from the hub"
    return None


@dataclass
class Call:
    """One call of the command line in this process."""

    patch: pytest.MonkeyPatch

    def __call__(self, *arguments: str) -> tuple[int, str]:
        self.patch.setattr(sys, "argv", ["algorist", *arguments])
        self.patch.setattr(sys, "stdin", io.StringIO("What is 1 + 2?\n"))
        shown = io.StringIO()
        with (
            contextlib.redirect_stdout(shown),
            contextlib.redirect_stderr(shown),
            pytest.raises(SystemExit) as end,
        ):
            main()
        return int(end.value.code or 0), shown.getvalue()

    def run(self, arguments: list[str], recipe: Recipe) -> tuple[int, str]:
        """Run a recipe small; a run of that name from an earlier block makes room, unless it is continued."""
        folder = Path(recipe.output_dir) / (recipe.run_name or recipe.name)
        if "--resume" in arguments:  # with the small settings it was begun with
            flags = [word for word in arguments if word.startswith("--")]
            return self(arguments[0], str(folder / "config.yaml"), *flags)
        if arguments[0] != "preflight":
            shutil.rmtree(folder, ignore_errors=True)
        small = [*SMALL]
        if recipe.data.sft is not None:
            small.append("data.sft.limit=16")
        for part in ("train", "sft", "eval"):
            section = getattr(recipe.data, part)
            if section is not None and section.name in GENERATED:
                small.append(f"data.{part}.params.count=32")
        return self(*arguments, *small)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """The command line, and afterwards registries and log levels as they were."""
    from algorist.data import DATASETS
    from algorist.diagnosis.rule import FACTS, RULES
    from algorist.models.loaders import FAMILIES
    from algorist.prompts import FORMATS
    from algorist.rewards import REWARDS
    from algorist_grader import MATCHERS

    for registry in (DATASETS, FACTS, RULES, MATCHERS, FORMATS, REWARDS):
        names = registry.names()  # which imports what registers them
        monkeypatch.setattr(registry, "_entries", {name: registry.get(name) for name in names})
    families = dict(FAMILIES)
    for name, value in (
        ("COLUMNS", "200"),
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TRL_EXPERIMENTAL_SILENCE", "1"),
    ):
        monkeypatch.setenv(name, value)
    names = ("transformers", "trl", "datasets", "accelerate", "torch.distributed.elastic")
    levels = {name: logging.getLogger(name).level for name in names}
    yield Call(monkeypatch)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    FAMILIES.clear()
    FAMILIES.update(families)


ROWS = [
    {
        "question": f"What is {a} + 3?",
        "problem": f"What is {a} + 3?",
        "answer": f"{a} + 3 = <<{a}+3={a + 3}>>{a + 3}\n#### {a + 3}",
        "solution": f"{a} + 3 = \\boxed{{{a + 3}}}",
    }
    for a in range(4)
]
"""Rows that the adapters of GSM8K and of MATH both read."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished small run and a few rows in the form of GSM8K."""
    from algorist.report.build import build_report
    from algorist.runs.pipeline import run_recipe

    folder = tmp_path_factory.mktemp("reader")
    recipe = load_recipe(
        "smoke-cpu", [f"output_dir={folder}/runs", "run_name=quickstart", "device=cpu"]
    ).recipe
    build_report(run_recipe(recipe).folder.path)
    (folder / "gsm8k").mkdir()
    for split in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in ROWS)
        (folder / "gsm8k" / f"{split}.jsonl").write_text(text, encoding="utf-8")
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("registrations_undone")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG_PAGES else name for name in NAMES]
)
def test_a_page_runs_from_top_to_bottom(
    name: str, finished: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "reader"
    shutil.copytree(finished, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of(ROOT / name):
        if block.title is not None:
            if block.title.startswith("examples/"):
                assert (ROOT / block.title).read_text(encoding="utf-8") == block.text, (
                    f"{block.place}: differs"
                )
            else:
                Path(block.title).write_text(block.text, encoding="utf-8")
        if block.not_run is not None:
            continue
        if block.language == "python" and block.title is None:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile("\n" * block.line + block.text, ROOT / name, "exec"), names)
        if block.language == "sql":
            query(Path("runs/quickstart"), block.text)
        for arguments in commands_of(block) if block.language in ("", "bash", "sh", "console") else ():
            do(block, arguments, call)


def do(block: Block, arguments: list[str], call: Call) -> None:
    """Run one command of a page, or resolve its recipe where it needs what is not here."""
    place = f"{block.place}: algorist {shlex.join(arguments)}"
    try:
        if any("…" in word for word in arguments):  # a synopsis
            return check_options([word.strip("[]") for word in arguments])
        recipe = recipe_of(arguments)
    except Exception as error:
        raise AssertionError(f"{place}\n{error}") from error
    verb = arguments[0]
    if verb in ONLY_PARSED:
        return
    if verb in RUNS:
        assert recipe is not None
        check_names(recipe, recipe_format(recipe))
        if "-n" in arguments or why_only_resolved(recipe) or any(map(str.isupper, arguments)):
            return
        code, shown = call.run(arguments, recipe)
        assert code == 0, f"{place}\n{shown}"
        return
    if verb == "solve" and "--model" not in arguments:
        arguments = [*arguments, "--model", "runs/quickstart"]
    if verb == "watch":
        arguments = [*arguments, "--once"]
    if any("reasoning_gym" in word for word in arguments) and find_spec("reasoning_gym") is None:
        return
    missing = [w for w in arguments if re.search(r"\.(json|jsonl|parquet|csv)$", w) and not Path(w).exists()]
    if verb in ("data", "eval") and missing:
        return
    code, shown = call(*arguments)
    allowed = (0, 1) if verb in ("grade", "diagnose", "data", "regrade") else (0,)
    assert code in allowed, f"{place}\n{shown}"


@pytest.mark.parametrize("name", NAMES)
def test_yaml_blocks_are_parts_of_recipes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks_of(ROOT / name):
        if block.title is not None and block.language == "python":
            (tmp_path / Path(block.title).name).write_text(block.text, encoding="utf-8")
        if block.language != "yaml" or block.not_run is not None:
            continue
        values = yaml.safe_load(block.text)
        assert isinstance(values, dict), f"{block.place}: not a part of a recipe"
        values.setdefault("extends", "quickstart")
        file = tmp_path / (block.title or "part.yaml")
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        try:
            recipe = load_recipe(str(file)).recipe
            if not any(".py:" in spec.name for spec in recipe.rewards):
                check_names(recipe, recipe_format(recipe))
        except Exception as error:
            raise AssertionError(f"{block.place}: {error}") from error


@pytest.mark.parametrize("name", NAMES)
def test_commands_in_the_text_exist(name: str) -> None:
    for code in inline_code(ROOT / name):
        words = shlex.split(code) if code.startswith("algorist ") else []
        if len(words) > 1 and not words[1].startswith("-") and words[1] != "VERB":
            try:
                check_options(words[1:])
                if words[1] in RUNS and len(words) > 2 and "plugins=" not in code:  # its file is on the page
                    recipe_of(words[1:])
            except AssertionError as error:
                raise AssertionError(f"{name}: `{code}`: {error}") from None


@pytest.mark.parametrize("verb", VERBS)
def test_the_example_of_a_verb_parses(verb: str) -> None:
    command = typer.main.get_command(app_of(verb))
    told = [command.epilog, *(c.epilog for c in getattr(command, "commands", {}).values())]
    lines = [part for text in told if text for part in re.findall(r"algorist (.+?)(?: · |\n\n|$)", text)]
    assert lines, f"algorist {verb} shows no example"
    for line in lines:
        arguments = shlex.split(line)
        check_options(arguments)
        recipe_of(arguments)


def test_the_tour_can_be_followed_and_knows_how_far_one_is(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out = call("tour", "--json")
    steps = json.loads(out)["steps"]
    assert all(len(step["says"]) <= 70 for step in steps), "with number and (done) within 80 columns"
    commands = [command for step in steps for command in step["commands"]]
    for command in commands:
        if command.startswith("algorist ") and not command.endswith("mine.yaml"):  # which the reader writes
            check_options(shlex.split(command)[1:])
            recipe_of(shlex.split(command)[1:])
    assert code == 0 and commands[0] == "algorist run quickstart"
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "result.json").touch()
    _, out = call("tour")
    assert [line[:1] for line in out.splitlines() if line.endswith("(done)")] == ["1"]
    _, out = call("recipes")
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["quickstart", "countdown"]


def key_exists(key: str) -> bool:
    """Return whether a dotted key is in the schema; inside a free mapping every key is."""
    parameters = {name for loss in LOSSES for name in LOSSES.get(loss).parameters}
    if key.startswith("grpo.loss.") and key.rpartition(".")[2] in parameters:
        return True
    models: list[Any] = [Recipe]
    for part in key.split("."):
        if part.isdigit():
            continue
        field = next((model.model_fields[part] for model in models if part in model.model_fields), None)
        if field is None:
            return False
        if any(typing.get_origin(a) is dict for a in [field.annotation, *typing.get_args(field.annotation)]):
            return True
        models = sections_of(field.annotation)
    return True


@pytest.mark.parametrize("name", NAMES)
def test_keys_in_the_text_are_in_the_schema(name: str) -> None:
    for code in inline_code(ROOT / name):
        for word in code.split():
            found = re.fullmatch(rf"((?:{'|'.join(SECTIONS)})(?:\.[a-z_0-9]+)+)(=.*)?", word)
            if found and found[1] not in NO_KEYS and not found[1].endswith((".py", ".yaml", ".json", ".md")):
                assert key_exists(found[1]), f"{name}: `{code}`: no such key"


def test_a_wrong_key_is_seen() -> None:
    assert (
        key_exists("data.train.params.count") and key_exists("rewards.0.weight") and key_exists("grpo.beta")
    )
    assert (
        not key_exists("grpo.betta") and not key_exists("model.lora.ranks") and not key_exists("grpo.beta.x")
    )


def slug(heading: str) -> str:
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors_of(page: Path) -> set[str]:
    text = prose_of(page)
    own = re.findall(r'(?:id|name)="([^"]+)"', text)
    return {slug(h) for h in re.findall(r"^#+ +(.+?)\s*$", text, re.MULTILINE)} | set(own)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", re.sub(r"`[^`\n]*`", "", prose_of(page))):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name}: {target} does not exist"
        if name.startswith("docs/"):
            assert (ROOT / "docs") in file.parents, (
                f"{name}: {target} lies outside of docs/; the site has no such page"
            )
        if anchor and file.suffix == ".md":
            assert anchor in anchors_of(file), f"{name}: {target}: the page has {sorted(anchors_of(file))}"


@pytest.mark.parametrize("name", NAMES)
def test_paths_and_python_names_in_the_text_exist(name: str) -> None:
    inside = {p.name for p in (ROOT / "src" / "algorist").iterdir() if p.is_dir()}
    for code in inline_code(ROOT / name):
        for word in re.split(r"[\s,:]+", code):
            if re.fullmatch(r"algorist(_grader)?(\.\w+)+", word):
                pkgutil.resolve_name(word)
            first, slash, _ = word.partition("/")
            if not slash or not re.fullmatch(r"[\w./*-]+", word) or re.search(r"[A-Z]{2}", word):
                continue
            if first in ("src", "tests", "docs", "examples", "benchmarks", "packages"):
                assert list(ROOT.glob(word.rstrip("/"))), f"{name}: `{word}` does not exist"
            elif first in inside and word.endswith((".py", ".yaml", ".css", ".j2")):
                assert list((ROOT / "src" / "algorist").glob(word)), f"{name}: `{word}` does not exist"


def test_each_recipe_is_described() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert not [n for n in recipe_names() if n not in text and not n.startswith("math-sft")]


def test_values_in_the_paper_index_are_those_of_the_recipes() -> None:
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| `([\w.]+)=([^`]+)` \| (?:`([\w-]+)`|default) \|", text)
    assert len(rows) >= 15
    for key, value, name in rows:
        found: Any = load_recipe(name).recipe if name else Recipe()
        for part in key.split("."):
            found = found[part] if isinstance(found, dict) else getattr(found, part)
        assert found == yaml.safe_load(value), f"{name or 'default'}: {key} is {found}"


def test_every_rule_is_explained() -> None:
    from algorist.diagnosis.rules import all_rules

    headings = anchors_of(ROOT / "docs" / "troubleshooting.md")
    assert set(all_rules()) <= headings, sorted(set(all_rules()) - headings)


def test_the_documents_stay_short() -> None:
    counted = sizes.words()
    assert all(counted[kind] <= most for kind, most in sizes.MOST_WORDS.items()), counted
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 350 and len(readme.splitlines()) <= 80
    assert len(re.findall(r"\d+(?:[.,]\d+)*", readme)) <= 25
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) <= 80
    assert len(SKILL.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("name", [*NAMES, "CHANGELOG.md", "RELEASING.md", "tests/data/README.md"])
def test_lines_of_a_page_fit(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert not [f"{name}:{number}" for number, line in enumerate(lines, start=1) if len(line) > 120]


def test_each_page_is_in_the_navigation_and_make_targets_exist() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    # without a shim of its own, the search asks unpkg.com for one when the site is opened from file://
    (shim,) = yaml.safe_load(text)["extra"]["polyfills"]
    assert "iframe-worker" in shim and (ROOT / "docs" / shim).is_file()
    assert set(re.findall(r"([\w-]+\.md)", text)) == {p.name for p in PAGES if p.parent == ROOT / "docs"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        for block in blocks_of(page):
            for line in re.findall(r"^make ([a-z -]+)", block.text, re.MULTILINE):
                assert set(line.split()) <= targets, f"{block.place}: make {line}"
