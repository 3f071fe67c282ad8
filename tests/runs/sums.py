"""Runs of a tiny model on sums, each with what a test changes; the model is taught once in a session, or was when it was recorded."""

from __future__ import annotations

import contextlib
import json
import os
import random
from functools import cached_property
from pathlib import Path

from algorist.config import load_recipe
from algorist.errors import AlgoristError
from algorist.runs.pipeline import run_recipe
from tests.runs.recorded import record, replay

SMALL = [
    "model.tiny={vocab_size: 300, hidden_size: 48, layers: 2, heads: 4, kv_heads: 2}",
    "eval.enabled=false",
]
STEPS = 12
NOT_RECORDED = {"ended_early"}
"""Runs whose checkpoints a test looks at."""


def sums(path: Path, count: int, *, seed: int, careless: float = 0.0, shift: int = 0) -> Path:
    """Write sums as JSONL; a careless solution is off by one, ``shift`` makes every gold answer and its solution wrong."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        a, b = rng.randint(1, 6), rng.randint(1, 6)
        slip = rng.choice((-1, 1)) if rng.random() < careless else 0
        rows.append(
            {
                "question": f"{a} + {b} = ?",
                "answer": str(a + b + shift),
                "solution": f"{a} + {b} = {a + b + slip + shift}",
            }
        )
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


class Runs:
    """Trains each run once, or reads it where it is recorded."""

    def __init__(self, folder: Path, *, live: bool) -> None:
        self.folder, self.live = folder, live
        self.model = folder / "start" / "sft" / "final"
        self.train = sums(folder / "train.jsonl", 400, seed=1)
        self.done: dict[str, Path] = {}
        self._run(
            "start",
            f"data.train={{name: local, path: {self.train}}}",
            f"data.sft={{name: local, path: {sums(folder / 'sft.jsonl', 2000, seed=2, careless=0.5)}}}",
            "grpo.enabled=false",
            "sft.max_steps=300",
            "sft.save_steps=200",
        )
        self.hard = folder / "hard.jsonl"
        parts = [
            sums(folder / "reachable.jsonl", 60, seed=4),
            sums(folder / "never.jsonl", 40, seed=5, shift=100),
        ]
        self.hard.write_text("".join(part.read_text(encoding="utf-8") for part in parts), encoding="utf-8")

    @cached_property
    def careful(self) -> Path:
        """A model that was taught without slips."""
        self._run(
            "careful",
            f"data.train={{name: local, path: {self.train}}}",
            f"data.sft={{name: local, path: {sums(self.folder / 'careful.jsonl', 2000, seed=2)}}}",
            "grpo.enabled=false",
            "sft.max_steps=400",
            "sft.save_steps=200",
        )
        return self.folder / "careful" / "sft" / "final"

    def __call__(
        self, name: str, *overrides: str, model: Path | None = None, data: Path | None = None
    ) -> Path:
        """Return the folder of a GRPO run with these overrides, trained at the first call."""
        if name not in self.done:
            self.done[name] = self._run(
                name,
                f"data.train={{name: local, path: {data or self.train}}}",
                f"model.name={model or self.model}",
                "sft.enabled=false",
                f"grpo.max_steps={STEPS}",
                "grpo.batch_size=64",
                "grpo.max_completion_tokens=32",
                "grpo.learning_rate=1e-3",
                "grpo.save_steps=4",
                *overrides,
            )
        return self.done[name]

    def _run(self, name: str, *overrides: str) -> Path:
        if not self.live and replay(self.folder, name, overrides):
            return self.folder / name
        settings = [*SMALL, f"output_dir={self.folder}", f"run_name={name}", *overrides]
        with contextlib.suppress(AlgoristError):  # a run that ends with an error is diagnosed all the same
            run_recipe(load_recipe("quickstart", settings).recipe)
        if self.live and "ALGORIST_RECORD" in os.environ and name not in NOT_RECORDED:
            record(self.folder, name, overrides, self.model)
        return self.folder / name
