"""The worker pool: hard limits, replacement, threads, asyncio, fork, spawn, Ctrl-C; nothing printed, no handler touched."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from algorist_grader import grade, grade_many
from algorist_grader.errors import GradingError
from algorist_grader.workers import Pool, close_pools, pool_for

ROOT = Path(__file__).resolve().parents[3]
DEEP = [("\\sqrt{5+2\\sqrt{6}}", "\\sqrt{2}+\\sqrt{3}"), ("\\sqrt{5+2\\sqrt{7}}", "\\sqrt{2}+\\sqrt{3}")]
HANGS = "9^{9^{9}}"  # math-verify never comes back from it


@pytest.fixture
def verify() -> Iterator[Pool]:
    """A pool of math-verify: the one judge here that really hangs."""
    pool = Pool("latex_verify", timeout_s=1.0, keep=1)
    assert pool.ask("3", "3").value is True
    yield pool
    pool.close()


@pytest.mark.slow
def test_a_hanging_worker_is_killed_within_the_limit_and_replaced(verify: Pool) -> None:
    pid = verify.processes()[0]
    assert verify.ask(HANGS, "3").error == "timeout"
    assert pid not in verify.processes() and verify.replaced == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert verify.ask("1/2", "\\frac{1}{2}").value is True


@pytest.mark.slow
def test_a_worker_that_is_killed_at_work_is_a_verdict_and_the_next_one_answers(verify: Pool) -> None:
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(verify.ask, HANGS, "3")
        while not verify._busy:
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(verify.processes()[0], signal.SIGKILL)
        assert hanging.result().error == "crashed"
    assert verify.ask("3", "3").value is True


@pytest.mark.slow
def test_a_worker_that_is_killed_while_idle_is_replaced(verify: Pool) -> None:
    pid = verify.processes()[0]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert verify.ask("3", "3").value is True


def test_a_worker_that_is_killed_while_it_starts_is_tried_again_once(tmp_path: Path) -> None:
    """A checker's file that kills the process that imports it: the first time, and every time."""
    once = tmp_path / "once.py"
    once.write_text(
        "import os, pathlib, signal\nmark = pathlib.Path(__file__).with_suffix('.mark')\n"
        "if not mark.exists():\n    mark.touch()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def check(problem, answer):\n    return answer == '3'\n"
    )
    pool = Pool(f"{once}:check", keep=1)
    assert pool.ask("3", "{}").value is True
    pool.close()
    once.write_text("import os\nos.kill(os.getpid(), 9)\n")
    with pytest.raises(GradingError, match="did not start"):
        Pool(f"{once}:check", keep=1).ask("3", "{}")


def test_memory_limit() -> None:
    """A verdict that needs more memory than the limit says so, and the next question is answered."""
    pool = Pool("symbolic", memory_mb=1, keep=1)
    assert pool.ask("1/2", "0.5").value is True
    assert pool.ask("1" * 3_000_000, "2").error == "memory"
    assert pool.ask("1/2", "0.5").value is True
    pool.close()


@pytest.mark.slow
def test_the_grade_says_which_limit_it_was() -> None:
    verdict = grade(HANGS, "3", matcher="latex_verify")
    assert (verdict.correct, verdict.reason) == (False, "timeout")
    close_pools()


@pytest.mark.slow
@pytest.mark.long
def test_a_busy_pool_grows_instead_of_waiting(verify: Pool) -> None:
    with ThreadPoolExecutor(3) as threads:
        hanging = [threads.submit(verify.ask, HANGS, "3") for _ in range(3)]
        time.sleep(0.3)
        assert verify.ask("3", "3").value is True
        assert [h.result().error for h in hanging] == ["timeout"] * 3


def test_eight_threads_give_the_serial_verdicts() -> None:
    golds = ["1/2", "\\sqrt{2}", "x^2-1", "(1,2)", "5\\text{ cm}"]
    answers = ["0.5", "2^{1/2}", "(x-1)(x+1)", "(1,3)", "5", "7", "\\frac{1", "1 or 2"]
    pairs = [(answers[i % 8], golds[(i // 8) % 5]) for i in range(1000)] + DEEP
    serial = [(g.correct, g.reason) for g in (grade(a, b) for a, b in pairs)]
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(
            lambda _: [(g.correct, g.reason) for g in (grade(a, b) for a, b in pairs)], range(8)
        ):
            assert found == serial
    for workers in (1, 2, 8):
        assert [(g.correct, g.reason) for g in grade_many(pairs, workers=workers)] == serial


def test_asyncio() -> None:
    async def all_of_them() -> list[bool]:
        found = await asyncio.gather(*(asyncio.to_thread(grade, a, g) for a, g in DEEP * 4))
        return [f.correct for f in found]

    assert asyncio.run(all_of_them()) == [True, False] * 4


def _in_child(queue: multiprocessing.Queue[list[bool]]) -> None:
    queue.put([grade(a, g).correct for a, g in DEEP])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_in_a_child_process(method: str) -> None:
    grade(*DEEP[0])  # the parent's workers exist and must not be shared
    context = multiprocessing.get_context(method)
    queue: multiprocessing.Queue[list[bool]] = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == [True, False]
    child.join(60)
    assert child.exitcode == 0
    assert [grade(a, g).correct for a, g in DEEP] == [True, False]


def test_no_signal_handler_is_touched_and_no_thread_is_left() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    grade_many(DEEP * 3, workers=4)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before
    assert not [t for t in threading.enumerate() if t.name.startswith("grade")]


@pytest.mark.slow
def test_ctrl_c_ends_it_and_no_worker_is_left(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        "from algorist_grader.workers import pool_for\n"
        "pool = pool_for('latex_verify', 60.0, 512)\n"
        "assert pool.ask('3', '3').value\n"
        "print(pool.processes()[0], flush=True)\n"
        f"pool.ask('{HANGS}', '3')\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does: parent and worker
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the worker is still there")


def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "from algorist_grader.workers import pool_for\n"
        "p = pool_for('symbolic', 1.0, 512); p.ask('1', '2'); print(p.processes()[0], flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        if (Path(f"/proc/{worker}/stat").read_text().split()[2]) == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{worker}").exists()


def test_import_is_light_and_grading_is_silent() -> None:
    code = (
        "import sys\nfrom algorist_grader import grade\n"
        "assert not {'sympy', 'mpmath', 'math_verify', 'torch', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
        f"for a, g in {DEEP!r} + [('9^{{9^{{9}}}}', '3'), ('\\\\frac{{', '1')]:\n    grade(a, g)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_one_pool_per_limit() -> None:
    assert pool_for("symbolic", 1.0, 512) is pool_for("symbolic", 1.0, 512)
    assert pool_for("symbolic", 1.0, 512) is not pool_for("symbolic", 2.0, 512)


class _Answers:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> bool:
        return grade(*DEEP[index % 2]).correct


def test_inside_a_data_loader_worker() -> None:
    torch = pytest.importorskip("torch", reason="a data loader is torch's, which the grader does without")
    loader = torch.utils.data.DataLoader(_Answers(), batch_size=2, num_workers=2)
    assert [value for batch in loader for value in batch.tolist()] == [True, False] * 4
