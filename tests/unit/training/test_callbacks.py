"""The use of hardware: what is read is true, cheap, on every logged line, and in the report."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState

from algorist.config.load import load_recipe
from algorist.report.build import build_report
from algorist.report.collect import collect
from algorist.runs.pipeline import run_recipe
from algorist.store.run_folder import RunFolder
from algorist.system import own_memory
from algorist.training.callbacks import Hardware, MetricsCallback


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_busy_process_takes_more_of_the_processor_than_one_that_sleeps() -> None:
    hardware = Hardware()
    busy(0.3)
    working = hardware.read()["hardware/cpu_percent"]
    asleep = []
    for _ in range(3):  # other threads of this process may wake up once
        time.sleep(0.2)
        asleep.append(hardware.read()["hardware/cpu_percent"])
    sleeping = min(asleep)
    assert 10 < working <= 120, working  # other processes may hold the core
    assert 0 <= sleeping < 0.5 * working, (sleeping, working)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_process_that_shares_its_processor_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three programs on one core: each waits for two thirds of the time in which it has work."""
    monkeypatch.setattr("algorist.training.callbacks.BUSY_AFTER_S", 0.5)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        lines: list[dict[str, float]] = []
        callback = MetricsCallback(lambda step, values: lines.append(values))
        for _ in range(3):
            busy(0.3)
            callback.on_log(None, TrainerState(), TrainerControl(), {"loss": 1.0})
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.wait()
    assert all(line["hardware/waiting_percent"] > 30 for line in lines)
    assert caplog.text.count("other programs hold this machine's processors") == 1


def test_memory_that_is_taken_is_seen() -> None:
    hardware = Hardware()
    before = hardware.read()["hardware/ram_gb"]
    with mmap.mmap(
        -1, 200_000_000
    ) as block:  # not torch's, which the process may have kept from a test before
        block[:: mmap.PAGESIZE] = bytes(len(range(0, len(block), mmap.PAGESIZE)))
        after = hardware.read()["hardware/ram_gb"]
    assert before > 0.05 and 0.15 < after - before < 0.35, (before, after)


def test_memory_that_was_taken_between_two_looks_is_in_the_peak() -> None:
    before = own_memory() / 1e9  # children of other tests do not count
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of the test from here on
    with mmap.mmap(-1, 200_000_000) as block:  # not torch's, as above
        block[:: mmap.PAGESIZE] = bytes(len(range(0, len(block), mmap.PAGESIZE)))
    assert Hardware().read()["hardware/ram_peak_gb"] - before > 0.15
    assert own_memory() / 1e9 < before + 0.1


def test_children_count_and_one_that_ends_is_forgotten() -> None:
    code = "import time\nblock = bytearray(120_000_000)\nprint('ready', flush=True)\nwhile True: pass"
    alone = Hardware().read()["hardware/ram_gb"]
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        hardware = Hardware()
        first = hardware.read()
        time.sleep(0.5)
        second = hardware.read()
    finally:
        child.kill()
        child.communicate()
    assert first["hardware/ram_gb"] - alone > 0.1
    assert second["hardware/cpu_percent"] > 10, second  # this process sleeps, the child does not
    assert hardware.read()["hardware/ram_gb"] < second["hardware/ram_gb"] - 0.1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_said_of_one() -> None:
    names = {"ram_gb", "ram_peak_gb", "cpu_percent"} | (
        {"waiting_percent"} if sys.platform == "linux" else set()
    )
    assert set(Hardware().read()) == {f"hardware/{name}" for name in names}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gpu_memory_is_that_of_the_tensors() -> None:
    hardware = Hardware()
    block = torch.ones(250_000_000, device="cuda")
    found = hardware.read()
    del block
    later = hardware.read()
    assert found["hardware/gpu_memory_gb"] - later["hardware/gpu_memory_gb"] == pytest.approx(1.0, abs=0.01)
    assert later["hardware/gpu_memory_peak_gb"] >= found["hardware/gpu_memory_gb"] >= 1.0


@pytest.mark.slow
def test_every_logged_line_has_it_and_the_report_sums_it_up(tmp_path: Path) -> None:
    place = ["device=cpu", "threads=1", "eval.enabled=false", f"output_dir={tmp_path}", "run_name=r"]
    run_recipe(load_recipe("smoke-cpu", place).recipe)
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if "loss" in row]
    assert [(r["stage"], r["step"]) for r in logged] == [("sft", 1), ("sft", 2), ("grpo", 1), ("grpo", 2)]
    assert all(0.05 < row["hardware/ram_gb"] < 64 and row["hardware/cpu_percent"] > 0 for row in logged)
    most = max(max(row["hardware/ram_gb"], row["hardware/ram_peak_gb"]) for row in logged)
    told = dict(collect(RunFolder(tmp_path / "r"))["environment"])["use of hardware"]
    assert told.startswith(f"RAM up to {most:.2f} GB, processor ") and told.endswith(
        " % of one core in the mean"
    )
    assert told in build_report(tmp_path / "r").read_text(encoding="utf-8")


def test_a_gpu_that_does_not_tell_its_load_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> int:
        raise ModuleNotFoundError("No module named 'pynvml'")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "utilization", missing)
    hardware = Hardware()
    for _ in range(2):
        hardware._looked = float("-inf")
        assert "hardware/gpu_memory_gb" in hardware.read()
    assert caplog.text.count("pip install nvidia-ml-py") == 1
