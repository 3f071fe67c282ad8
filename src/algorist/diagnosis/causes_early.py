"""Causes that are certain from the first steps on: no completion has an answer, no reward differs from another."""

from __future__ import annotations

from algorist.diagnosis.causes_rollouts import CAUSES, grading_reasons, larger_groups, percent, share, span
from algorist.diagnosis.findings import Finding
from algorist.diagnosis.signals import Signals

ENOUGH = 64
"""Completions that say enough in a single step; in two steps a quarter of them does."""
NONE_ANSWERED = 0.98
"""Share without a readable answer from which on there is nothing to grade."""


def is_enough(signals: Signals) -> bool:
    """Tell whether there are enough completions to say that something never happened."""
    completions = sum(b.rollouts for b in signals.batches)
    return completions >= (ENOUGH if len(signals.batches) < 2 else ENOUGH // 4)


@CAUSES.register("nothing_answered")
def nothing_answered(signals: Signals) -> Finding | None:
    """Not one completion in fifty has an answer that can be read, from the first step to the last."""
    seen = signals.batches
    if not is_enough(signals) or share(seen, "unreadable", "rollouts") < NONE_ANSWERED:
        return None
    completions, silent = sum(b.rollouts for b in seen), sum(b.unreadable for b in seen)
    cut = share(seen, "truncated", "rollouts")
    limit = int(signals.settings.number("grpo.max_completion_tokens", 256))
    form = signals.settings.get("prompt.format", "reasoning_answer")
    change = {"grpo__max_completion_tokens": 4 * limit} if cut >= 0.5 else {}
    return Finding(
        "nothing_answered",
        f"{silent} of {completions} completions have no answer that can be read, so none can be right: the model does not "
        f"write the prompt format {form}"
        + (f", or does not reach the answer within {limit} tokens." if change else "."),
        1,
        (
            f"{grading_reasons(seen)} ({span(seen)})",
            f"{percent(cut)} of the completions are cut off at {limit} tokens",
        ),
        signals.samples("unreadable") or signals.samples("truncated"),
        signals.settings.change(**change, sft__enabled=True)
        + "\n# or a format that the model already writes: prompt.format, then algorist preflight RECIPE",
    )


@CAUSES.register("no_signal")
def no_signal(signals: Signals) -> Finding | None:
    """In no group does one reward differ from another: every advantage is 0, from the first step to the last."""
    seen = signals.batches
    groups = sum(b.groups for b in seen)
    if not is_enough(signals) or not groups or sum(b.same_reward for b in seen) < groups:
        return None
    completions, rewards = sum(b.rollouts for b in seen), [b.reward.mean for b in seen]
    zero = max(rewards) == min(rewards) == 0
    what = "every reward is 0" if zero else "all completions of a group get the same reward"
    return Finding(
        "no_signal",
        f"Nothing can be learned so far: {what} ({completions} completions in {groups} groups), so every advantage is 0.",
        1,
        (
            f"mean reward between {min(rewards):.3g} and {max(rewards):.3g} ({span(seen)})",
            grading_reasons(seen),
        ),
        signals.samples("any"),
        signals.settings.change(sft__enabled=True, **larger_groups(signals)),
    )


@CAUSES.register("ended_early")
def ended_early(signals: Signals) -> Finding | None:
    """``grpo.stop`` ended the run at its best checkpoint."""
    best, ended = signals.best, signals.best.get("ended")
    if not ended:
        return None
    rate = signals.settings.number("grpo.learning_rate", 1e-6)
    collapse = ended.get("reason") == "collapse"
    change = {"grpo__learning_rate": float(f"{rate / 10:.1e}")} if collapse else {}
    every = int(signals.settings.number("grpo.eval_every", 10))
    patience = int(signals.settings.number("grpo.stop.patience", 20))
    what = "collapsed" if collapse else "stopped improving"
    return Finding(
        "ended_early",
        f"The run was ended after step {ended.get('step')} because it {what}; grpo/final is its best checkpoint, of step "
        f"{best.get('step')}.",
        2 if collapse else 3,
        (
            str(ended.get("why")),
            f"held-out accuracy of grpo/{best.get('checkpoint')}: {best.get('greedy_accuracy', 0.0):.3f}",
        ),
        (),
        signals.settings.change(**change, grpo__eval_every=every, grpo__stop__patience=2 * patience),
    )
