"""The folder of a run: layout, finished stages, environment, and a lock against a second process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from algorist.errors import DAMAGED, CheckpointError
from algorist.store.atomic import replace_text
from algorist.store.redact import redact
from algorist.store.stages import STAGES, checkpoints
from algorist.system import file_lock, is_locked, processor_name

LIBRARIES = (
    "algorist torch transformers trl peft accelerate datasets tokenizers safetensors numpy math-verify sympy vllm deepspeed "
    "bitsandbytes liger-kernel flash-attn unsloth"
).split()


INPUTS = "inputs.json"
"""Key of the recipe → ``path``, ``sha256`` and, where it was copied, ``copy``; in the run folder."""


class RunFolder:
    """One run's folder.

    ``config.yaml`` (resolved recipe), ``inputs.json`` and ``files/`` (the user's files), ``environment.json``, ``training.log``, ``metrics.jsonl``, ``stages.json``
    (finished stages and their results), ``rollouts/*.parquet``, ``sft/``, ``grpo/``, ``eval/``, ``report.html``.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts"
        self.evaluations = self.path / "eval"
        self.report = self.path / "report.html"

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make the folder.

        Raises:
            CheckpointError: It cannot be made.
        """
        try:
            str(Path(path).absolute()).encode()
            for name in ("rollouts", "eval"):
                (Path(path) / name).mkdir(parents=True, exist_ok=True)
        except (OSError, UnicodeEncodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "a name in its path is not UTF-8"
            raise CheckpointError(
                f"cannot make the run folder {Path(path).absolute()}: {reason}; choose another with output_dir=FOLDER"
            ) from None
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run.

        Raises:
            CheckpointError: There is no run; the message names runs nearby.
        """
        path = Path(path)
        if not (path / "config.yaml").is_file():
            beside = path if path.is_dir() else path.parent
            near = sorted(p.parent.name for p in beside.glob("*/config.yaml"))[:5] if beside.is_dir() else []
            others = f"; runs in {beside}: {', '.join(near)}" if near else ""
            raise CheckpointError(f"{path} is not a run folder (config.yaml is missing){others}")
        return cls(path)

    def has_begun(self) -> bool:
        """Return whether there is something to keep: a step, a checkpoint, a finished stage, or what was drawn or evaluated before any.

        A run that failed in the first batch of a stage has none and may be started anew, with its file corrected.
        """
        if (self.path / "stages.json").exists() or any(checkpoints(self.path / s) for s in STAGES):
            return True
        if self.metrics.exists() and any(b'"step": 0,' not in line for line in self.metrics.open("rb")):
            return True
        failed = any((self.path / stage).exists() for stage in STAGES)
        return not failed and any(any((self.path / name).glob("*")) for name in ("rollouts", "eval"))

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the run whole or not at all, as it is: it is read back.

        Raises:
            CheckpointError: ``name`` leads out of the folder, or the disk refuses.
        """
        target = self.inside(name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make {target.parent}: {error.strerror}") from None
        replace_text(target, text)

    def write_json(self, name: str, content: Any) -> None:
        """Write ``content`` as JSON whole or not at all."""
        self.write_text(name, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")

    def read_json(self, name: str) -> Any:
        """Return a JSON file of the run, or None when it is missing.

        Raises:
            CheckpointError: It is damaged.
        """
        file = self.inside(name)
        if not file.is_file():
            return None
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except DAMAGED as error:
            raise CheckpointError(f"{file} is damaged ({error}); move it away or start a new run") from None

    def inside(self, name: str) -> Path:
        """Return the path of ``name`` in this folder.

        Raises:
            CheckpointError: It would lie outside.
        """
        target = self.path / name
        if not target.resolve().is_relative_to(self.path.resolve()):
            raise CheckpointError(f"'{name}' leads out of the run folder {self.path}")
        return target

    def write_environment(self, *, seed: int) -> None:
        """Write ``environment.json``: versions, hardware, git commit, command, seed."""
        self.write_json("environment.json", environment() | {"seed": seed})

    def command(self) -> list[str]:
        """Return the words of the command that began the run; an empty list where it is not known."""
        return shlex.split(str((self.read_json("environment.json") or {}).get("command") or ""))

    def keep_inputs(self, inputs: dict[str, dict[str, str]]) -> None:
        """Copy the files that have a place for a ``copy``, and write ``inputs.json``.

        Raises:
            CheckpointError: The disk refuses.
        """
        for entry in inputs.values():
            if "copy" in entry:
                target = self.path / entry["copy"]
                try:
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(entry["path"], target)
                except OSError as error:
                    raise CheckpointError(
                        f"cannot copy {entry['path']} into {target.parent}: {error.strerror or error}"
                    ) from None
        self.write_json(INPUTS, inputs)

    def keep(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Read the file ``name``; where it does not exist yet, ``make`` its content and write it."""
        content = self.read_json(name)
        if not isinstance(content, dict):
            content = make()
            self.write_json(name, content)
        return content

    def differences(self) -> list[str]:
        """List the differences of a continued run, a line each.

        Raises:
            CheckpointError: A file that the end of the run reads is damaged.
        """
        for file in (self.path / "environment.json", *self.evaluations.glob("*.json")):
            if not isinstance(self.read_json(str(file.relative_to(self.path))) or {}, dict):
                raise CheckpointError(f"{file} is damaged; move it away")
        then = (self.read_json("environment.json") or {}).get("versions") or {}
        lines = [
            f"{name} was {then[name]} when the run began and is {version} now: it continues, but not to the bit"
            for name, version in _versions().items()
            if name in ("torch", "transformers", "peft", "numpy") and then.get(name, version) != version
        ]
        saved = [stage for stage in STAGES if checkpoints(self.path / stage)]
        if saved and not self.metrics.is_file():
            lines.append(f"{self.metrics.name} is missing: curves and report begin at the checkpoint")
        if "grpo" in saved and not any(self.rollouts.glob("*.parquet")):
            lines.append("rollouts/ is empty: what was sampled before is lost")
        return lines

    def stages(self) -> dict[str, Any]:
        """Return finished stages and their results, in the order they were finished."""
        record = self.read_json("stages.json")
        if record is not None and not isinstance(record, dict):
            raise CheckpointError(f"{self.path / 'stages.json'} is damaged; expected an object of stages")
        return record or {}

    def is_finished(self, stage: str) -> bool:
        """Return whether a stage is finished."""
        return stage in self.stages()

    def finish(self, stage: str, result: dict[str, Any]) -> None:
        """Record a stage as finished."""
        self.write_json("stages.json", self.stages() | {stage: result})

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder; the system lets go when the process ends, however it ends.

        Raises:
            CheckpointError: Another process holds it; the message names its pid.
        """
        with ExitStack() as stack:
            try:
                holder = stack.enter_context(file_lock(self.path / ".lock"))
            except OSError as error:
                raise CheckpointError(f"cannot write in {self.path}: {error.strerror}") from None
            if holder is not None:
                raise CheckpointError(
                    f"{self.path} is in use by process {holder}; wait for it, or take another name: run_name=NAME"
                )
            yield

    def is_running(self) -> bool:
        """Return whether a process holds the folder."""
        return is_locked(self.path / ".lock")


def environment() -> dict[str, Any]:
    """Return versions, hardware, git commit and command of this process; secrets are left out.

    torch is asked for its devices only where it is loaded already.
    """
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "devices": _devices(),
        "versions": _versions(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changed_files": None if changed is None else len(changed.splitlines()),
        "command": redact(shlex.join(["algorist", *sys.argv[1:]])),
        "folder": str(Path.cwd()),
    }


def started_as() -> str:
    """Return one line about this process for the log: command, versions, machine."""
    record = environment()
    versions = ", ".join(
        f"{name} {record['versions'][name]}" for name in LIBRARIES[:4] if name in record["versions"]
    )
    return f"{record['command']} · {versions} · Python {record['python']} · {record['cores']} cores, {record['processor']}"


@cache
def _versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _devices() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, timeout=10, cwd=Path.cwd()
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
