"""The recipe of a run folder: how it was begun, what may change before it continues, and the files that it names.

What the user wrote is copied into the run, data is hashed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from algorist.config.explain import to_yaml
from algorist.config.load import code_in, plugins_of, read_recipe_file, validate
from algorist.config.schema import GRPOSection, Recipe
from algorist.config.yaml_text import leaves, read_yaml
from algorist.errors import DAMAGED, CheckpointError, ConfigError
from algorist.store.run_folder import INPUTS, RunFolder
from algorist.store.safe_text import printable
from algorist.store.stages import STAGES, checkpoints
from algorist.store.trust import refuse_foreign_code, sign
from algorist.user_code import load_plugins


def run_path(recipe: Recipe) -> Path:
    """Return the folder of a recipe's run.

    Raises:
        ConfigError: The run's name is no plain folder name, so that it would lie outside ``output_dir``.
    """
    name = recipe.run_name or recipe.name
    if (
        name in (".", "..")
        or any(c in "/\\" or not c.isprintable() for c in name)
        or len(name.encode()) > 200
    ):
        raise ConfigError(
            f"run_name is '{printable(name[:80])}'; expected a plain folder name of at most 200 bytes, such as run_name=first; "
            "another place is output_dir=FOLDER"
        )
    return Path(recipe.output_dir) / name


def values_of(run: Path) -> dict[str, Any]:
    """Return what the ``config.yaml`` of a run says.

    Raises:
        CheckpointError: The folder is not a run, or the file is damaged.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise CheckpointError(f"{run} is not a run folder (config.yaml is missing); runs lie under runs/")
    try:
        values = read_yaml(read_recipe_file(file), str(file))
    except ConfigError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} is damaged: expected sections, found {type(values).__name__}")
    return values


def load_run_recipe(run: Path, *, runs: str = "nothing") -> Recipe:
    """Return the recipe that a run folder was made with; the user's files (rewards, prompt, template) are the folder's copies.

    Args:
        run: The folder.
        runs: What the caller will run of the code that the recipe names: ``nothing``, that of the ``model``, or ``all``.

    Raises:
        CheckpointError: The folder is not a run, or its ``config.yaml`` is damaged.
        ConfigError: Its settings are not those of this version, or it is from elsewhere and names such code.
    """
    values = values_of(run)
    if runs != "nothing":
        refuse_foreign_code(run, code_in(values, model_only=runs == "model"))
    if plugins := plugins_of(values):  # without them their keys are unknown, whatever the caller will run
        refuse_foreign_code(run, [f"plugins={', '.join(plugins)}"])
        load_plugins(copies_of(run, "plugins", plugins))
    return with_copies(validate(values, where=str(run / "config.yaml")), run)


def begun(recipe: Recipe, *, resume: bool) -> dict[str, Any] | None:
    """Return what the run to continue began with, by dotted key, or None for a run that begins; nothing is written.

    Raises:
        CheckpointError: The folder holds a run that is not to be continued, or none where one is.
        ConfigError: The recipe differs from the folder's in a way that would make another run.
    """
    path = run_path(recipe)
    known = (path / "config.yaml").exists()
    if not resume:
        refuse_begun(RunFolder(path))
        return None
    if not known:
        raise CheckpointError(f"nothing to resume: {path} holds no run (config.yaml is missing)")
    before = flat(values_of(path))
    check_same_run(before, _as_begun(recipe, before), path)
    check_same_inputs(recipe, path)
    for stage in filter(RunFolder(path).is_finished, STAGES):
        for name in ("max_steps", "epochs"):  # ``config.yaml`` would say what was not done
            was, now = before.get(f"{stage}.{name}"), getattr(getattr(recipe, stage), name)
            if was != now:
                raise ConfigError(
                    f"{stage}.{name} is {now}, but {path} has finished {stage} with {was}. Leave it as it was, or "
                    f"train on in a new run: run_name=NAME model.name={path / stage / 'final'}"
                )
    return before


def _as_begun(recipe: Recipe, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe by dotted key, as the run would have begun with it: its processes, its rule for the adapter."""
    lora = recipe.model.lora
    if lora is not None and lora.in_several_processes == "off" and not _has_adapter(before):
        recipe = without_adapter(recipe)
    now = flat(yaml.safe_load(to_yaml(recipe))) | {"grpo.processes": before.get("grpo.processes")}
    rule = "model.lora.in_several_processes"
    return now | ({rule: before[rule]} if rule in now and rule in before else {})


def _has_adapter(before: Mapping[str, Any]) -> bool:
    return before.get("model.lora", ()) is not None


def check_same_run(before: Mapping[str, Any], after: Mapping[str, Any], path: Path) -> None:
    """Allow changes of length, logging and naming; refuse what would make the resumed run another run.

    Args:
        before: What the run began with, by dotted key.
        after: The same of the recipe as it resolves now.
        path: The run folder, for the message.

    Raises:
        ConfigError: Settings differ that decide what is learned; the message names them with both values.
    """
    free = "sft.max_steps sft.epochs grpo.max_steps grpo.epochs report_to tracking hub description".split()
    free_last = "logging_steps save_steps save_total_limit eval_every samples_every".split()
    changed = [
        key
        for key in sorted(set(before) | set(after))
        if before.get(key) != after.get(key)
        and not key.startswith((*free, "eval.", "output_dir", "run_name"))
        and key.rpartition(".")[2] not in free_last
    ]
    if changed:
        lines = "\n".join(
            f"  {key}: {before.get(key)!r} in the run, {after.get(key)!r} now" for key in changed[:8]
        )
        raise ConfigError(
            f"{path} was started with other settings, so this would be another run:\n{lines}\n"
            "Use the same values to resume, or start a new run with run_name=NAME"
        )


def flat(value: Any) -> dict[str, Any]:
    """Return nested keys as dotted ones."""
    return {key: inner for key, inner in leaves(value, lists=False) if inner != {}}


COPIES = "files"
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


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


def inputs_of(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Return what ``inputs.json`` says of every file that a recipe names; what the user wrote has a place for its ``copy``."""
    record = {key: {"path": str(path), "sha256": hash_of(path)} for key, path in data_files(recipe).items()}
    for number, (key, path) in enumerate(written_files(recipe).items()):
        entry = {"path": str(path), "sha256": hash_of(path)}
        same = [e["copy"] for e in record.values() if "copy" in e and e["sha256"] == entry["sha256"]]
        taken = any(e.get("copy") == f"{COPIES}/{path.name}" for e in record.values())
        entry["copy"] = same[0] if same else f"{COPIES}/{f'{number}-' if taken else ''}{path.name}"
        record[key] = entry
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
            + f"\nPut the former files back to resume, or start a new run with run_name=NAME{_from_sft(run)}"
        )


def _from_sft(run: Path) -> str:
    """Return how a new run takes over the finished SFT of one whose GRPO made no step, or an empty string."""
    if not RunFolder(run).is_finished("sft") or checkpoints(run / "grpo"):
        return ""
    return f"; from its finished SFT: sft.enabled=false model.name={run / 'sft' / 'final'}"


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
        *above, last = (int(part) if part.isdecimal() else part for part in key.split("."))
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


# ---- the recipe as this run does it


def with_processes(recipe: Recipe, count: int) -> Recipe:
    """Return the recipe as ``count`` processes run it.

    Raises:
        ConfigError: Their batches together do not hold whole groups.
    """
    if recipe.grpo.processes == count:
        return recipe
    try:
        GRPOSection.model_validate(recipe.grpo.model_dump() | {"processes": count})
    except ValidationError as error:
        raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    return in_processes(recipe, count)


def in_processes(recipe: Recipe, count: int) -> Recipe:
    """Return the recipe with ``grpo.processes``."""
    return recipe.model_copy(update={"grpo": recipe.grpo.model_copy(update={"processes": count})})


def why_no_adapter(recipe: Recipe, before: Mapping[str, Any] | None, processes: int) -> str:
    """Return why this run trains all weights though its recipe has an adapter, or an empty string.

    ``model.lora.in_several_processes: off`` is decided when a run begins; a continued run keeps what it began with (``before``),
    whatever the number of processes is now.
    """
    lora = recipe.model.lora
    if lora is None or lora.in_several_processes == "keep":
        return ""
    if before is not None and not _has_adapter(before):
        return "this run began without the recipe's LoRA adapter and continues without it: all weights are trained"
    if before is not None or processes == 1:
        return ""
    return (
        f"the run has {processes} processes, so its LoRA adapter is left out and all weights are trained, as "
        "model.lora.in_several_processes=off asks; to keep the adapter: model.lora.in_several_processes=keep"
    )


def without_adapter(recipe: Recipe) -> Recipe:
    """Return the recipe with ``model.lora`` null."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": None})})


def why_from_the_model(recipe: Recipe, stages: Sequence[str]) -> str:
    """Return why GRPO starts without the recipe's SFT, or an empty string: the caller skips it and the folder has none."""
    path = run_path(recipe)
    folder = RunFolder(path)
    skipped = recipe.sft.enabled and "sft" not in stages
    trains = recipe.grpo.enabled and "grpo" in stages and not folder.is_finished("grpo")
    named = "sft" not in stages and Path(recipe.model.name).exists()  # a model of the user's own
    if not (skipped and trains) or folder.is_finished("sft") or named:
        return ""
    return (
        f"SFT is skipped and {folder.path} has no finished SFT stage, so GRPO starts from {recipe.model.name} as it is. To do "
        "SFT first: leave --only out, or algorist run RECIPE --only sft, then algorist run RECIPE --only grpo --resume. If "
        "nothing is to be learned from demonstrations: sft.enabled=false"
    )


@contextmanager
def hold_folder(recipe: Recipe, *, resume: bool) -> Iterator[RunFolder]:
    """Make the run folder, or open it to resume, and hold it against other processes; only then is it looked into and written.

    Raises:
        CheckpointError: Another process holds it, or one has made a run of it meanwhile.
    """
    path = run_path(recipe)
    folder = RunFolder.open(path) if resume else RunFolder.create(path)
    with folder.lock():
        if not resume:
            refuse_begun(folder)
            folder.write_environment(seed=recipe.seed)
            folder.keep_inputs(inputs_of(recipe))
        folder.write_text("config.yaml", to_yaml(recipe))
        sign(folder.path)
        yield folder


def refuse_begun(folder: RunFolder) -> None:
    """Refuse to begin a run in a folder that holds one (CheckpointError)."""
    if folder.config.exists() and folder.has_begun():
        raise CheckpointError(
            f"{folder.path} already holds a run. Continue it with --resume, or take another name: run_name={folder.path.name}-2"
        )
