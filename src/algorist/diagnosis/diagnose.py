"""From a run folder, or from signals, to the findings in order of severity."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from algorist.diagnosis import causes_training as _more_causes
from algorist.diagnosis.causes import CAUSES, EXPLAINS
from algorist.diagnosis.findings import Finding
from algorist.diagnosis.signals import Signals, read_signals

__all__ = ["ALL_CAUSES", "diagnose", "find_causes"]

ALL_CAUSES = tuple(CAUSES.names())
"""Names of all causes, those of ``causes_training`` included: it registers them when it is imported."""
assert _more_causes.CAUSES is CAUSES


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


def _explained(names: Iterable[str]) -> set[str]:
    return {consequence for name in names for consequence in EXPLAINS.get(name, ())}
