"""One evaluation from model to artifact: the same code during training, after it, and for any model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from algorist.errors import CheckpointError
from algorist.evaluation.artifact import Artifact, read_artifact, write_artifact
from algorist.evaluation.estimators import summarise
from algorist.evaluation.run import Alone, EvaluationSetting, Peers, Progress, code_of, evaluate, fingerprint
from algorist.prompts import PromptFormat
from algorist.rewards import RewardSet
from algorist.rollouts.base import RolloutEngine
from algorist.types import Problem
from algorist_grader import deciding_matcher


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
    """Return the fingerprint of an evaluation (see ``run.fingerprint``)."""
    weighted = [
        (r.__name__, r.weight, r.params, code_of(getattr(r.function, "path", ""))) for r in rewards or ()
    ]
    return fingerprint(model, problems, prompt_format, _protocol(setting, prompt_format, ks), weighted)


def _protocol(setting: EvaluationSetting, prompt_format: PromptFormat, ks: Sequence[int]) -> dict[str, Any]:
    return setting.recorded(prompt_format) | {"ks": list(ks), "matcher": deciding_matcher(setting.matcher)}


def finished_evaluation(folder: Path, name: str, mark: str) -> Artifact | None:
    """Return the finished artifact of this evaluation, or None."""
    try:
        artifact = read_artifact(folder, name)
    except CheckpointError:
        return None
    return artifact if artifact.protocol.get("fingerprint") == mark else None
