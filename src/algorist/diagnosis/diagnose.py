"""From a run folder, from signals, or from the completions of an evaluation, to the findings in order of severity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from algorist.diagnosis.findings import Finding, Settings
from algorist.diagnosis.rule import Facts, Share, all_rules, apply
from algorist.diagnosis.rules import MOVING_STEPS
from algorist.diagnosis.signals import MIN_GROUPS, MIN_STEPS, Signals, make_batch, read_signals, recent
from algorist.diagnosis.weights import MOVED_SHARE
from algorist.store.stages import STAGES

__all__ = ["diagnose", "find_causes", "of_evaluation", "too_little"]


def diagnose(run_folder: str | Path) -> list[Finding]:
    """Return what keeps a run from learning, the most severe first; empty for a healthy run.

    Args:
        run_folder: A run, finished or not.

    Raises:
        CheckpointError: There is no run, or a part of it is damaged.
    """
    return find_causes(read_signals(Path(run_folder)))


def find_causes(signals: Signals) -> list[Finding]:
    """Return the findings of signals, without those that follow from another one."""
    views = [Facts(signals.settings, signals=signals, stage=stage) for stage in STAGES]
    return apply(list(all_rules().values()), *views)


def too_little(signals: Signals) -> str:
    """Return why a run without findings cannot be judged yet, or an empty string."""
    lines = sum(len(lines) for lines in signals.lines.values())
    if lines < MIN_STEPS and not signals.batches:
        return f"fewer than {MIN_STEPS} steps were logged"
    if not signals.batches:
        return "GRPO has not begun; nothing is wrong in SFT" if signals.settings.get("grpo.enabled") else ""
    change = signals.weights.get("grpo")
    if change is not None and (change.empty_adapter or change.share < MOVED_SHARE):
        return f"the weights have not moved yet, which {MOVING_STEPS} steps with a gradient decide"
    if recent(signals.batches):
        return ""
    return f"it takes {MIN_STEPS} GRPO steps and {MIN_GROUPS} groups of completions"


RULES_OF_EVALUATION = ("nothing_answered", "truncated", "no_stop")
"""What a few completions of a model show, whether or not it was trained."""


def of_evaluation(rows: Sequence[Mapping[str, Any]], protocol: Mapping[str, Any]) -> list[Finding]:
    """Return what the rules say of the completions of an evaluation.

    Args:
        rows: Its samples, with the columns of ``store.rows.SCHEMA``.
        protocol: How they were drawn.
    """
    if not rows:
        return []
    batch, count = make_batch(rows), len(rows)
    facts = {
        "where": f"{count} completions",
        "completions": count,
        "silent": batch.unreadable,
        "unreadable": Share(batch.unreadable / count),
        "truncated": Share(batch.truncated / count),
        "truncated_answered": Share(batch.truncated_answered / max(1, batch.truncated)),
        "end_of_turn": Share(batch.end_of_turn / count),
        "reasons": dict(Counter(batch.reasons).most_common(4)),
        "limit": protocol.get("max_completion_tokens"),
        "prompt_format": protocol.get("prompt_format"),
    }
    rules = all_rules()
    return apply([rules[name] for name in RULES_OF_EVALUATION], Facts(Settings(), facts))
