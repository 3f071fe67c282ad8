"""The one evaluator: during training, after it, and on any model. Greedy, and sampled when asked.

Protocol: one greedy completion per problem; ``samples`` more at the stated temperature. Every completion is parsed by
the prompt format and graded by the same grader as the reward (``correct``), and once more whatever its form: ``lenient`` is
``correct``, or its last number is the gold answer. The samples are plain rows; numbers with intervals come
from ``evaluation.estimators``. With ``progress`` an evaluation that was killed continues with the batches that are missing
and ends with the same samples: each batch draws with a seed of its own.

What makes an evaluation resumable: the finished batches on disk, ``NAME.progress.jsonl``, until the artifact is complete.
The first line is the fingerprint of everything that decides the result (model files, problems, prompt, protocol,
rewards); each further line is one finished batch. A file of another evaluation is begun anew; a torn last line is cut off."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from algorist import __version__
from algorist.config.own_files import hash_of
from algorist.config.schema import EvalSection
from algorist.config.yaml_text import leaves
from algorist.errors import DAMAGED, CheckpointError
from algorist.evaluation.protocols import REFERENCES, protocol_name
from algorist.prompts import PromptFormat
from algorist.rewards import RewardSet
from algorist.rollouts.base import RolloutEngine, SamplingParams
from algorist.rollouts.collect import collect
from algorist.store.write import rows_of
from algorist.types import Group, Problem
from algorist_grader import is_right_leniently

Rows = list[dict[str, Any]]
EVERY_S = 1.0
_WEIGHTS = (".safetensors", ".bin", ".pt", ".json", ".model", ".jinja")


def fingerprint(
    model: Path | str,
    problems: Sequence[Problem],
    prompt_format: PromptFormat,
    setting: Mapping[str, Any],
    rewards: Sequence[Any] = (),
) -> str:
    """Return 16 hexadecimal digits that change with anything the samples of an evaluation depend on.

    A model counts with the names, sizes and times of its files, one of the hub with its name, a user's code with its SHA-256.
    """
    path = Path(model)
    weights = sorted(p for p in path.iterdir() if p.suffix in _WEIGHTS) if path.is_dir() else [path]
    files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in weights if p.is_file()]
    answers = leaves(prompt_format.turns.recorded()) if prompt_format.turns else ()
    facts = {
        "algorist": __version__,
        "model": str(model),
        "files": files,
        "problems": [p.columns() for p in problems],
        "checkers": sorted((c, code_of(c.rpartition(":")[0])) for c in {p.checker for p in problems}),
        "prompt": repr(prompt_format),
        "answers": [code_of(str(value).rpartition(":")[0]) for _, value in answers],
        "setting": dict(setting),
        "rewards": [str(r) for r in rewards],
    }
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def code_of(file: Path | str) -> str:
    """Return the hash of a user's file; an empty text where there is none."""
    return hash_of(Path(file)) if Path(file).is_file() else ""


class Pulse:
    """Passes progress on: after each batch, and every second how far the batch is that is being sampled.

    Args:
        on_progress: Called with (problems done, problems in all); None for nobody.
        total: Problems in all.
    """

    def __init__(self, on_progress: Callable[[int, int], None] | None, total: int) -> None:
        self._on_progress, self._done, self._total = on_progress, 0, total
        self._inside: Callable[[], float] = lambda: 0.0
        self._shown = 0
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="evaluation-progress", daemon=True)

    def __call__(self, done: int) -> None:
        """Report the number of problems done."""
        with self._lock:
            self._done, self._inside = done, lambda: 0.0
            self._pass_on()

    def sampling(self, engine: Any, begin: float, size: float) -> None:
        """From here on ``engine`` samples what is worth ``size`` problems, after ``begin`` problems of the batch."""
        share: Callable[[], float] = getattr(engine, "share", lambda: 0.0)
        with self._lock:
            self._inside = lambda: begin + size * share()

    def _pass_on(self) -> None:
        if self._on_progress:  # what was sampled stays so while it is graded
            self._shown = max(self._shown, min(self._done + int(self._inside()), self._total))
            self._on_progress(self._shown, self._total)

    def _beat(self) -> None:
        while not self._over.wait(EVERY_S):
            with self._lock:
                self._pass_on()

    def __enter__(self) -> Pulse:
        self(0)
        if self._on_progress:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()


class Progress:
    """The finished batches of one evaluation, by the index of their first problem.

    Args:
        path: The file; made with the first batch.
        mark: ``fingerprint`` of the evaluation; batches under another one are thrown away.
    """

    def __init__(self, path: Path, mark: str) -> None:
        self.path, self.mark = path, mark
        self.batches: dict[int, Rows] = {}
        self._begun = self._load()

    def rows_at(self, start: int, problems: Sequence[Problem]) -> Rows | None:
        """Return the rows of a finished batch, or None when it has to be done."""
        rows = self.batches.get(start)
        if rows is None or list(dict.fromkeys(r["problem_id"] for r in rows)) != [p.id for p in problems]:
            return None
        return rows

    def add(self, start: int, rows: Rows) -> None:
        """Write a finished batch through to the disk.

        Raises:
            CheckpointError: The disk refuses.
        """
        text = json.dumps({"start": start, "rows": rows}, default=str) + "\n"
        try:
            if not self._begun:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text(json.dumps({"evaluation": self.mark}) + "\n", encoding="utf-8")
                self._begun = True
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path}: {error.strerror or error}; free space or permit writing there, then evaluate "
                "again: it continues where it stopped"
            ) from error
        self.batches[start] = rows

    def remove(self) -> None:
        """Take the file away, when the artifact is written."""
        self.path.unlink(missing_ok=True)

    def _load(self) -> bool:
        """Read the existing file; False when it has to be begun."""
        try:
            data = self.path.read_bytes()
        except OSError:
            return False
        lines = data.split(b"\n")[:-1]
        whole = 0
        for number, line in enumerate(lines):
            try:
                content = json.loads(line)
                if number == 0 and content["evaluation"] != self.mark:
                    return False
                if number:
                    self.batches[int(content["start"])] = content["rows"]
            except DAMAGED:
                break
            whole += len(line) + 1
        if not whole:
            return False
        if whole < len(data):
            with self.path.open("r+b") as file:
                file.truncate(whole)
        return True


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EvaluationSetting:
    """Sampling and grading settings of completions; recorded beside the numbers."""

    samples: int
    temperature: float
    top_p: float
    max_completion_tokens: int
    batch_size: int
    matcher: str
    seed: int
    stop_strings: tuple[str, ...] = ()
    protocol: str = ""
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def from_section(
        cls, section: EvalSection, *, max_tokens: int, matcher: str, seed: int, protocol: str = ""
    ) -> EvaluationSetting:
        """Return the setting of a recipe's ``eval`` section; a reference protocol reads and compares as its original does."""
        same = section.model_dump(include={"samples", "temperature", "top_p", "top_k", "batch_size"})
        tokens, stops = section.max_completion_tokens or max_tokens, tuple(section.stop_strings)
        more: dict[str, Any] = {"matcher": matcher, "seed": seed, "stop_strings": stops, "protocol": protocol}
        return cls(**same, max_completion_tokens=tokens, **more)

    def recorded(self, prompt_format: PromptFormat) -> dict[str, Any]:
        """Return the protocol as an artifact records it: its name, the settings, the prompt format."""
        name = protocol_name(self.samples, self.temperature, self.top_p, self.top_k)
        if known := REFERENCES.get(self.protocol):
            graded = f"{self.protocol}@{known.version}"
            name = graded if known.is_kept_by(self, prompt_format.name) else f"{name}, graded as {graded}"
        settings = asdict(self) | {"stop_strings": list(self.stop_strings)}
        for key in ("stop_strings", "protocol", "top_k", "min_p"):  # as artifacts without them say it
            if not settings[key]:
                del settings[key]
        kwargs = prompt_format.template_kwargs
        switches = {"template_kwargs": dict(kwargs)} if kwargs else {}
        turns = {"turns": prompt_format.turns.recorded()} if prompt_format.turns else {}
        return {"name": name, **settings, "prompt_format": prompt_format.name, **switches, **turns}


class Peers(Protocol):
    """The processes that evaluate together (``training.processes.Processes``), ``rank`` of ``count``."""

    @property
    def count(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def from_main(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the process of rank 0 and return its result in all."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""


@dataclass(frozen=True)
class Alone:
    """One process."""

    count: int = 1
    rank: int = 0

    def from_main(self, action: Callable[[], T]) -> T:
        """Run ``action`` and return its result."""
        return action()

    def gather(self, value: T) -> list[T]:
        """Return the value."""
        return [value]


def evaluate(
    engine: RolloutEngine,
    tokenizer: Any,
    problems: Sequence[Problem],
    prompt_format: PromptFormat,
    setting: EvaluationSetting,
    *,
    rewards: RewardSet | None = None,
    progress: Progress | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    greedy: bool = True,
    peers: Peers = Alone(),
) -> list[dict[str, Any]]:
    """Return one row per completion: the problem, the completion, its parse, its grade and its rewards.

    Several processes take the batches in turns. Each batch draws with a seed of its own, so the rows are those of one process.

    Args:
        engine: Any rollout engine.
        tokenizer: Renders prompts and decodes completions.
        problems: Held-out problems.
        prompt_format: Renders and parses.
        setting: Sampling and grading.
        rewards: The rewards of the recipe; their values go to ``rewards``, the weighted sum to ``reward``.
        progress: Keeps finished batches, and gives those of an evaluation that was killed; the main process's.
        on_progress: Called with (problems done, problems in all) after each batch, and every second.
        greedy: Draw the greedy completion too; without it there are the sampled ones only.
        peers: The processes that evaluate together; each must call this.
    """
    batches = {
        start: problems[start : start + setting.batch_size]
        for start in range(0, len(problems), setting.batch_size)
    }
    known = {start: progress.rows_at(start, batch) for start, batch in batches.items()} if progress else {}
    done = {start: rows for start, rows in known.items() if rows is not None}
    missing = peers.from_main(lambda: [start for start in batches if start not in done])
    with Pulse(on_progress, len(problems)) as pulse:
        for first in range(0, len(missing), peers.count):
            pulse(sum(len(batches[start]) for start in done))
            sampled: dict[int, list[dict[str, Any]]] = {}
            for start in missing[first : first + peers.count][peers.rank : peers.rank + 1]:
                groups = _collect(
                    engine, tokenizer, batches[start], prompt_format, setting, start, greedy, rewards, pulse
                )
                sampled[start] = [row for group in groups for row in _rows(group, greedy, setting.protocol)]
            for start, rows in sorted(item for part in peers.gather(sampled) for item in part.items()):
                done[start] = rows
                if progress:
                    progress.add(start, rows)
        pulse(sum(len(batches[start]) for start in done))
    # Only the main process has the batches that were there already.
    return [row for start in batches for row in done.get(start, [])]


def _collect(
    engine: RolloutEngine,
    tokenizer: Any,
    batch: Sequence[Problem],
    prompt_format: PromptFormat,
    setting: EvaluationSetting,
    start: int,
    greedy: bool,
    rewards: RewardSet | None,
    pulse: Pulse,
) -> list[Group]:
    """Return one group for each problem: the greedy completion first, then the sampled ones."""
    most, stops = setting.max_completion_tokens, setting.stop_strings
    best = SamplingParams(temperature=0.0, max_new_tokens=most, stop_strings=stops)
    seed = setting.seed + start
    filtered = replace(best, top_p=setting.top_p, top_k=setting.top_k, min_p=setting.min_p)
    drawn = replace(filtered, temperature=setting.temperature, seed=seed)
    sample = partial(collect, engine, tokenizer, batch, prompt_format, matcher=setting.matcher)
    each = len(batch) / max(1, int(greedy) + setting.samples)
    parts: list[list[Group]] = []
    for count, params in ((int(greedy), best), (setting.samples, drawn)):
        if count:
            pulse.sampling(engine, begin=each * int(greedy) * len(parts), size=each * count)
            parts.append(sample(params, count, rewards=rewards))
    seconds = sum(part[0].seconds for part in parts)
    joined = [[r for group in groups for r in group.rollouts] for groups in zip(*parts, strict=True)]
    groups = zip(parts[0], joined, strict=True)
    return [replace(group, rollouts=rollouts, seconds=seconds / len(batch)) for group, rollouts in groups]


def _rows(group: Group, greedy: bool, protocol: str) -> list[dict[str, Any]]:
    rows, problem = rows_of(group), group.problem.columns()
    for row in rows:
        if known := REFERENCES.get(protocol):
            row["extracted"], row["correct"], row["lenient"] = known.score(row["completion"], problem)
            row["reason"] = "equal_symbolic" if row["correct"] else "different"
        else:
            row["lenient"] = bool(row["correct"]) or is_right_leniently(
                row["completion"], row["gold"], problem
            )
        row["greedy"] = greedy and row["sample"] == 0
        row["seconds"] = group.seconds / len(rows)
        row["rewards"] = {name: value for name, value in row["rewards"].items() if value is not None}
        if row["reward"] is None and not row["rewards"]:
            del row["reward"], row["rewards"]
    return rows
