"""What may change between a run and its continuation, and the files that a recipe names: the user's are copied into the run, data is hashed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from algorist.config.schema import Recipe
from algorist.errors import DAMAGED, CheckpointError, ConfigError
from algorist.store.redact import leaves


def check_same_run(before: str, after: str, path: Path) -> None:
    """Allow changes of length, logging and naming; refuse what would make the resumed run another run.

    Args:
        before: The run's ``config.yaml``.
        after: The recipe as it resolves now, as YAML.
        path: The run folder, for the message.

    Raises:
        ConfigError: Settings differ that decide what is learned; the message names them with both values.
    """
    free = "sft.max_steps sft.epochs grpo.max_steps grpo.epochs report_to tracking hub description".split()
    free_last = "logging_steps save_steps save_total_limit eval_every samples_every".split()
    old, new = flat(yaml.safe_load(before)), flat(yaml.safe_load(after))
    changed = [
        key
        for key in sorted(set(old) | set(new))
        if old.get(key) != new.get(key)
        and not key.startswith((*free, "eval.", "output_dir", "run_name"))
        and key.rpartition(".")[2] not in free_last
    ]
    if changed:
        lines = "\n".join(
            f"  {key}: {old.get(key)!r} in the run, {new.get(key)!r} now" for key in changed[:8]
        )
        raise ConfigError(
            f"{path} was started with other settings, so this would be another run:\n{lines}\n"
            "Use the same values to resume, or start a new run with run_name=NAME"
        )


def flat(value: Any) -> dict[str, Any]:
    """Return nested keys as dotted ones."""
    return {key: inner for key, inner in leaves(value, lists=False) if inner != {}}


INPUTS = "inputs.json"
"""Key of the recipe → ``path``, ``sha256`` and, where it was copied, ``copy``; in the run folder."""
COPIES = "files"
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def written_files(recipe: Recipe) -> dict[str, Path]:
    """Return key → file of what the user wrote: rewards, loss, advantage, checkers, plugins, system prompt, chat template."""
    names = {f"rewards.{i}.name": r.name.rpartition(":")[0] for i, r in enumerate(recipe.rewards)}
    names |= {"grpo.loss.name": recipe.grpo.loss.name.rpartition(":")[0]}
    names |= {"grpo.advantage": recipe.grpo.advantage.rpartition(":")[0]}
    for part in ("train", "sft", "eval"):
        section = getattr(recipe.data, part)
        names[f"data.{part}.checker"] = ((section and section.checker) or "").rpartition(":")[0]
    names |= {f"plugins.{i}": path for i, path in enumerate(recipe.plugins)}
    names["prompt.system_prompt_path"] = recipe.prompt.system_prompt_path or ""
    names["model.chat_template"] = recipe.model.chat_template or ""
    return {key: path for key, text in names.items() if (path := _file(text)) is not None}


def data_files(recipe: Recipe) -> dict[str, Path]:
    """Return key → file or folder of the local data."""
    named = {
        key: Path(value).expanduser()
        for key, value in leaves(recipe.data.model_dump(mode="json"), "data")
        if key.endswith((".path", ".pass_rates")) and isinstance(value, str)
    }
    return {key: path for key, path in named.items() if path.exists()}


def keep_inputs(recipe: Recipe, run: Path) -> dict[str, dict[str, str]]:
    """Copy what the user wrote into the run, and return what ``inputs.json`` says of every file.

    Raises:
        CheckpointError: The disk refuses.
    """
    record = {key: {"path": str(path), "sha256": hash_of(path)} for key, path in data_files(recipe).items()}
    for number, (key, path) in enumerate(written_files(recipe).items()):
        entry = {"path": str(path), "sha256": hash_of(path)}
        same = [e["copy"] for e in record.values() if "copy" in e and e["sha256"] == entry["sha256"]]
        taken = any(e.get("copy") == f"{COPIES}/{path.name}" for e in record.values())
        entry["copy"] = same[0] if same else f"{COPIES}/{f'{number}-' if taken else ''}{path.name}"
        record[key] = entry
        try:
            (run / COPIES).mkdir(exist_ok=True)
            shutil.copyfile(path, run / entry["copy"])
        except OSError as error:
            raise CheckpointError(
                f"cannot copy {path} into {run / COPIES}: {error.strerror or error}"
            ) from None
    return record


def check_same_inputs(recipe: Recipe, run: Path) -> None:
    """Refuse to continue a run with other rewards, prompts, templates or data than it began with.

    Raises:
        ConfigError: A file has changed; the message names it, its key and how to get the former one back.
    """
    then = _read(run)
    lines = []
    for key, path in (written_files(recipe) | data_files(recipe)).items():
        before = then.get(key)
        if before is None or hash_of(path) == before["sha256"]:
            continue
        back = f"; as it was: cp {run / before['copy']} {path}" if "copy" in before else ""
        lines.append(f"  {path} ({key}){back}")
    if lines:
        raise ConfigError(
            f"{run} began with other files than there are now, so this would be another run:\n"
            + "\n".join(lines)
            + "\nPut the former files back to resume, or start a new run with run_name=NAME"
        )


def changed_since(run: Path) -> list[str]:
    """Return a line for each of the user's files that has changed or is gone since the run began; the run uses its copy."""
    return [
        f"{entry['path']} ({key}) has changed since this run began; the run uses its copy, {run / entry['copy']}"
        for key, entry in _read(run).items()
        if "copy" in entry
        and not (Path(entry["path"]).is_file() and hash_of(Path(entry["path"])) == entry["sha256"])
    ]


def with_copies(recipe: Recipe, run: Path) -> Recipe:
    """Return a run's recipe with the user's files taken from the run folder, so that it works wherever the folder is."""
    values, record = recipe.model_dump(), _read(run)
    for key, entry in record.items():
        copy = run / entry.get("copy", "/")
        if "copy" not in entry or not copy.resolve().is_relative_to(run.resolve()) or not copy.is_file():
            continue
        node: Any = values
        *above, last = (int(part) if part.isdigit() else part for part in key.split("."))
        try:
            for part in above:
                node = node[part]
            old = node[last]
        except (KeyError, IndexError, TypeError):
            continue
        own = key.startswith(("rewards.", "grpo.")) or key.endswith(".checker")
        function = old.rpartition(":")[2] if own else ""
        node[last] = f"{copy}:{function}" if function else str(copy)
    return Recipe.model_validate(values) if record else recipe


def copies_of(run: Path, key: str, files: Sequence[str]) -> list[str]:
    """Return the run's copies of the files of a list in the recipe, or a file itself where there is no copy."""
    entries = _read(run)
    copies = [run / entries.get(f"{key}.{number}", {}).get("copy", "/") for number in range(len(files))]
    return [str(copy) if copy.is_file() else file for copy, file in zip(copies, files, strict=True)]


def hash_of(path: Path) -> str:
    """Return the sha256 of a file, or of the data files in a folder with their names."""
    digest = hashlib.sha256()
    files = (
        [path]
        if path.is_file()
        else sorted(p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in DATA_SUFFIXES)
    )
    for file in files:
        if file != path:
            digest.update(file.relative_to(path).as_posix().encode())
        with file.open("rb") as content:
            hashlib.file_digest(content, lambda: digest)
    return digest.hexdigest()


def _read(run: Path) -> dict[str, dict[str, str]]:
    file = run / INPUTS
    if not file.is_file():
        return {}
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if all(isinstance(v, str) for entry in record.values() for v in entry.values()):
            return dict(record)
    except DAMAGED:
        pass
    raise CheckpointError(f"{file} is damaged; delete the file to continue without comparing the inputs")


def _file(text: str) -> Path | None:
    if not text or len(text) > 1000 or "\n" in text:
        return None
    path = Path(text).expanduser()
    return path if path.is_file() else None
