"""The Dockerfile and the dev container, step by step in an empty folder: what docker itself and downloads do is left out."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOWNLOADS = "torch-backend"
"""The step that installs torch from the network; here it is installed."""


def steps() -> list[tuple[str, str]]:
    """Return (instruction, rest) for every line of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines]


@pytest.mark.long
def test_the_steps_of_the_dockerfile_make_a_command_that_runs(tmp_path: Path) -> None:
    root = tmp_path / "root"
    site, work = root / "site", root
    pip = {
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    path = f"{site / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        **pip,
        "PATH": path,
        "PYTHONPATH": str(site),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    arguments: dict[str, str] = {}
    downloads = []
    for instruction, rest in steps():
        if instruction == "WORKDIR":
            work = root / rest.lstrip("/")
            work.mkdir(parents=True, exist_ok=True)
        elif instruction == "ARG":
            arguments[rest.partition("=")[0]] = rest.partition("=")[2]
        elif instruction == "COPY" and not rest.startswith("--from"):  # stages share one root here
            *sources, target = rest.split()
            place = root / target.lstrip("/") if target.startswith("/") else work / target
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(
                        ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
                    )
                else:
                    place.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / source, place)
        elif instruction == "RUN":
            if DOWNLOADS in rest:
                downloads.append(rest)
                continue
            command = re.sub(r"(?<![\w/.])/(?=dist|tmp|constraints)", f"{root}/", rest)
            command = command.replace("pip install", f"pip install --target {site}")
            done = subprocess.run(
                ["bash", "-ec", command],
                cwd=work,
                env={**environment, **arguments},
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, f"{rest}\n{done.stdout}\n{done.stderr}"
    assert len(downloads) == 1 and arguments["TORCH"] == "cpu" and "torch-backend=${TORCH}" in downloads[0]
    assert ("ENTRYPOINT", '["algorist"]') in steps()
    shown = subprocess.run(
        [str(site / "bin/algorist"), "--help"], env=environment, capture_output=True, text=True
    )
    assert "Usage: algorist VERB" in shown.stdout


def test_what_the_image_copies_is_not_ignored() -> None:
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    copied = [
        word
        for kind, rest in steps()
        if kind == "COPY" and "--from" not in rest
        for word in rest.split()[:-1]
    ]
    assert set(copied) == kept and all((ROOT / name).exists() for name in kept)


def test_the_dev_container_uses_targets_that_exist() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    make, target = container["postCreateCommand"].split()
    assert make == "make" and re.search(
        rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert "python:3.11" in container["image"]
