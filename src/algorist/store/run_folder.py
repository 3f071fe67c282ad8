"""The folder of a run: layout, finished stages, environment, and a lock against a second process."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from algorist.errors import CheckpointError

LIBRARIES = ("algorist", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "math-verify", "sympy")


class RunFolder:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make the folder.

        Raises:
            CheckpointError: It cannot be made.
        """
        try:
            for name in ("rollouts", "eval"):
                (Path(path) / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the run folder {path}: {error}; choose another with output_dir=FOLDER") from None
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run."""
        if not (Path(path) / "config.yaml").is_file():
            raise CheckpointError(f"{path} is not a run folder (config.yaml is missing)")
        return cls(path)

    def write_text(self, name: str, text: str) -> None:
        """Write a file whole or not at all."""
        target = self.path / name
        partial = target.with_name(target.name + ".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)

    def write_environment(self, *, seed: int) -> None:
        """Write ``environment.json``: versions, hardware, git commit, command, seed."""
        self.write_text("environment.json", json.dumps(environment() | {"seed": seed}, indent=2))

    def stages(self) -> dict[str, Any]:
        """Return finished stages and their results."""
        file = self.path / "stages.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def is_finished(self, stage: str) -> bool:
        """Tell whether a stage is finished."""
        return stage in self.stages()

    def finish(self, stage: str, result: dict[str, Any]) -> None:
        """Record a stage as finished."""
        self.write_text("stages.json", json.dumps(self.stages() | {stage: result}, indent=2))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder.

        Raises:
            CheckpointError: Another process holds it.
        """
        with (self.path / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise CheckpointError(
                    f"{self.path} is in use by process {file.read().strip() or '?'}; wait for it, or take another run_name"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


def environment() -> dict[str, Any]:
    """Return versions, hardware, git commit and command of this process."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "versions": versions,
        "git_commit": commit or None,
        "command": sys.argv,
    }
