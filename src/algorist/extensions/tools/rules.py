"""What ``diagnose`` and the warnings of a running training recognise of tools."""

from __future__ import annotations

from pathlib import Path

from algorist.diagnosis.rule import Changes, Facts, rules_of

FAILS = 0.9
"""Share of calls that fail at which a call teaches nothing but not to call."""
REFUSED = 0.3
"""Share of calls beyond the limit at which it, not the model, decides how a problem is solved."""
UNUSED = 0.01
"""Share of rollouts with a call below which a tool is not there for the policy."""
STEPS = 5
"""Logged steps before a policy can be said not to call: it may learn it."""


def tool_unused(f: Facts) -> bool:
    logged = len(f.signals.series("tools/called_share")) >= STEPS
    return bool(f.settings.get("tools")) and logged and f["tools/called_share"] < UNUSED


CHANGE: dict[str, Changes] = {
    "calls_used_up": {"tools.calls": lambda f: 2 * int(f.settings.get("tools.calls") or 1)}
}
RULES = tuple(rules_of(Path(__file__).with_suffix(".yaml"), globals()))
