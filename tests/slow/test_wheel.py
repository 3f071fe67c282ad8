"""The wheel holds what a run needs, and works from a folder that is not the source tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def call(*command: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


GRADER = ROOT / "packages/grader"


@pytest.fixture(scope="module")
def grader_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The grader's wheel, of a copy too."""
    copy, out = tmp_path_factory.mktemp("grader") / "grader", tmp_path_factory.mktemp("grader_wheel")
    shutil.copytree(GRADER, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    call(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(copy), folder=out)
    (built,) = out.glob("algorist_grader-*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree: the build writes beside the sources."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "constraints.txt"):
        shutil.copy2(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    frontend = find_spec("build")
    if (
        frontend is not None and frontend.origin is not None
    ):  # no folder of that name; the source distribution first, then the wheel from it, as for a release
        call(sys.executable, "-m", "build", "--no-isolation", "-o", str(out), str(copy), folder=out)
    else:
        call(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(copy), folder=out)
    (built,) = out.glob("algorist-*.whl")
    return built


@pytest.mark.long
def test_the_source_distribution_has_what_a_build_needs(wheel: Path) -> None:
    sources = [*wheel.parent.glob("algorist-*.tar.gz")]
    if not sources:
        pytest.skip("build is not installed; try: pip install build")
    with tarfile.open(sources[0]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"} <= inside
    tree = {str(p.relative_to(ROOT)) for p in (ROOT / "src" / "algorist").rglob("*") if p.is_file()}
    assert {name for name in tree if "__pycache__" not in name} <= inside


def test_one_version(wheel: Path) -> None:
    from algorist import __version__

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == __version__ == wheel.name.split("-")[1]
    grader = tomllib.loads((GRADER / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"algorist-grader=={grader['version']}" in project["dependencies"]
    assert grader["version"] == __version__


@pytest.fixture(scope="module")
def site(wheel: Path, grader_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the installed wheels."""
    folder = tmp_path_factory.mktemp("site")
    call(
        *PIP,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder),
        str(wheel),
        str(grader_wheel),
        folder=folder,
    )
    return folder


def test_the_grader_alone_grades_without_torch(grader_wheel: Path, tmp_path: Path) -> None:
    """Beside its wheel nothing can be imported but what its metadata requires."""
    site = tmp_path / "site"
    call(
        *PIP,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(grader_wheel),
        folder=tmp_path,
    )
    (metadata,) = site.glob("algorist_grader-*.dist-info/METADATA")
    required = re.findall(
        r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert required == ["mpmath", "psutil"]
    for name in [*required, "gmpy2"]:
        if (spec := find_spec(name)) is not None and spec.submodule_search_locations:
            (site / name).symlink_to(spec.submodule_search_locations[0])
    code = (
        "import sys; from algorist_grader import grade\n"
        "assert not {'torch', 'transformers', 'pydantic', 'numpy', 'mpmath', 'sympy'} & set(sys.modules)\n"
        "assert grade('0.5', '1/2').correct\n"
        r"slow = grade(r'\sqrt{5+2\sqrt{6}}', r'\sqrt2+\sqrt3')"
        "\n"
        "assert slow.correct and slow.reason == 'equal_symbolic', slow\n"
    )
    call(sys.executable, "-S", "-c", code, folder=tmp_path, PYTHONPATH=str(site))
    shown = call(str(site / "bin/grade"), r"\frac{2}{4}", "0.5", folder=tmp_path, PYTHONPATH=str(site))
    assert shown.startswith("right: equal_number")


def test_every_file_of_the_package_is_inside(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("algorist/")}
        metadata = next(n for n in archive.namelist() if n.endswith("METADATA"))
        text = archive.read(metadata).decode()
    tree = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src" / "algorist").rglob("*") if p.is_file()}
    assert {name for name in tree if "__pycache__" not in name} == inside
    assert {
        "algorist/py.typed",
        "algorist/recipes/quickstart.yaml",
        "algorist/report/report.html.j2",
    } <= inside
    assert "Requires-Dist: trl<1.17,>=1.16" in text and "Requires-Python: >=3.11" in text


def test_it_runs_from_an_empty_folder(site: Path, tmp_path: Path) -> None:
    def algorist(*arguments: str) -> str:
        command = (sys.executable, "-m", "algorist.cli.main", *arguments)
        return call(*command, folder=tmp_path, PYTHONPATH=str(site), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

    told = call(
        sys.executable,
        "-c",
        "import algorist; print(algorist.__file__)",
        folder=tmp_path,
        PYTHONPATH=str(site),
    )
    assert Path(told.strip()).is_relative_to(site), "this is not the installed wheel"
    recipes = ROOT / "src" / "algorist" / "recipes"
    shipped = {p.relative_to(recipes).with_suffix("").as_posix() for p in recipes.rglob("*.yaml")}
    assert {line.split()[0] for line in algorist("recipes", "list").splitlines()} == shipped | {"name"}
    assert "max_steps: 120" in algorist("recipes", "show", "quickstart")
    shown = algorist("run", "smoke-cpu")
    assert "report" in shown and (tmp_path / "runs" / "smoke-cpu" / "report.html").is_file()


def test_the_command_is_installed(site: Path) -> None:
    entry = next(site.glob("algorist-*.dist-info")) / "entry_points.txt"
    assert "algorist = algorist.cli.main:main" in entry.read_text(encoding="utf-8")
