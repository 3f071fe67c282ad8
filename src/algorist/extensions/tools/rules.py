"""What ``diagnose`` and the warnings of a running training recognise of tools."""

from __future__ import annotations

from pathlib import Path

from algorist.diagnosis.rule import Changes, Facts, Unknown, rules_of

FAILS = 0.9
"""Share of calls that fail at which a call teaches nothing but not to call."""
REFUSED = 0.3
"""Share of calls beyond the limit at which it, not the model, decides how a problem is solved."""
UNUSED = 0.01
"""Share of rollouts with a call below which a tool is not there for the policy."""
STEPS = 5
"""Logged steps before a policy can be said not to call: it may learn it."""


def _share(f: Facts, name: str) -> float:
    if not f.settings.get("tools"):
        raise Unknown("tools")
    return float(f[f"tools/{name}_share"])


def environment_fails(f: Facts) -> bool:
    return _share(f, "environment_failed") >= FAILS


def calls_used_up(f: Facts) -> bool:
    return _share(f, "refused") >= REFUSED


def tool_fails(f: Facts) -> bool:
    return _share(f, "failed") >= FAILS


def tool_unused(f: Facts) -> bool:
    return len(f.signals.series("tools/called_share")) >= STEPS and _share(f, "called") < UNUSED


CHANGE: dict[str, Changes] = {
    "calls_used_up": {"tools.calls": lambda f: 2 * int(f.settings.get("tools.calls") or 1)}
}
RULES = tuple(rules_of(Path(__file__).with_suffix(".yaml"), globals()))
