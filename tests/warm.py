"""``PYTHON``: a Python whose imports are done. Torch, transformers and algorist are imported once, and each command is a fork.

A process that imports them anew takes eight seconds of a processor. The fork has its own arguments, folder, environment,
standard streams, signals and exit code, and ends as any process does. A command whose variables differ where libraries
read them when they are imported, or with options other than ``-u -m -c``, runs in ``sys.executable`` by itself; so must a
test that is about imports, about the memory of a fresh process, or about the processes below the one that it starts.
With ``BARE`` the libraries are imported and algorist is not: for tests that bring an algorist of their own by PYTHONPATH.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import time
import zlib
from pathlib import Path

FOLDER = "ALGORIST_WARM"
NESTED = "ALGORIST_WARM_NESTED"
"""With it the commands that a command starts are forks, too."""
OWN = "ALGORIST_WARM_OWN"
"""With it commands whose variables differ have a server of their own: of use where several share them."""
BARE = "ALGORIST_WARM_BARE"
READ_WHEN_IMPORTED = (
    "HF_", "PYTHON", "LANG", "LC_", "LD_", "OMP_", "TRITON_", "CUDA_", "DS_",
)  # fmt: skip
IMPORTED = (
    "algorist.runs.pipeline",
    "algorist.training.grpo_setup",
    "torch.distributed.run",
    "accelerate.commands.launch",
)


READ_LATER = {"PYTHON_EXEC"}
LIBRARIES = (
    "torch", "transformers.trainer", "transformers.models.qwen2.modeling_qwen2", "peft", "accelerate", "datasets",
    "sympy", "duckdb", "pydantic", "yaml", "typer", "rich.console",
)  # fmt: skip


def folder() -> str:
    """Return the folder of this test session's server, in which ``python`` lies; made where there is none."""
    import tempfile

    if FOLDER not in os.environ:
        path = Path(tempfile.mkdtemp(prefix="algorist-warm-"))
        (path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{__file__}" "$@"\n')
        (path / "python").chmod(0o755)
        (path / "algorist").symlink_to(Path(sys.executable).with_name("algorist"))
        (path / "start.json").write_text(json.dumps({"owner": os.getpid(), "deciding": _deciding()}))
        os.environ[FOLDER] = str(path)
    return os.environ[FOLDER]


def close() -> None:
    """Remove the folder, in the process that made it."""
    import shutil

    place = Path(os.environ[FOLDER])
    with contextlib.suppress(OSError):
        if json.loads((place / "start.json").read_text(encoding="utf-8"))["owner"] == os.getpid():
            shutil.rmtree(place, ignore_errors=True)


def _deciding() -> dict[str, str]:
    later = READ_LATER | ({"PYTHONPATH"} if BARE in os.environ else set())
    return {k: v for k, v in os.environ.items() if k.startswith(READ_WHEN_IMPORTED) and k not in later}


def main() -> None:
    """Ask the server for a fork that does what ``python ARGUMENTS`` does; pass signals on and end as it ends."""
    import signal

    words = sys.argv[1:]
    place = os.environ.get(FOLDER, "")
    first = [word for word in words[:2] if word != "-u"][:1]
    try:
        start = json.loads(Path(place, "start.json").read_text(encoding="utf-8"))
        known = first and (first[0] in ("-m", "-c") or not first[0].startswith("-"))
        same = _deciding() == start["deciding"]
        several = OWN in os.environ
    except OSError:
        known = False
    if not known or not (same or several):
        os.execv(sys.executable, [sys.executable, *words])

    early: list[int] = []
    child = 0

    def pass_on(number: int, _: object) -> None:
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        else:
            early.append(number)

    passed = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]
    ignored = [int(n) for n in passed if signal.getsignal(n) == signal.SIG_IGN]
    for number in passed:
        signal.signal(number, pass_on)
    own = zlib.crc32(json.dumps(sorted(_deciding().items())).encode())
    kind = "bare" if BARE in os.environ else "socket"
    connection = _connect(place, kind if same else f"{kind}-{own}")
    asked = {"words": words, "folder": str(Path.cwd()), "environment": dict(os.environ), "ignored": ignored}
    text = json.dumps(asked).encode()
    streams = array.array("i", [0, 1, 2])
    connection.sendmsg(
        [struct.pack("!I", len(text))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams.tobytes())]
    )
    connection.sendall(text)
    child = struct.unpack("!i", _exactly(connection, 4))[0]
    for number in early:
        pass_on(number, None)
    code = struct.unpack("!i", _exactly(connection, 4))[0]
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _connect(place: str, name: str) -> socket.socket:
    """Return a connection to the server of that name; the first to ask starts it."""
    connection = socket.socket(socket.AF_UNIX)
    with Path(place, f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(f"{place}/{name}")
        except OSError:
            import subprocess

            later = {"PYTHONPATH"} if name.startswith("bare") else set()  # each fork has its own
            environment = {key: value for key, value in os.environ.items() if key not in later}
            with Path(place, f"{name}.log").open("w") as log:
                server = subprocess.Popen(
                    [sys.executable, __file__, "--serve", place, name],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/", env=environment,
                )  # fmt: skip
            while server.poll() is None:
                try:
                    connection.connect(f"{place}/{name}")
                    break
                except OSError:
                    time.sleep(0.02)
    return connection


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise SystemExit("tests/warm.py: the server ended")
        data += more
    return data


def serve(place: str, name: str) -> None:
    """Import everything, then fork for each who asks, until the test session ends; returns in the forks, ready to run."""
    import gc
    import select
    import shutil
    import signal

    before = set(os.environ)
    if name.startswith("bare"):
        for module in LIBRARIES:
            __import__(module)
    else:
        from algorist.cli.session import import_quietly

        for module in IMPORTED:
            import_quietly(module)
    set_by_imports = {k: os.environ[k] for k in os.environ if k not in before}
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    owner = os.pidfd_open(json.loads(Path(place, "start.json").read_text(encoding="utf-8"))["owner"])
    heard, hear = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(hear)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, tuple[socket.socket, int]] = {}
    listener.bind(f"{place}/{name}")
    listener.listen(64)
    while True:
        ready, _, _ = select.select([listener, owner, heard, *clients], [], [])
        if owner in ready:
            for _, child in clients.values():
                os.kill(child, signal.SIGKILL)
            shutil.rmtree(place, ignore_errors=True)
            os._exit(0)
        if heard in ready:
            os.read(heard, 4096)
            ended = {}
            while clients:
                child, status = os.waitpid(-1, os.WNOHANG)
                if not child:
                    break
                ended[child] = os.waitstatus_to_exitcode(status)
                if len(ended) == len(clients):
                    break
            for handle, (connection, child) in list(clients.items()):
                if child in ended:
                    with contextlib.suppress(OSError):
                        connection.sendall(struct.pack("!i", ended[child]))
                    connection.close()
                    del clients[handle]
        for handle in [handle for handle in ready if handle in clients]:  # a client that is gone
            os.kill(clients[handle][1], signal.SIGKILL)
        if listener in ready:
            connection, _ = listener.accept()
            length, streams = _asked(connection)
            asked = json.loads(_exactly(connection, length))
            child = os.fork()
            if not child:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                    signal.signal(number, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for number in asked["ignored"]:
                    signal.signal(number, signal.SIG_IGN)
                os.setsid()
                for handle, stream in enumerate(streams):
                    os.dup2(stream, handle)
                for handle in (*streams, owner, heard, hear):
                    os.close(handle)
                for other in (listener, connection, *(c for c, _ in clients.values())):
                    other.close()
                _become(asked, set_by_imports)
                return
            for stream in streams:
                os.close(stream)
            connection.sendall(struct.pack("!i", child))
            clients[connection.fileno()] = (connection, child)


def _asked(connection: socket.socket) -> tuple[int, list[int]]:
    """Return the length of what comes, and the three streams that came with it."""
    room = socket.CMSG_SPACE(3 * array.array("i").itemsize)
    data, extra, _, _ = connection.recvmsg(4, room)
    streams = array.array("i")
    for _, _, value in extra:
        streams.frombytes(value)
    return struct.unpack("!I", data)[0], list(streams)


def _become(asked: dict[str, object], set_by_imports: dict[str, str]) -> None:
    """Take over folder, environment and arguments."""
    os.chdir(str(asked["folder"]))
    environment: dict[str, str] = asked["environment"]  # type: ignore[assignment]
    os.environ.clear()
    os.environ.update(set_by_imports | environment)
    if NESTED in os.environ:
        sys.executable = f"{os.environ[FOLDER]}/python"
        os.environ["PYTHON_EXEC"] = sys.executable  # torchrun's
    if BARE in os.environ:
        sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    for stream, handle in ((sys.stdout, 1), (sys.stderr, 2)):
        terminal = os.isatty(handle)
        stream.reconfigure(line_buffering=terminal or handle == 2)  # type: ignore[union-attr]
    sys.argv = list(asked["words"])  # type: ignore[call-overload]


def run() -> None:
    """Do what ``python`` does with ``sys.argv``."""
    import runpy
    import types

    words = [word for word in sys.argv if word != "-u"] if sys.argv[0] == "-u" else sys.argv
    kind, rest = words[0], words[1:]
    if kind == "-m":
        for name in (rest[0], f"{rest[0]}.__main__"):
            sys.modules.pop(name, None)
        sys.argv, sys.path[0] = rest, str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv, sys.path[0] = words, str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


def end(code: int) -> None:
    """End as a process does, but for taking apart what was imported, which takes two seconds of a processor."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def life() -> None:
    """Run and end."""
    import signal
    import traceback

    code = 0
    try:
        run()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    end(code & 255)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:4])
        life()
    else:
        main()
else:
    PYTHON = f"{folder()}/python"
