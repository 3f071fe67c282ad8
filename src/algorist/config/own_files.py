"""The files of the user's that a recipe names: one walk over the typed leaves of all its sections, those of extensions included.

What the user wrote (``TextPath``, ``OwnCode``) is copied into the run, which works with the copy; data (``DataPath``) is hashed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from algorist.config.schema import Recipe
from algorist.config.section import OwnFile
from algorist.errors import DAMAGED, CheckpointError, ConfigError
from algorist.store.run_folder import INPUTS, RunFolder
from algorist.store.stages import checkpoints

Inputs = dict[str, dict[str, str]]
"""Key of the recipe → ``path``, ``sha256`` and, where the run keeps one, the place of its ``copy``."""
COPIES = "files"
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_FUNCTION = re.compile(r"(.+\.py):(\w+)")


def own_files(recipe: Recipe) -> Iterator[tuple[str, Path, OwnFile]]:
    """Yield (dotted key, file, mark) of every file that the recipe names; of data also a folder."""
    for key, text, mark in _marked(recipe, None, ""):
        path = _path(text, mark)
        if path is not None and (path.is_file() or (mark.kind == "data" and path.is_dir())):
            yield key, path, mark


def _marked(value: Any, mark: OwnFile | None, key: str) -> Iterator[tuple[str, str, OwnFile]]:
    """Yield the texts whose type has a mark; a dataset's own ``params`` have no types: a ``path`` in them is data."""
    if isinstance(value, BaseModel):
        for name, info in type(value).model_fields.items():
            marks = [*info.metadata, *_metadata(info.annotation)]
            inner = next((m for m in marks if isinstance(m, OwnFile)), None)
            yield from _marked(getattr(value, name), inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple | dict):
        pairs: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in pairs:
            yield from _marked(part, OwnFile("data") if name == "path" else mark, f"{key}.{name}")
    elif mark is not None and isinstance(value, str):
        yield key, value, mark


def _metadata(annotation: Any) -> Iterator[Any]:
    """Yield the metadata of a type's ``Annotated`` parts."""
    yield from getattr(annotation, "__metadata__", ())
    for part in get_args(annotation):
        yield from _metadata(part)


def _path(text: str, mark: OwnFile) -> Path | None:
    if not text or len(text) > 1000 or "\n" in text:  # a template written out
        return None
    code = _FUNCTION.fullmatch(text) if mark.kind == "code" else None
    return None if mark.kind == "code" and code is None else Path(code[1] if code else text).expanduser()


def inputs_of(recipe: Recipe) -> Inputs:
    """Return the ``inputs.json`` entries of every file that a recipe names."""
    record: Inputs = {}
    for number, (key, path, mark) in enumerate(own_files(recipe)):
        entry = {"path": str(path), "sha256": hash_of(path)}
        if mark.kind != "data":
            same = [e["copy"] for e in record.values() if "copy" in e and e["sha256"] == entry["sha256"]]
            taken = any(e.get("copy") == f"{COPIES}/{path.name}" for e in record.values())
            entry["copy"] = same[0] if same else f"{COPIES}/{f'{number}-' if taken else ''}{path.name}"
        record[key] = entry
    return record


def check_same_inputs(inputs: Inputs, run: Path) -> None:
    """Refuse to continue a run with other rewards, tools, prompts, templates or data than it began with.

    Raises:
        ConfigError: A file has changed; the message names it, its key and how to get the former one back.
    """
    then = _read(run)
    lines = []
    for key, entry in inputs.items():
        before = then.get(key)
        if before is None or entry["sha256"] == before["sha256"]:
            continue
        back = f"; as it was: cp {run / before['copy']} {entry['path']}" if "copy" in before else ""
        lines.append(f"  {entry['path']} ({key}){back}")
    if lines:
        raise ConfigError(
            f"{run} began with other files than there are now, so this would be another run:\n"
            + "\n".join(lines)
            + f"\nPut the former files back to resume, or start a new run with run_name=NAME{_from_sft(run)}"
        )


def _from_sft(run: Path) -> str:
    """Advise how a new run takes over the finished SFT of one whose GRPO made no step, or return an empty string."""
    if not RunFolder(run).is_finished("sft") or checkpoints(run / "grpo"):
        return ""
    return f"; from its finished SFT: sft.enabled=false model.name={run / 'sft' / 'final'}"


def changed_since(run: Path) -> list[str]:
    """Return a line for each of the user's files that has changed or is gone; rewards and plugins are the run's copies."""
    uses, reads = (
        "the run uses its copy, {}",
        "what reads it from here on reads another file; as it was: cp {} {}",
    )
    lines = []
    for key, entry in _read(run).items():
        file = Path(entry["path"])
        if "copy" not in entry or (file.is_file() and hash_of(file) == entry["sha256"]):
            continue
        then = uses if key.startswith(("rewards", "plugins")) else reads
        both = (shlex.quote(str(path)) for path in (run / entry["copy"], file))
        lines.append(f"{file} ({key}) has changed or is gone since this run began; {then.format(*both)}")
    return lines


def with_copies(recipe: Recipe, run: Path) -> Recipe:
    """Return a run's recipe with the user's files taken from the run folder, so that it works wherever the folder is."""
    values, record = recipe.model_dump(), _read(run)
    for key, entry in record.items():
        copy = run / entry.get("copy", "/")
        if "copy" not in entry or not copy.resolve().is_relative_to(run.resolve()) or not copy.is_file():
            continue
        node: Any = values
        *above, last = (int(part) if part.isdecimal() else part for part in key.split("."))
        try:
            for part in above:
                node = node[part]
            code = _FUNCTION.fullmatch(node[last])
        except (KeyError, IndexError, TypeError):
            continue
        node[last] = f"{copy}:{code[2]}" if code else str(copy)
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
