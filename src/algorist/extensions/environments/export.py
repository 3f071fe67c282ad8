"""A problem set with its prompt and its checker as a package for others: a taskset of verifiers, and TRL's environment class.

The texts beside this file are the package; what they need is algorist-grader alone.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from string import Template

from algorist.errors import ConfigError
from algorist.prompts.base import PromptFormat
from algorist.prompts.formats import PublishedPrompt
from algorist.types import Problem
from algorist_grader.user_code import find_file

PACKAGE = Path(__file__).with_name("package")
"""The texts, where the package has them: ``name`` is the package's, and each ends in ``.txt``."""


def write_package(target: Path, problems: Sequence[Problem], form: PromptFormat, matcher: str) -> list[str]:
    """Write the package into a new folder, whose name it has; return its files.

    Raises:
        ConfigError: The folder is not empty or its name is none of a module, or others could not prompt or grade like this.
    """
    name = re.sub(r"\W", "_", target.resolve().name).lower()
    if not name.isidentifier():
        raise ConfigError(f"--to {target}: its name is that of a Python package; begin it with a letter")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already and not empty; give --to another folder")
    tags = json.dumps(_tags(form))
    system = form.system_prompt if form.system_role == "system" else ""
    (content,) = [message["content"] for message in form.render("{question}") if message["role"] != "system"]  # type: ignore[index,misc]
    checker = next((p.checker for p in problems if ".py:" in p.checker), "")
    values = {
        "name": name,
        "kind": "".join(part.capitalize() for part in name.split("_")),
        "count": str(len(problems)),
        "system": json.dumps(system),
        "content": json.dumps(content),
        "matcher": json.dumps(matcher),
        "tags": tags,
        "checker": f'str(Path(__file__).with_name("checks.py")) + ":{checker.rpartition(":")[2]}"' if checker else '""',
        "needs": ', "reasoning-gym"' if any(p.checker == "reasoning_gym" for p in problems) else "",
    }  # fmt: skip
    for source in PACKAGE.rglob("*.txt"):
        file = target / str(source.relative_to(PACKAGE).with_suffix("")).replace("name", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(Template(source.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
    lines = [json.dumps(_row(problem), default=str) + "\n" for problem in problems]
    (target / name / "problems.jsonl").write_text("".join(lines), encoding="utf-8")
    if checker:
        shutil.copyfile(find_file(checker, f"checker '{checker}'")[0], target / name / "checks.py")
    return sorted(str(file.relative_to(target)) for file in target.rglob("*") if file.is_file())


def _row(problem: Problem) -> dict[str, object]:
    """Return what a problem's file says of it; a checker that is code is in the package."""
    if "verifiers" in problem.extra:
        raise ConfigError(f"problem {problem.id} is a task of verifiers, a taskset already; give others that")
    row = {key: value for key, value in problem.columns().items() if value not in ("", None)}
    return {key: value for key, value in row.items() if key != "checker" or ".py:" not in str(value)}


def _tags(form: PromptFormat) -> tuple[str, ...]:
    """Return the tags that a format reads answers by; none where they are in boxes."""
    if form.turns is not None:
        raise ConfigError(
            "the recipe has tools or an environment, which an export does not carry; leave them out: tools=null"
        )
    if form.is_chat and not form.prefilled_start and type(form).parse is PromptFormat.parse:
        return form.tags.all()
    if form.is_chat and type(form) is PublishedPrompt and not form.stated and "\\boxed" in form.closing:
        return ()
    raise ConfigError(
        f"prompt.format is {form.name}, whose prompts or answers other trainers could not write or read; take one that is a chat with "
        "tags, such as prompt.format=reasoning_answer, or boxed"
    )
