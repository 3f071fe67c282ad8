"""One evaluation from model to artifact: the same code during training, after it, and for any model.

What makes an evaluation resumable: the finished batches on disk, ``NAME.progress.jsonl``, until the artifact is complete.
The first line is the fingerprint of everything that decides the result (model files, problems, prompt, protocol,
rewards); each further line is one finished batch. A file of another evaluation is begun anew; a torn last line is cut off.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from algorist import __version__
from algorist.errors import DAMAGED, CheckpointError
from algorist.evaluation.artifact import Artifact, read_artifact, write_artifact
from algorist.evaluation.estimators import summarise
from algorist.evaluation.run import Alone, EvaluationSetting, Peers, evaluate
from algorist.grading import deciding_matcher
from algorist.prompts import PromptFormat
from algorist.rewards import RewardSet
from algorist.rollouts.base import RolloutEngine
from algorist.types import Problem

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

    A model folder counts with the names, sizes and times of its files, a hub model with its name.
    """
    files: list[Any] = []
    if Path(model).is_dir():
        weights = sorted(p for p in Path(model).iterdir() if p.suffix in _WEIGHTS)
        files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in weights]
    facts = {
        "algorist": __version__,
        "model": str(model),
        "files": files,
        "problems": [(p.id, p.question, p.answer) for p in problems],
        "prompt": repr(prompt_format),
        "setting": dict(setting),
        "rewards": [str(r) for r in rewards],
    }
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


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
        """Pass on that so many problems are done."""
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
        """Read what is there; False when the file has to be begun."""
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


def record_evaluation(
    folder: Path,
    name: str,
    *,
    engine: RolloutEngine,
    tokenizer: Any,
    problems: Sequence[Problem],
    prompt_format: PromptFormat,
    setting: EvaluationSetting,
    ks: Sequence[int],
    rewards: RewardSet | None,
    model: str,
    dataset: str,
    mark: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    peers: Peers = Alone(),  # noqa: B008  (frozen)
) -> Artifact:
    """Evaluate, write ``folder/name`` (the main process does) and return it.

    Args:
        folder: Gets the artifact.
        name: Name of the artifact.
        engine: Any rollout engine.
        tokenizer: Renders prompts and decodes completions.
        problems: Held-out problems.
        prompt_format: Renders and parses.
        setting: Sampling and grading.
        ks: Values of k for pass@k and maj@k.
        rewards: Rewards whose values are wanted as well.
        model: Name of the model in the artifact.
        dataset: Name of the dataset in the artifact.
        mark: ``mark_of`` the evaluation; with it a killed evaluation continues with the problems that are missing.
        on_progress: Called with (problems done, problems in all).
        peers: The processes that evaluate together; each must call this.

    Raises:
        CheckpointError: The disk refuses.
    """
    progress = Progress(folder / f"{name}.progress.jsonl", mark) if mark and peers.rank == 0 else None
    began = time.perf_counter()
    samples = evaluate(
        engine,
        tokenizer,
        problems,
        prompt_format,
        setting,
        rewards=rewards,
        progress=progress,
        on_progress=on_progress,
        peers=peers,
    )

    def write() -> Artifact:
        metrics = summarise(samples, ks=ks)
        protocol = _protocol(setting, prompt_format, ks)
        if mark:
            protocol["fingerprint"] = mark
        protocol["seconds"] = time.perf_counter() - began
        write_artifact(
            folder, name, samples=samples, metrics=metrics, protocol=protocol, model=model, dataset=dataset
        )
        if progress:
            progress.remove()
        return Artifact(name, model, dataset, protocol, metrics, samples)

    return peers.from_main(write)


def mark_of(
    model: Path | str,
    problems: Sequence[Problem],
    prompt_format: PromptFormat,
    setting: EvaluationSetting,
    ks: Sequence[int],
    rewards: RewardSet | None,
) -> str:
    """Return the fingerprint of an evaluation (see ``evaluation.progress``)."""
    weighted = [(r.__name__, r.weight, r.params) for r in rewards or ()]
    return fingerprint(model, problems, prompt_format, _protocol(setting, prompt_format, ks), weighted)


def _protocol(setting: EvaluationSetting, prompt_format: PromptFormat, ks: Sequence[int]) -> dict[str, Any]:
    return setting.recorded(prompt_format) | {"ks": list(ks), "matcher": deciding_matcher(setting.matcher)}


def finished_evaluation(folder: Path, name: str, mark: str) -> Artifact | None:
    """Return the artifact of the very same evaluation, if it stands."""
    try:
        artifact = read_artifact(folder, name)
    except CheckpointError:
        return None
    return artifact if artifact.protocol.get("fingerprint") == mark else None
