"""What all tests share: the command line, the real data, one thread for torch, no network, and Ctrl-C that is heard."""

from __future__ import annotations

import gc
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as the command has it while it imports
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # as the command sets it, so that its processes can be forks
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling algorist takes each process a second
sys.dont_write_bytecode = False
os.environ["PATH"] = (
    f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # as in an activated environment
)
if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 6 << 30:
    # Where a file is synced at once: a small run syncs eighty, which takes a disk a second.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
if not Path("/dev/nvidiactl").exists():  # triton reads it when it is first imported, by whatever library
    os.environ.setdefault("TRITON_INTERPRET", "1")

if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # started in the background of a script; what we start must hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests import warm  # noqa: E402 (it looks at the variables)

SLOW = {"slow", "cuda", "runs"}
"""Folders of whole jobs in real processes, of the pretend GPU, which takes a minute, and of whole runs and commands in this process."""
_frozen_at = {"modules": 0}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of these folders as slow."""
    for item in items:
        if item.path.parent.name in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _libraries_are_no_garbage() -> None:
    """Leave what imports made out of garbage collections: a tiny run asks for four of them, and spent half of its time there."""
    if len(sys.modules) > _frozen_at["modules"] + 100:
        _frozen_at["modules"] = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    """Give back the signals that ``main`` takes, called in this process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@contextmanager
def without_registrations() -> Iterator[None]:
    """Take out again what is registered in this process meanwhile: names, and the keys of extensions."""
    from algorist import declared, user_code
    from algorist.diagnosis.rules import all_rules
    from algorist_grader.registry import Registry

    all_rules()  # which are registered once, when their modules are first imported
    modules = [module for name, module in sys.modules.items() if name.startswith("algorist")]
    things = [thing for module in modules for thing in vars(module).values()]
    registries = list({id(thing): thing for thing in things if isinstance(thing, Registry)}.values())
    for registry in registries:
        registry.names()  # which imports what registers them
    before = [(dict(r._entries), set(r._by_user)) for r in registries]
    owners, plugins = dict(declared._OWNERS), dict(user_code._PLUGINS)
    yield
    user_code._PLUGINS = plugins
    for registry, (entries, by_user) in zip(registries, before, strict=True):
        registry._entries, registry._by_user = entries, by_user
    for name, key in set(declared._OWNERS) - set(owners):
        del declared._OWNERS[name, key]
        del declared._SECTIONS[name][0].__pydantic_fields__[key]
        for section in declared._SECTIONS[name]:
            section.model_rebuild(force=True)


@pytest.fixture
def registrations_undone() -> Iterator[None]:
    """Take out again what a test registers in this process."""
    with without_registrations():
        yield


@pytest.fixture(scope="module")
def registrations_undone_after_all() -> Iterator[None]:
    """Take out again what the tests of a file register in this process."""
    with without_registrations():
        yield


def pytest_sessionfinish() -> None:
    """Let the interpreter clean up after the libraries, too, and take away the warm Python's folder."""
    gc.unfreeze()
    warm.close()


Cli = Callable[..., subprocess.CompletedProcess[str]]
Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run ``algorist`` in a process and folder of the test's own; stdout and stderr are captured."""

    def call(*arguments: str, stdin: str = "", timeout: float = 240) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [warm.PYTHON, "-m", "algorist.cli.main", *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
        )

    return call


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run ``algorist`` in this process, in the test's own folder: seconds less than ``cli``, which starts Python anew."""
    from algorist.cli.main import main

    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["algorist", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setenv("ALGORIST_DEBUG", "")  # --debug sets it, for this call alone
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(list(arguments), int(stop.value.code or 0), shown.out, shown.err)

    return call


@pytest.fixture
def verb(call: Cli) -> Verb:
    """Run ``algorist`` as ``call`` does: (exit code, standard output, standard error in one line)."""

    def verb(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        done = call(*arguments, stdin=stdin)
        return done.returncode, done.stdout, " ".join(done.stderr.split())

    return verb


@pytest.fixture
def output_of(verb: Verb) -> Callable[..., str]:
    """Run ``algorist`` as ``call`` does; it must succeed. Returns standard output."""

    def output_of(*arguments: str) -> str:
        code, output, errors = verb(*arguments)
        assert code == 0, errors
        return output

    return output_of
