"""One killable process: what a reward or a grader's worker may do, and what is left afterwards."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from algorist.errors import ConfigError
from algorist.rewards import build_rewards, user
from algorist_grader import child_process, system
from algorist_grader.child_process import Child
from algorist_grader.workers import Pool, stats

TARGET = """
import json, os, sys, time

def prepare(*arguments):
    def answer(request):
        what = json.loads(request)
        if what == "pid":
            return os.getpid()
        if what in ("print", "die"):
            print("own print", flush=True)
            if what == "die":
                os._exit(7)
        if what == "large":
            return "x" * (20 * 2**20)
        if what == "lies":
            os.write(int(arguments[0]), b"\\xff" * 64)
        if isinstance(what, float):
            time.sleep(what)
        return what if len(request) < 100 else len(request)
    return answer, {"arguments": list(arguments)}
"""


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    (tmp_path / "some_target.py").write_text(TARGET)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    made = Child("some_target:prepare", ["a", "b"])
    yield made
    made.close()


def ask(child: Child, what: Any, timeout_s: float = 20.0) -> Any:
    return child.ask(json.dumps(what).encode(), timeout_s)


def test_a_worker_says_nothing_of_its_own(child: Child) -> None:
    """runpy warned of a module that its own package had imported, on the user's screen."""
    said: list[str] = []
    child.show = said.append
    assert ask(child, "pid").value > 0
    child.close()
    assert "".join(said) == ""


@pytest.mark.parametrize("dies", [False, True])
def test_what_was_printed_before_an_answer_is_shown(
    child: Child, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both have come before this process looks, as on a busy machine."""
    wait = system.Pipes.wait

    def late(pipes: system.Pipes, timeout_s: float) -> Any:
        time.sleep(0.3)
        return wait(pipes, timeout_s)

    said: list[str] = []
    child.show = said.append
    child.start()
    monkeypatch.setattr(system.Pipes, "wait", late)
    assert ask(child, "die" if dies else "print").error == ("crashed" if dies else "")
    assert "".join(said) == "own print\n"


def reward(path: Path, source: str, timeout_s: float = 20.0) -> Any:
    file = path / "mine.py"
    file.write_text("import os, sys, time, signal, subprocess\n" + source)
    return build_rewards([{"name": f"{file}:f", "timeout_s": timeout_s}])[0]


def test_it_answers_and_says_what_it_is(child: Child) -> None:
    assert child.start().value == {"arguments": ["a", "b"]}
    assert [ask(child, n).value for n in (1, "two", [3])] == [1, "two", [3]]


def test_a_late_answer_is_not_taken_for_another_ones(child: Child) -> None:
    """Also when the answer of an earlier request lies in the pipe already."""
    assert ask(child, "first").value == "first"
    process = child._process
    assert process is not None and process.stdin is not None
    body = json.dumps("late").encode()
    os.write(process.stdin.fileno(), child_process.HEAD.pack(77, len(body)) + body)
    assert ask(child, "second").value == "second"


def test_a_timeout_ends_the_process_and_the_next_request_starts_another(child: Child) -> None:
    first = ask(child, "pid").value
    assert ask(child, 60.0, 0.2).error == "timeout"
    assert is_gone(first)
    assert ask(child, "pid").value != first


def test_the_limit_covers_the_write(child: Child) -> None:
    """A stopped worker reads nothing; a request larger than the pipe must not block for ever."""
    os.kill(ask(child, "pid").value, signal.SIGSTOP)
    large = json.dumps("x" * 10_000_000).encode()
    assert child.ask(large, 0.3).error == "timeout"
    assert child.ask(large, 20.0).value == len(large)


def test_an_answer_over_the_limit_is_refused(child: Child) -> None:
    found = ask(child, "large")
    assert found.error == "size" and "bytes" in found.detail
    assert ask(child, 1).value == 1


@pytest.mark.slow
def test_an_answer_that_is_there_counts_however_long_this_process_was_stopped(tmp_path: Path) -> None:
    """SIGSTOP for longer than the limit, then SIGCONT: the answer came in time and is taken."""
    (tmp_path / "some_target.py").write_text(TARGET)
    code = (
        "import json\nfrom algorist_grader.child_process import Child\n"
        "c = Child('some_target:prepare'); c.start(); print('ready', flush=True)\n"
        "print(c.ask(b'0.5', 0.9), flush=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    time.sleep(0.2)
    run.send_signal(signal.SIGSTOP)
    time.sleep(1.3)
    run.send_signal(signal.SIGCONT)
    assert "value=0.5" in run.communicate(timeout=60)[0]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "term", "exit", "thread"])
def test_it_ends_with_its_parent_however_that_ends(tmp_path: Path, end: str) -> None:
    """With all that it started, sessions of their own included."""
    (tmp_path / "mine.py").write_text(
        "import subprocess, pathlib, os, time\n"
        "def f(completion):\n"
        "    other = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    pathlib.Path(completion).write_text(f'{os.getpid()} {os.getppid()} {other.pid}')\n"
        "    while True: pass\n"
    )
    code = (
        "import os, sys, threading, time\nfrom algorist.rewards import build_rewards\n"
        f"r = build_rewards([{{'name': '{tmp_path / 'mine.py'}:f', 'timeout_s': 600}}])[0]\n"
        f"thread = threading.Thread(target=lambda: r(completions=['{tmp_path / 'pids'}']), daemon=True)\n"
        f"thread.start()\nwhile not os.path.exists('{tmp_path / 'pids'}'): time.sleep(0.05)\n"
        f"time.sleep(0.3)\nprint('ready', flush=True)\n"
        + ("os._exit(1)\n" if end == "exit" else "time.sleep(600)\n")
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    if end in ("kill", "thread"):
        run.kill()
    elif end == "term":
        run.terminate()
    run.wait(60)
    until(lambda: all(is_gone(pid) for pid in pids))


def test_a_worker_made_by_a_thread_that_ended_still_works(child: Child) -> None:
    """The kernel's death signal follows the thread; ours follows the process."""
    with ThreadPoolExecutor(1) as threads:
        pid = threads.submit(ask, child, "pid").result().value
    time.sleep(0.7)
    assert ask(child, "pid").value == pid


def test_what_a_reward_starts_ends_with_it(tmp_path: Path) -> None:
    """A grandchild in a session of its own, of a reward that takes too long."""
    told = tmp_path / "pid"
    made = reward(
        tmp_path,
        f"def f(completion):\n    p = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        f"    open('{told}', 'w').write(str(p.pid))\n    time.sleep(600)\n",
        0.5,
    )
    assert made(completions=["x"]) == [0.0]
    until(lambda: is_gone(int(told.read_text())))


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    ["os.killpg(0, signal.SIGKILL)", "os.kill(os.getppid(), signal.SIGKILL)", "os.kill(0, signal.SIGTERM)"],
)
def test_a_reward_that_kills_its_group_hits_only_itself(tmp_path: Path, body: str) -> None:
    made = reward(
        tmp_path, f"def f(completion):\n    if completion == 'die': {body}; time.sleep(60)\n    return 1.0\n"
    )
    assert made(completions=["a", "die", "b"]) == [1.0, 0.0, 1.0]
    assert made.failures == 1


def test_a_reward_that_forks_and_returns_twice_is_answered_once(tmp_path: Path) -> None:
    made = reward(tmp_path, "def f(completion):\n    pid = os.fork()\n    return 1.0 if pid else 0.25\n")
    assert made(completions=["a"] * 6) == [1.0] * 6


@pytest.mark.slow
def test_the_memory_of_a_reward_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = reward(
        tmp_path, "def f(completion):\n    return float(len(bytearray(10**14)) if completion else 1)\n"
    )
    assert made(completions=["x", ""]) == [0.0, 1.0] and "memory" in made.first_failure


@pytest.mark.slow
def test_a_reward_that_leaks_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "GROWTH", 50 * 2**20)
    source = (
        "held = []\ndef f(completion):\n    held.append(b'x' * 20 * 2**20)\n    return float(len(held))\n"
    )
    made = reward(tmp_path, source)
    values = made(completions=["x"] * 12)
    assert max(values) <= 4.0 and values.count(1.0) >= 3


def test_what_a_reward_prints_is_shown_up_to_a_limit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = reward(tmp_path, "def f(completion):\n    print(completion * 10**6, flush=True)\n    return 1.0\n")
    assert made(completions=["\x1b]0;title\x07", "y"]) == [1.0, 1.0]
    out, err = capfd.readouterr()
    assert out == "" and "\x1b" not in err and "\\x1b]0;title" in err and len(err) < 500_000
    assert "is not shown" in err


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("sys.exit()", "cannot be imported: SystemExit"),
        ("os._exit(0)", "its process died"),
        ("raise KeyboardInterrupt", "cannot be imported: KeyboardInterrupt"),
        ("while True: pass", "it took longer than"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "died by SIGSEGV|its process died \\(by SIGSEGV"),
    ],
)
def test_a_reward_file_that_ends_or_hangs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    monkeypatch.setattr(user, "START_S", 1.0 if "while" in source else 60.0)
    with pytest.raises(ConfigError, match=why):
        reward(tmp_path, f"{source}\ndef f(completion):\n    return 1.0\n")


def test_a_reward_file_is_not_imported_here(tmp_path: Path) -> None:
    made = reward(
        tmp_path, "here = os.getpid()\ndef f(completion, *, limit: int = 3):\n    return float(here)\n"
    )
    assert made(completions=["x"])[0] != os.getpid()
    held = [str(getattr(module, "__file__", "")) for module in list(sys.modules.values())]
    assert not any(Path(file).parent == tmp_path for file in held)


def test_two_functions_of_a_file_share_one_process(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\ndef f(completion):\n    return os.getpid()\ndef g(completion):\n    return os.getpid()\n"
    )
    one, two = build_rewards([f"{file}:f", f"{file}:g"])
    assert one(completions=["x"]) == two(completions=["x"])


@pytest.mark.slow
def test_a_busy_machine_changes_no_verdict() -> None:
    """Four spinning processes: time that a worker waits for a processor does not count."""
    pairs = [
        ("\\sqrt{5+2\\sqrt{6}}", "\\sqrt{2}+\\sqrt{3}"),
        ("1/2", "\\frac{1}{2}"),
        ("x^2-1", "(x-1)(x+1)"),
    ]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    pool = Pool("latex_verify", timeout_s=0.5, most=2)
    try:
        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(lambda pair: pool.ask(*pair), pairs * 3))
        assert [told.error for told in found] == [""] * 9 and all(told.value for told in found)
    finally:
        pool.close()
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_pool_has_a_bound_and_counts_its_timeouts() -> None:
    pool = Pool("symbolic", most=3)
    most, before = 0, stats()
    stop = threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.is_set():
            most = max(most, len(pool.processes()))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(20) as threads:
            assert all(t.value for t in threads.map(lambda n: pool.ask(f"{n}/2", f"{2 * n}/4"), range(1, 40)))
    finally:
        stop.set()
        watcher.join()
        pool.close()
    assert 1 <= most <= 3 and stats()["asked"] == before["asked"] + 39
    slow = Pool("latex_verify", timeout_s=0.3)
    assert slow.ask("9^{9^{9}}", "3").error == "timeout" and stats()["timeout"] == before["timeout"] + 1
    slow.close()


@pytest.mark.slow
def test_a_thousand_requests_leave_nothing_behind(child: Child) -> None:
    """Open files and children of this process stay as they were, with time-outs among the requests."""
    me = psutil.Process()
    ask(child, 1)
    files, children = me.num_fds(), len(me.children(recursive=True))
    for number in range(1000):
        assert ask(child, number).value == number
        if number % 200 == 0:
            assert ask(child, 9.0, 0.05).error == "timeout"
    ask(child, 1)
    assert me.num_fds() == files and len(me.children(recursive=True)) == children


@pytest.mark.long
@pytest.mark.slow
def test_a_reward_that_leaks_raises_hangs_and_dies_at_random_leaves_the_others_as_they_are(
    tmp_path: Path,
) -> None:
    """600 calls with faults: the other values are those of the same calls without; files and children stay as many."""
    source = (
        "import random\nheld = []\ndef f(completion, *, faults: bool = False):\n"
        "    number = int(completion)\n    held.append(bytes(10**5))\n"
        "    fault = random.Random(number).random() if faults else 1.0\n"
        "    if fault < 0.02: time.sleep(60)\n    if fault < 0.04: os._exit(3)\n    if fault < 0.06: os.kill(os.getpid(), 19)\n"
        "    if fault < 0.3: raise ValueError(number)\n    return number / 7\n"
    )
    file = tmp_path / "mine.py"
    file.write_text("import os, time\n" + source)
    spec = {"name": f"{file}:f", "timeout_s": 0.5}
    whole, faulty = build_rewards([spec])[0], build_rewards([spec | {"params": {"faults": True}}])[0]
    texts = [str(number) for number in range(600)]
    right = whole(completions=texts)
    me = psutil.Process()
    faulty(completions=texts[:3])
    files, children = me.num_fds(), len(me.children(recursive=True))
    found = faulty(completions=texts)
    assert 100 < faulty.failures < 300
    assert all(a == b or b == 0.0 for a, b in zip(right, found, strict=True))
    assert sum(a != b for a, b in zip(right, found, strict=True)) <= faulty.failures
    whole(completions=texts[:1])
    assert me.num_fds() <= files + 4 and len(me.children(recursive=True)) <= children + 1


def test_a_rewards_process_ends_with_its_last_holder(tmp_path: Path) -> None:
    """A process that makes many runs kept two processes for each of the last 64 files."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def one(rollout, problem):\n    return 1.0\n\n\ndef two(rollout, problem):\n    return 0.5\n"
    )
    first = user.load_user_reward(f"{path}:one")
    second = user.load_user_reward(f"{path}:two")
    pid = first.function.child.pid  # type: ignore[attr-defined]
    assert second.function.child.pid == pid  # type: ignore[attr-defined]
    del first
    gc.collect()
    assert psutil.pid_exists(pid)
    del second
    gc.collect()
    assert not psutil.pid_exists(pid)
