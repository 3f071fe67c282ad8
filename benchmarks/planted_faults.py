"""Faults that are planted in small real runs: does ``diagnose`` name them, do its lines alone repair them, does it cry wolf?

    OMP_NUM_THREADS=1 python benchmarks/planted_faults.py [--out FOLDER] [NAME …]     # a folder keeps the runs, and continues

A tiny model (0.07 M parameters) learns sums of two digits by SFT from careless solutions, then GRPO runs of a few seconds start from it,
each with one fault; ten more are healthy. A run is repaired when the same run with the lines of the first finding (``algorist run RECIPE
LINES``), and nothing else, no longer has that finding and is no worse than a healthy run: its accuracy is at most two standard
deviations (over seeds) below the mean of healthy runs with the same model, data and other settings. Where it is not, the lines of its
own first finding are added once more ("in two"). Faults in a file that no line of a recipe can mend are not tried. ``late``: written
after the rules were frozen; ``newest``: written with the changes of 24 November 2026 to the rules. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import re
import shutil
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import torch

from algorist.config import load_recipe
from algorist.diagnosis.diagnose import find_causes
from algorist.diagnosis.rule import Finding
from algorist.diagnosis.signals import read_signals
from algorist.errors import AlgoristError, ConfigError
from algorist.runs.pipeline import run_recipe
from algorist.store.run_log import Quiet

SMALL = (
    "model.tiny={vocab_size: 300, hidden_size: 48, layers: 2, heads: 4, kv_heads: 2}",
    "eval.enabled=false",
    "threads=1",
)
GRPO = (
    "sft.enabled=false",
    "grpo.batch_size=64",
    "grpo.max_completion_tokens=32",
    "grpo.save_steps=4",
    "sft.max_steps=150",
)
FROZEN = """
from algorist import Extension, extension

@extension
class Frozen(Extension):
    name, hooked = "frozen", False

    def batch(self, batch, policy):
        if not self.hooked:
            self.hooked = True
            for name, weight in getattr(policy, "model", policy).named_parameters():
                if "lora_" in name:
                    weight.register_hook(lambda gradient: 0 * gradient)
        return batch
"""
HEALTHY = ("grpo.learning_rate=3e-4", "grpo.max_steps=12")
SEEDS = 5
"""Healthy runs that a repaired one is compared with."""
REWARDS = """
def long(completions, **_):
    return [min(len(c), 400) / 100 for c in completions]

def nines(completions, **_):
    return [float(c.count("9")) for c in completions]

def short(completions, **_):
    return [-len(c) / 100 for c in completions]

def any_text(completions, **_):
    return [float(len(c) > 0) for c in completions]

def nothing(completions, **_):
    return [0.0 for _ in completions]

def raises(completion):
    raise ValueError("not this one")

def sometimes(completion):
    if len(completion) % 3 == 0:
        raise ValueError("not this one")
    return 0.5

def tags(completions, **_):
    return [float(c.count("<")) for c in completions]

def astronomic(log_probs, advantages):
    return -advantages * log_probs * 1e38 * 1e38

def broken(request):
    raise RuntimeError("out of order")
"""


@dataclass(frozen=True)
class Fault:
    """A planted fault; ``{f}`` in an override is the folder of the files.

    Attributes:
        name: What is wrong.
        right: Names of findings that are right.
        overrides: Settings that plant it.
        beside: Settings that a healthy run of the comparison has too.
        model: The model that GRPO starts from.
        data: The training problems.
        healthy: Model and data of the healthy runs it is compared with, where the fault is one of them.
        by_hand: It is in a file that no line of a recipe mends.
        written: before or after the rules were frozen, or with the newest rules.
    """

    name: str
    right: tuple[str, ...]
    overrides: tuple[str, ...]
    beside: tuple[str, ...] = ()
    model: str = "careless"
    data: str = "train"
    healthy: tuple[str, str] | None = None
    by_hand: bool = False
    written: Literal["before", "after", "newest"] = "before"


def fault(name: str, right: str, *overrides: str, **more: Any) -> Fault:
    return Fault(name, tuple(right.split()), overrides, **more)


def after(*parts: str, **more: Any) -> Fault:
    return fault(*parts, written="after", **more)


def newest(*parts: str, **more: Any) -> Fault:
    return fault(*parts, written="newest", **more)


LONGER = "sft.max_steps=400"
"""What SFT takes here, where the lines of a finding turn it on."""
FAST = ("grpo.learning_rate=6e-4", "grpo.max_steps=40")


EARLY = (
    fault("rate far too high", "learning_rate_too_large", "grpo.learning_rate=0.1"),
    fault("rate far too low", "learning_rate_too_small", "grpo.learning_rate=1e-10"),
    fault("limit of 6 tokens", "truncated", "grpo.max_completion_tokens=6"),
    fault("another prompt format", "unparseable nothing_answered", "prompt.format=question_only", LONGER),
    fault("end token that never comes", "no_stop", model="deaf", beside=("grpo.max_completion_tokens=64",), by_hand=True),
    fault("gold answers all wrong", "all_wrong", data="shifted", by_hand=True),
    fault("solved data", "all_right", "grpo.temperature=0.2", model="careful", healthy=("careless", "train")),
    fault("reward for any text", "flat_reward", "rewards=[{{name: '{f}/own.py:any_text'}}]"),
    fault("reward always 0", "no_signal flat_reward", "rewards=[{{name: '{f}/own.py:nothing'}}]"),
    fault("reward always raises", "reward_fails", "rewards=[{{name: '{f}/own.py:raises'}}]"),
    fault("reward for nines", "reward_hacking", "rewards=[{{name: '{f}/own.py:nines'}}]", beside=FAST),
    fault("sampling too cold", "identical_completions", "grpo.temperature=0.01", data="hard"),
    fault("loss overflows", "not_finite", "grpo.loss={f}/own.py:astronomic"),
    fault("bfloat16 swallows updates", "weights_unchanged learning_rate_too_small", "model.dtype=bfloat16", "grpo.learning_rate=1e-8"),
    fault("KL explodes", "kl_blow_up learning_rate_too_large", "grpo.beta=1e-6", "grpo.learning_rate=1e-2"),
    fault("dropout in the adapter", "log_prob_mismatch", "model.lora={{rank: 8, alpha: 256, dropout: 0.5}}",
          beside=("grpo.learning_rate=5e-4", "model.lora={{rank: 8, alpha: 256}}")),
)  # fmt: skip
"""Written before the rules were frozen: their runs are those of ``tests/runs/test_diagnosis.py``."""
LATE = (
    after("limit of 12 tokens", "truncated", "grpo.max_completion_tokens=12"),
    after("rate ten times too high", "learning_rate_too_large", "grpo.learning_rate=1e-2", beside=("grpo.max_steps=24",)),
    after("reward for tags", "reward_hacking length_growth", "rewards=[{{name: '{f}/own.py:tags'}}]", beside=FAST),
    after("reward raises on a third", "reward_fails", "rewards=[correct, {{name: '{f}/own.py:sometimes'}}]"),
    after("top_k of 1", "identical_completions", "grpo.top_k=1", data="hard"),
    after("top_p of 0.05", "identical_completions", "grpo.top_p=0.05", data="hard"),
    after("untrained model", "nothing_answered unparseable", LONGER, model="tiny", healthy=("careless", "train")),
    after("other tags", "unparseable nothing_answered", "prompt.format=working_solution", LONGER),
    after("only shortness pays", "entropy_collapse reward_hacking", "rewards=[{{name: '{f}/own.py:short'}}]", "grpo.learning_rate=3e-3",
          beside=("grpo.max_steps=40",)),
    after("length pays", "length_growth reward_hacking", "rewards=[{{name: '{f}/own.py:long'}}]", "grpo.learning_rate=3e-3",
          beside=("grpo.max_completion_tokens=96",)),
    after("rate 0", "learning_rate_too_small weights_unchanged", "grpo.learning_rate=1e-30"),
    after("sampling too hot", "nothing_answered unparseable all_wrong truncated", "grpo.temperature=5"),
    after("adapter that hardly learns", "learning_rate_too_small weights_unchanged", "model.lora={{rank: 4, alpha: 4}}",
          "grpo.learning_rate=1e-9"),
    after("teacher that knows nothing", "teacher_knows_nothing", "grpo.teacher={{model: '{f}/blank'}}"),
    after("test answers in the prompt are no numbers", "all_wrong", data="words", by_hand=True),
)  # fmt: skip
"""Written after the rules were frozen."""
NEWEST = (
    newest("tool that always fails", "tool_fails", "tools={{use: ['{f}/own.py:broken'], fail_steps: 1000}}", model="caller",
           healthy=("careless", "train"), by_hand=True),
    newest("tool that nobody calls", "tool_unused", "tools={{use: ['{f}/own.py:broken'], fail_steps: 1000}}"),
    newest("evaluated on what is trained on", "held_out_leaks", "data.eval={{name: local, path: '{f}/many.jsonl'}}",
           "eval.enabled=true", "eval.samples=0", data="many"),
    newest("groups of one", "refused", "grpo.group_size=1"),
    newest("adapter that is frozen", "weights_unchanged", "plugins=['{f}/frozen.py']",
           beside=("model.lora={{rank: 8, alpha: 32}}", "grpo.learning_rate=2e-3"), by_hand=True),
)  # fmt: skip
"""Written together with the newest changes of the rules."""
FAULTS = (*EARLY, *LATE, *NEWEST)


def sums(
    path: Path,
    count: int,
    *,
    seed: int,
    careless: float = 0.0,
    shift: int = 0,
    answer: str = "{}",
    call: bool = False,
) -> Path:
    """Write sums as JSONL; a careless solution is off by one, ``shift`` makes every gold wrong, ``call`` writes a tool's call."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        a, b = rng.randint(1, 6), rng.randint(1, 6)
        slip = rng.choice((-1, 1)) if rng.random() < careless else 0
        called = "<broken>1</broken> " if call else ""
        solution = f"{called}{a} + {b} = {a + b + slip}"
        rows.append(
            {"question": f"{a} + {b} = ?", "answer": answer.format(a + b + shift), "solution": solution}
        )
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


@dataclass
class Bench:
    """Trains the runs in a folder, each once."""

    folder: Path
    seconds: float = 0.0
    plain: list[float] = field(default_factory=list)
    """Accuracies of healthy runs with nothing else changed."""

    def prepare(self) -> None:
        """Write data, rewards and models."""
        f = self.folder
        (f / "own.py").write_text(REWARDS, encoding="utf-8")
        (f / "frozen.py").write_text(FROZEN, encoding="utf-8")
        hard = [sums(f / "a.jsonl", 60, seed=4), sums(f / "b.jsonl", 40, seed=5, shift=100)]
        self.data = {
            "train": sums(f / "train.jsonl", 400, seed=1),
            "shifted": sums(f / "s.jsonl", 200, seed=3, shift=100),
            "words": sums(f / "words.jsonl", 200, seed=3, answer="about {} apples"),
            "hard": f / "hard.jsonl",
        }
        every = [
            {"question": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(1, 7) for b in range(1, 30)
        ]
        self.data["many"] = f / "many.jsonl"
        self.data["many"].write_text("\n".join(map(json.dumps, every)) + "\n", encoding="utf-8")
        self.data["hard"].write_text("".join(part.read_text() for part in hard), encoding="utf-8")
        self.models = {"tiny": "tiny", "deaf": str(f / "deaf"), "blank": str(f / "blank")}
        for name, careless, steps, *more in (
            ("careless", 0.5, 300),
            ("careful", 0.0, 400),
            ("unborn", 0.0, 1),
            ("caller", 0.0, 200, f"tools={{use: ['{f}/own.py:broken'], fail_steps: 1000}}"),
        ):
            rows = sums(f / f"{name}.jsonl", 2000, seed=2, careless=careless, call=name == "caller")
            sft = f"data.sft={{name: local, path: {rows}}}"
            self.train(name, sft, "grpo.enabled=false", f"sft.max_steps={steps}", *more, data="train")
            self.models[name] = str(f / name / "sft" / "final")
        for source, copy in (("unborn", "blank"), ("careless", "deaf")):
            shutil.copytree(self.models[source], f / copy, dirs_exist_ok=True)
        for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
            path = f / "deaf" / file
            if path.is_file():
                values = json.loads(path.read_text())
                values |= {"eos_token": "!"} if file.startswith("tok") else {"eos_token_id": 5}
                path.write_text(json.dumps(values))

    def train(self, name: str, *overrides: str, data: str) -> Path:
        """Return the folder of a run, trained where it is not there yet."""
        marker, began = self.folder / f"{name}.done", time.monotonic()
        settings = [
            *SMALL,
            f"data.train={{name: local, path: {self.data[data]}}}",
            f"output_dir={self.folder}",
            f"run_name={name}",
        ]
        lines = json.dumps([*settings, *overrides])
        if not marker.is_file() or marker.read_text() != lines:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            recipe = load_recipe("quickstart", [*settings, *overrides]).recipe
            try:
                run_recipe(recipe, display=Quiet())
            except AlgoristError:  # a run that ends with an error is diagnosed all the same
                if not (self.folder / name).is_dir():
                    raise
            marker.write_text(lines)
        self.seconds += time.monotonic() - began
        return self.folder / name

    def grpo(
        self, name: str, planted: Fault, *lines: str, healthy: bool = False
    ) -> tuple[list[Finding], float]:
        """Return the findings of a run and the accuracy of its last quarter; ``healthy`` leaves the fault out."""
        model, data = (planted.healthy if healthy else None) or (planted.model, planted.data)
        parts = [*planted.beside, *(() if healthy else planted.overrides)]
        run = self.train(
            name,
            f"data.sft={{name: local, path: {self.folder / 'careful.jsonl'}}}",
            f"model.name={self.models[model]}",
            *GRPO,
            *HEALTHY,
            *(part.format(f=self.folder) for part in parts),
            *lines,
            data=data,
        )
        signals = read_signals(run)
        last = signals.batches[-max(1, len(signals.batches) // 4) :]
        return find_causes(signals), sum(b.accuracy.mean for b in last) / len(last) if last else 0.0

    def least(self, planted: Fault) -> float:
        """Return the accuracy that a repaired run must reach: two standard deviations below the mean of healthy ones."""
        if not planted.beside and (planted.healthy or (planted.model, planted.data)) == ("careless", "train"):
            return below(self.plain)
        model, data = planted.healthy or (planted.model, planted.data)
        key = zlib.crc32(repr((model, data, planted.beside)).encode())
        seeds = range(1, 1 + SEEDS)
        runs = [self.grpo(f"healthy-{key}-{seed}", planted, f"seed={seed}", healthy=True) for seed in seeds]
        return below([accuracy for _, accuracy in runs])


def below(accuracies: list[float]) -> float:
    return mean(accuracies) - 2 * stdev(accuracies)


@dataclass
class Row:
    """What became of one fault."""

    fault: Fault
    findings: list[str] = field(default_factory=list)
    repaired: str = "no"
    accuracy: float = float("nan")
    least: float = float("nan")

    @property
    def first(self) -> bool:
        return self.findings[:1] != [] and self.findings[0] in self.fault.right

    @property
    def named(self) -> bool:
        return bool({*self.findings} & {*self.fault.right})


def look(bench: Bench, planted: Fault) -> Row:
    """Plant a fault, diagnose the run, and try the proposed lines."""
    name, row = re.sub(r"\W+", "-", planted.name), Row(planted)
    try:
        findings, row.accuracy = bench.grpo(name, planted)
    except ConfigError as error:  # said before anything is loaded, with the line to write
        row.findings, row.repaired = ["refused"], "yes" if "grpo.group_size=8" in str(error) else "no"
        return row
    row.findings = [finding.name for finding in findings]
    if planted.by_hand:
        row.repaired = "by hand"
        return row
    row.least, lines = bench.least(planted), ()
    for words, suffix in (("yes", "again"), ("in two", "once-more")):
        if not findings or not findings[0].change:
            break
        first, lines = findings[0].name, (*lines, *findings[0].change)
        print(f"{planted.name}: {first} → {' '.join(lines)}", file=sys.stderr, flush=True)
        try:
            findings, row.accuracy = bench.grpo(f"{name}-{suffix}", planted, *lines)
        except AlgoristError as error:
            print(f"{planted.name}: {error}", file=sys.stderr, flush=True)
            break
        if first not in [finding.name for finding in findings] and row.accuracy >= row.least:
            row.repaired = words
            break
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; all where left out")
    parser.add_argument("--out", type=Path, help="a folder that keeps the runs")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder.resolve())
        bench.prepare()
        plain = fault("healthy", "")
        healthy = [bench.grpo(f"healthy-{seed}", plain, f"seed={seed}") for seed in range(1, 11)]
        bench.plain = [accuracy for _, accuracy in healthy]
        print(
            "| fault | written | findings | named first | named | repaired | accuracy after | healthy: at least |"
        )
        print("|---|---|---|---|---|---|---|---|", flush=True)
        rows = []
        for planted in (f for f in FAULTS if not options.names or f.name in options.names):
            rows.append(row := look(bench, planted))
            said = [
                planted.name,
                planted.written,
                ", ".join(row.findings) or "none",
                *(("no", "yes")[x] for x in (row.first, row.named)),
            ]
            print(
                f"| {' | '.join(said)} | {row.repaired} | {row.accuracy:.2f} | {row.least:.2f} |", flush=True
            )
        print(
            "\n| written | faults | named first | named | repairable by lines | repaired | repaired in two |\n|---|---|---|---|---|---|---|"
        )
        for written in ("before", "after", "newest"):
            here = [row for row in rows if row.fault.written == written]
            able = [row for row in here if not row.fault.by_hand]
            counts = [len(here), sum(r.first for r in here), sum(r.named for r in here), len(able)]
            counts += [sum(r.repaired == "yes" for r in able), sum(r.repaired == "in two" for r in able)]
            print(f"| {written} | {' | '.join(map(str, counts))} |")
        alarms = [finding.name for findings, _ in healthy for finding in findings]
        print(
            f"\nFalse alarms in 10 healthy runs: {', '.join(alarms) or 'none'} (accuracy {mean(a for _, a in healthy):.2f})."
        )
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
            platform.processor(),
        )
        print(
            f"{bench.seconds:.0f} s; {cpu}, 1 thread, Python {platform.python_version()}, torch {torch.__version__}"
        )


if __name__ == "__main__":
    main()
