"""Faults that are planted in small real runs: does ``diagnose`` name them, do its lines alone repair them, does it cry wolf?

    OMP_NUM_THREADS=1 python benchmarks/planted_faults.py [NAME …]

A tiny model (0.07 M parameters) learns sums of two digits by SFT from careless solutions, then GRPO runs of a few seconds start from it,
each with one fault; ten more are healthy. A run is repaired when the same run with the lines of the first finding (``algorist run RECIPE
LINES``), and nothing else, no longer has that finding and ends with an accuracy of at least nine tenths of a healthy run's. ``late``:
written after the rules were frozen. Prints a Markdown table.
"""

from __future__ import annotations

import contextlib
import json
import platform
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from algorist.config import load_recipe
from algorist.diagnosis.diagnose import find_causes
from algorist.diagnosis.rule import Finding
from algorist.diagnosis.signals import read_signals
from algorist.errors import AlgoristError
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
HEALTHY = ("grpo.learning_rate=3e-4", "grpo.max_steps=12")
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
    """A planted fault: names of findings that are right, and the overrides that plant it; ``{f}`` is the folder of the files."""

    name: str
    right: tuple[str, ...]
    overrides: tuple[str, ...]
    model: str = "careless"
    data: str = "train"
    late: bool = False


def fault(name: str, right: str, *overrides: str, **more: Any) -> Fault:
    return Fault(name, tuple(right.split()), overrides, **more)


EARLY = (
    fault("rate far too high", "learning_rate_too_large", "grpo.learning_rate=0.1"),
    fault("rate far too low", "learning_rate_too_small", "grpo.learning_rate=1e-10"),
    fault("limit of 6 tokens", "truncated", "grpo.max_completion_tokens=6"),
    fault("another prompt format", "unparseable nothing_answered", "prompt.format=question_only"),
    fault("end token that never comes", "no_stop", "grpo.max_completion_tokens=64", model="deaf"),
    fault("gold answers all wrong", "all_wrong", data="shifted"),
    fault("solved data", "all_right", "grpo.temperature=0.2", model="careful"),
    fault("reward for any text", "flat_reward", "rewards=[{{name: '{f}/own.py:any_text'}}]"),
    fault("reward always 0", "no_signal flat_reward", "rewards=[{{name: '{f}/own.py:nothing'}}]"),
    fault("reward always raises", "reward_fails", "rewards=[{{name: '{f}/own.py:raises'}}]"),
    fault(
        "reward for nines",
        "reward_hacking",
        "rewards=[{{name: '{f}/own.py:nines'}}]",
        "grpo.learning_rate=2e-3",
        "grpo.max_steps=24",
    ),
    fault("sampling too cold", "identical_completions", "grpo.temperature=0.01", data="hard"),
    fault("loss overflows", "not_finite", "grpo.loss={f}/own.py:astronomic"),
    fault(
        "bfloat16 swallows updates",
        "weights_unchanged learning_rate_too_small",
        "model.dtype=bfloat16",
        "grpo.learning_rate=1e-8",
    ),
    fault("KL explodes", "kl_blow_up learning_rate_too_large", "grpo.beta=1e-6", "grpo.learning_rate=1e-2"),
    fault(
        "dropout in the adapter",
        "log_prob_mismatch",
        "model.lora={{rank: 8, alpha: 256, dropout: 0.5}}",
        "grpo.learning_rate=2e-3",
    ),
)
"""Written before the rules were frozen: their runs are those of ``tests/runs/test_diagnosis.py``."""
LATE = (
    fault("limit of 12 tokens", "truncated", "grpo.max_completion_tokens=12", late=True),
    fault(
        "rate ten times too high",
        "learning_rate_too_large",
        "grpo.learning_rate=1e-2",
        "grpo.max_steps=24",
        late=True,
    ),
    fault(
        "reward for tags",
        "reward_hacking length_growth",
        "rewards=[{{name: '{f}/own.py:tags'}}]",
        "grpo.learning_rate=2e-3",
        "grpo.max_steps=24",
        late=True,
    ),
    fault(
        "reward raises on a third",
        "reward_fails",
        "rewards=[correct, {{name: '{f}/own.py:sometimes'}}]",
        late=True,
    ),
    fault("top_k of 1", "identical_completions", "grpo.top_k=1", data="hard", late=True),
    fault("top_p of 0.05", "identical_completions", "grpo.top_p=0.05", data="hard", late=True),
    fault("untrained model", "nothing_answered unparseable", model="tiny", late=True),
    fault("other tags", "unparseable nothing_answered", "prompt.format=working_solution", late=True),
    fault(
        "only shortness pays",
        "entropy_collapse reward_hacking",
        "rewards=[{{name: '{f}/own.py:short'}}]",
        "grpo.learning_rate=3e-3",
        "grpo.max_steps=40",
        late=True,
    ),
    fault(
        "length pays",
        "length_growth reward_hacking",
        "rewards=[{{name: '{f}/own.py:long'}}]",
        "grpo.max_completion_tokens=96",
        "grpo.learning_rate=3e-3",
        late=True,
    ),
    fault("rate 0", "learning_rate_too_small weights_unchanged", "grpo.learning_rate=1e-30", late=True),
    fault(
        "sampling too hot",
        "nothing_answered unparseable all_wrong truncated",
        "grpo.temperature=5",
        late=True,
    ),
    fault(
        "adapter that hardly learns",
        "learning_rate_too_small weights_unchanged",
        "model.lora={{rank: 4, alpha: 4}}",
        "grpo.learning_rate=1e-9",
        late=True,
    ),
    fault(
        "teacher that knows nothing",
        "teacher_knows_nothing",
        "grpo.teacher={{model: '{f}/blank'}}",
        late=True,
    ),
    fault(
        "tool that always fails",
        "tool_fails",
        "tools={{use: ['{f}/own.py:broken'], fail_steps: 1000}}",
        "grpo.max_steps=12",
        model="caller",
        late=True,
    ),
    fault("test answers in the prompt are no numbers", "all_wrong", data="words", late=True),
)
"""Written after the rules were frozen."""


def sums(
    path: Path, count: int, *, seed: int, careless: float = 0.0, shift: int = 0, answer: str = "{}"
) -> Path:
    rng, rows = random.Random(seed), []
    for _ in range(count):
        a, b = rng.randint(1, 6), rng.randint(1, 6)
        slip = rng.choice((-1, 1)) if rng.random() < careless else 0
        gold = answer.format(a + b + shift)
        rows.append({"question": f"{a} + {b} = ?", "answer": gold, "solution": f"{a} + {b} = {a + b + slip}"})
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


@dataclass
class Bench:
    """Trains the runs."""

    folder: Path
    seconds: float = 0.0
    done: dict[str, Path] = field(default_factory=dict)

    def prepare(self) -> None:
        f = self.folder
        (f / "own.py").write_text(REWARDS, encoding="utf-8")
        self.data = {
            "train": sums(f / "train.jsonl", 400, seed=1),
            "shifted": sums(f / "s.jsonl", 200, seed=3, shift=100),
        }
        self.data["words"] = sums(f / "words.jsonl", 200, seed=3, answer="about {} apples")
        hard = [sums(f / "a.jsonl", 60, seed=4), sums(f / "b.jsonl", 40, seed=5, shift=100)]
        self.data["hard"] = f / "hard.jsonl"
        self.data["hard"].write_text("".join(part.read_text() for part in hard), encoding="utf-8")
        self.models = {"tiny": "tiny"}
        for name, careless, steps in (("careless", 0.5, 300), ("careful", 0.0, 400), ("blank", 0.0, 1)):
            rows = sums(f / f"{name}.jsonl", 2000, seed=2, careless=careless)
            self.train(
                name,
                f"data.sft={{name: local, path: {rows}}}",
                "grpo.enabled=false",
                f"sft.max_steps={steps}",
                data="train",
            )
            self.models[name] = str(f / name / "sft" / "final")
        shutil.copytree(f / "blank" / "sft" / "final", f / "blank-model")
        (f / "blank").rename(f / "blank-run")
        (f / "blank-model").rename(f / "blank")
        shutil.copytree(self.models["careless"], f / "deaf")
        for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
            path = f / "deaf" / file
            if path.is_file():
                values = json.loads(path.read_text())
                values |= {"eos_token": "!"} if file.startswith("tok") else {"eos_token_id": 5}
                path.write_text(json.dumps(values))
        self.models |= {"deaf": str(f / "deaf"), "caller": self.models["careless"]}

    def train(self, name: str, *overrides: str, data: str) -> Path:
        settings = [
            *SMALL,
            f"data.train={{name: local, path: {self.data[data]}}}",
            f"output_dir={self.folder}",
            f"run_name={name}",
        ]
        began = time.monotonic()
        with contextlib.suppress(AlgoristError):  # a run that ends with an error is diagnosed all the same
            run_recipe(load_recipe("quickstart", [*settings, *overrides]).recipe, display=Quiet())
        self.seconds += time.monotonic() - began
        return self.folder / name

    def grpo(self, name: str, planted: Fault, *lines: str) -> tuple[list[Finding], float]:
        """Return the findings of a run and the accuracy of its last quarter."""
        overrides = [o.format(f=self.folder) for o in planted.overrides]
        run = self.train(
            name,
            f"data.sft={{name: local, path: {self.folder / 'careful.jsonl'}}}",
            f"model.name={self.models[planted.model]}",
            *GRPO,
            *HEALTHY,
            *overrides,
            *lines,
            data=planted.data,
        )
        signals = read_signals(run)
        last = signals.batches[-max(1, len(signals.batches) // 4) :]
        return find_causes(signals), sum(b.accuracy.mean for b in last) / len(last) if last else 0.0


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        bench.prepare()
        healthy, alarms = [], 0
        for seed in range(1, 11):
            found, accuracy = bench.grpo(f"healthy-{seed}", fault("healthy", "", f"seed={seed}"))
            healthy.append(accuracy)
            alarms += bool(found)
        needed = 0.9 * sum(healthy) / len(healthy)
        print(
            "| fault | written | findings | named first | named | repaired | accuracy after |\n|---|---|---|---|---|---|---|",
            flush=True,
        )
        totals = {False: [0, 0, 0, 0], True: [0, 0, 0, 0]}
        for planted in (f for f in (*EARLY, *LATE) if not names or f.name in names):
            count = totals[planted.late]
            name = planted.name.replace(" ", "-").replace(".", "")
            try:
                findings, _ = bench.grpo(name, planted)
                here = [finding.name for finding in findings]
                first, named = here[:1] != [] and here[0] in planted.right, bool({*here} & {*planted.right})
                repaired, after = False, float("nan")
                if findings:
                    again, after = bench.grpo(f"{name}-again", planted, *findings[0].change)
                    repaired = findings[0].name not in [f.name for f in again] and after >= needed
            except Exception as error:
                here, first, named, repaired, after = (
                    [f"error: {str(error)[:80]}"],
                    False,
                    False,
                    False,
                    float("nan"),
                )
            for place, value in enumerate((1, first, named, repaired)):
                count[place] += value
            shown = ["no", "yes"]
            print(
                f"| {planted.name} | {'after' if planted.late else 'before'} | {', '.join(here) or 'none'} | {shown[first]} | "
                f"{shown[named]} | {shown[repaired]} | {after:.2f} |",
                flush=True,
            )
        for late, (number, first, named, repaired) in totals.items():
            print(
                f"\n{'After' if late else 'Before'} the rules were frozen: {number} faults, {first} named first, {named} named, {repaired} repaired."
            )
        print(
            f"\nFalse alarms: {alarms} of 10 healthy runs (accuracy {sum(healthy) / 10:.2f} at the end). {bench.seconds:.0f} s of training."
        )
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names_of_cpu = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        cpu = next(names_of_cpu, platform.processor())
        print(f"\n{cpu}, 1 thread, Python {platform.python_version()}, torch {torch.__version__}")


if __name__ == "__main__":
    main(sys.argv[1:])
