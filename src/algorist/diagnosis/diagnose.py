"""From a run folder, or from signals, to the findings in order of severity."""

from __future__ import annotations

from pathlib import Path

from algorist.diagnosis.findings import Finding
from algorist.diagnosis.rule import Facts, all_rules, apply
from algorist.diagnosis.rules_training import MOVING_STEPS
from algorist.diagnosis.signals import Signals, read_signals
from algorist.diagnosis.weights import MOVED_SHARE
from algorist.diagnosis.windows import MIN_GROUPS, MIN_STEPS, recent
from algorist.store.stages import STAGES

__all__ = ["diagnose", "find_causes", "too_little"]


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
