"""What is installed, in processes of their own: dependencies, TensorFlow kept out, doctor's report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own; the deciding variables are those given."""
    unset = ("TRANSFORMERS_NO_TF", "TRANSFORMERS_NO_TENSORFLOW", "USE_TF")
    base = {k: v for k, v in os.environ.items() if k not in unset}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**base, "OMP_NUM_THREADS": "1", **environment},
    )


ROOT = Path(__file__).resolve().parents[2]


def _below(version: str) -> str:
    major, minor = version.split(".")
    return f"{major}.{int(minor) - 1}.9"


def test_installed_with_the_stated_dependencies() -> None:
    direct = importlib.metadata.distribution("algorist").read_text("direct_url.json")
    assert direct is not None and json.loads(direct)["dir_info"]["editable"]  # as make test installs it
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {
        r.name: r.specifier
        for r in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["wandb"]])
    }
    for name, least in (("datasets", "2.18"), ("transformers", "4.38"), ("wandb", "0.16")):
        assert not asked[name].contains(_below(least)), name
    assert project["requires-python"] == ">=3.11"


@pytest.mark.parametrize(("given", "expected"), [({}, "1 1 0"), ({"USE_TF": "1"}, "1 1 1")])
def test_tensorflow_is_kept_out_unless_asked_for(given: dict[str, str], expected: str) -> None:
    code = (
        "import os, algorist; "
        "print(*(os.environ[n] for n in ('TRANSFORMERS_NO_TF', 'TRANSFORMERS_NO_TENSORFLOW', 'USE_TF')))"
    )
    done = python("-c", code, **given)
    assert done.stdout.split() == expected.split(), done.stderr


@pytest.mark.long
def test_doctor_reports_versions_devices_and_a_broken_vllm(tmp_path: Path) -> None:
    command = ("-m", "algorist.cli.main", "doctor", "--json", "--no-hub")
    found = json.loads(python(*command).stdout)
    assert found["versions"]["transformers"] and found["versions"]["python"]
    here = (
        f"{torch.cuda.device_count()} × " if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores, "
    )
    assert here in found["device"]
    assert "GiB free" in found["disk"]
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.12: not found')\n")
    (tmp_path / "vllm-0.17.0.dist-info").mkdir()
    (tmp_path / "vllm-0.17.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.17.0\n"
    )
    broken = python(*command, PYTHONPATH=str(tmp_path))
    told = json.loads(broken.stdout)
    assert broken.returncode == 1 and "libcudart" in told["vllm"]
    assert any("install vllm first, then algorist" in text for text in told["problems"])


@pytest.mark.parametrize(
    ("version", "fits"), [("0.21.0", False), pytest.param("0.22.0", True, marks=pytest.mark.long)]
)
def test_doctor_reports_a_vllm_that_imports_but_is_too_old(tmp_path: Path, version: str, fits: bool) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(f"__version__ = '{version}'\n")
    (tmp_path / f"vllm-{version}.dist-info").mkdir()
    (tmp_path / f"vllm-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)

    done = python("-m", "algorist.cli.main", "doctor", "--json", "--no-hub")
    found = json.loads(done.stdout)
    problems = [text for text in found["problems"] if version in text]
    if fits:
        assert found["vllm"] == f"{version} imports" and problems == []
    else:
        assert found["vllm"] == "unfit: vLLM 0.21.0 imports, but algorist works with vLLM >=0.22,<0.33"
        assert done.returncode == 1
        assert len(problems) == 1 and "pip install 'vllm>=0.22,<0.33'" in problems[0]
    warned = python("-c", "from trl.import_utils import is_vllm_available as a; print(a())").stderr
    assert ("TRL currently supports vLLM versions" in warned) != fits  # TRL itself says the same
