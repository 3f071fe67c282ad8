"""What ``diagnose`` and the warnings of a running training recognise of tools."""

from __future__ import annotations

from algorist.diagnosis.rule import Facts, Unknown, make_rule

FAILS = 0.9
"""Share of calls that fail at which a call teaches nothing but not to call."""
UNUSED = 0.01
"""Share of rollouts with a call below which a tool is not there for the policy."""
STEPS = 5
"""Logged steps before a policy can be said not to call: it may learn it."""


def _settings(f: Facts) -> None:
    if not f.settings.get("tools"):
        raise Unknown("tools")


def tool_fails(f: Facts) -> bool:
    """Nearly every call of a tool fails: the tool is broken, or the model does not know how to call it.

    **Recognised**: at least {FAILS} of the calls, in the median of the last quarter of the logged steps.

    **Change**: look at the calls (`algorist inspect RUN --sql 'select turns from rollouts'`) and correct the tool; or teach its form with
    SFT, or train without it.
    """
    _settings(f)
    return bool(f["tools/failed_share"] >= FAILS)


def tool_unused(f: Facts) -> bool:
    """The recipe has tools, and the model does not call them.

    **Recognised**: after {STEPS} logged steps fewer than {UNUSED} of the rollouts hold a call, in the median of the last quarter.

    **Change**: SFT on demonstrations with calls, a prompt that shows a call, or training without tools.
    """
    _settings(f)
    return bool(len(f.signals.series("tools/called_share")) >= STEPS and f["tools/called_share"] < UNUSED)


def environment_fails(f: Facts) -> bool:
    """Nearly every reply of the environment is an error of its code, which the model reads as the environment's words.

    **Recognised**: at least {FAILS} of the replies, in the median of the last quarter of the logged steps.

    **Change**: correct the environment; the replies show the error (`algorist inspect RUN --sql 'select turns from rollouts'`).
    """
    _settings(f)
    return bool(f["tools/environment_failed_share"] >= FAILS)


RULES = (
    make_rule(
        environment_fails,
        1,
        facts="tools/environment_failed_share tools/environment_replies_per_rollout",
        says="Nearly every reply of the environment is an error of its code. Look at them: algorist inspect RUN --sql 'select turns from rollouts'",
        explains="all_wrong nothing_answered no_signal",
        samples="wrong",
    ),
    make_rule(
        tool_fails,
        2,
        facts="tools/failed_share tools/calls_per_rollout tools/timeout_share",
        says="Nearly every call of a tool fails, so a call teaches nothing but not to call. Look at them: algorist inspect RUN --sql 'select turns from rollouts'",
        change={"tools": None},
        explains="tool_unused all_wrong",
        samples="wrong",
    ),
    make_rule(
        tool_unused,
        3,
        facts="tools/called_share tools/calls_per_rollout",
        says="The model does not call its tools.",
        change={"sft.enabled": True},
        samples="any",
    ),
)
