"""From a run folder, or from signals, to the findings in order of severity."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from algorist.diagnosis import causes_early, causes_optimisation  # noqa: F401 (they register their causes)
from algorist.diagnosis.causes_optimisation import MOVING_STEPS
from algorist.diagnosis.causes_rollouts import CAUSES, EXPLAINS
from algorist.diagnosis.findings import Finding
from algorist.diagnosis.signals import Signals, read_signals
from algorist.diagnosis.weights import MOVED_SHARE
from algorist.diagnosis.windows import MIN_GROUPS, MIN_STEPS, recent

__all__ = ["ALL_CAUSES", "diagnose", "find_causes", "too_little"]

ALL_CAUSES = tuple(CAUSES.names())
"""Names of all causes."""


def diagnose(run_folder: str | Path) -> list[Finding]:
    """Return what keeps a run from learning, the gravest first; empty for a healthy run.

    Args:
        run_folder: A run, finished or not.

    Raises:
        CheckpointError: There is no run, or a part of it is damaged.
    """
    return find_causes(read_signals(Path(run_folder)))


def find_causes(signals: Signals) -> list[Finding]:
    """Return the findings of signals, without those that follow from another one."""
    found = {name: finding for name in CAUSES if (finding := CAUSES.get(name)(signals)) is not None}
    roots = found.keys() - _explained(found)
    kept = found.keys() - _explained(roots)
    return sorted((found[name] for name in kept), key=lambda f: (f.severity, f.name))


def too_little(signals: Signals) -> str:
    """Return why a run without findings cannot be judged yet, or an empty string."""
    lines = sum(len(lines) for lines in signals.lines.values())
    if not signals.batches:
        return "" if lines >= MIN_STEPS else f"fewer than {MIN_STEPS} steps were logged"
    change = signals.weights.get("grpo")
    if change is not None and (change.empty_adapter or change.share < MOVED_SHARE):
        return f"the weights have not moved yet, which {MOVING_STEPS} steps with a gradient decide"
    if recent(signals.batches):
        return ""
    return f"it takes {MIN_STEPS} GRPO steps and {MIN_GROUPS} groups of completions"


def _explained(names: Iterable[str]) -> set[str]:
    return {consequence for name in names for consequence in EXPLAINS.get(name, "").split()}
