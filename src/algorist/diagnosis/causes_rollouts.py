"""The causes, one function each: signals in, a finding or None out. Thresholds are constants with their reason.

A cause is registered with ``@CAUSES.register(name)``. ``EXPLAINS`` lists what follows from a cause and is then left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from algorist.diagnosis.findings import Finding, Settings
from algorist.diagnosis.signals import Batch, Signals
from algorist.diagnosis.windows import MIN_STEPS, pooled, recent
from algorist.registry import Registry

Cause = Callable[[Signals], Finding | None]
CAUSES: Registry[Cause] = Registry("cause")

NEARLY_ALL = 0.9
"""Share of groups without a signal from which on a run practically stands: at most one group in ten still teaches."""
MOSTLY = 0.7
"""Share of truncated or unreadable completions from which on they, not the answers, decide what is learned."""
FLAT_BY_GRADE = 0.7
"""Groups that are all right or all wrong have one reward rightly; above this share they are the reason."""
FAILS = 0.5
"""Share of completions for which a reward fails from which on its floor, not its value, is what the run learns from."""
COPIES = 0.7
"""Share of groups whose completions are all one text. A healthy run stays well below a third."""
ANSWERED = 0.5
"""Of the truncated completions, the share that already holds an answer when they do not stop because they cannot."""
END_SHOWN = 0.1
"""Share of completions with an end-of-turn token as text. One in a hundred may be a model's whim."""

EXPLAINS = {
    "nothing_answered": "no_signal all_wrong weights_unchanged",
    "no_signal": "weights_unchanged",
    "reward_fails": "flat_reward weights_unchanged no_signal",
    "not_finite": "learning_rate_too_large learning_rate_too_small weights_unchanged kl_blow_up no_signal",
    "no_stop": "truncated unparseable all_wrong weights_unchanged nothing_answered no_signal",
    "truncated": "unparseable all_wrong weights_unchanged nothing_answered no_signal",
    "length_growth": "truncated no_stop nothing_answered no_signal",
    "unparseable": "all_wrong weights_unchanged nothing_answered no_signal",
    "identical_completions": "all_right all_wrong flat_reward weights_unchanged no_signal",
    "entropy_collapse": "identical_completions no_signal",
    "all_right": "entropy_collapse weights_unchanged no_signal",
    "all_wrong": "weights_unchanged no_signal",
    "flat_reward": "weights_unchanged no_signal",
    "learning_rate_too_small": "weights_unchanged no_signal",
    "learning_rate_too_large": "no_stop truncated unparseable all_wrong identical_completions entropy_collapse "
    "length_growth nothing_answered no_signal",
    "reward_hacking": "length_growth unparseable truncated no_stop all_wrong nothing_answered no_signal",
}
"""A cause and its consequences. Breaking a policy that worked (too large a rate, a reward that pays for something else)
comes before the state in which the policy ends."""


def share(window: list[Batch], part: str, of: str = "groups") -> float:
    """Return the share of a count in another one over a window; 0 where there is nothing."""
    whole = sum(getattr(b, of) for b in window)
    return sum(getattr(b, part) for b in window) / whole if whole else 0.0


def span(window: list[Batch]) -> str:
    """Return the steps of a window in words."""
    first, last = window[0].step, window[-1].step
    return f"steps {first}–{last}" if first != last else f"step {first}"


def percent(value: float) -> str:
    """Return a share in percent; what is not quite all or nothing does not look like it."""
    shown = f"{100 * value:.0f} %"
    return f"{100 * value:.1f} %" if shown in ("0 %", "100 %") and value not in (0, 1) else shown


def by_step(signals: Signals, part: str, form: str = ".2f") -> str:
    """Return the mean of a part of the batches at up to eight steps: ``accuracy by step: 0: 0.12, 10: 0.20, …``."""
    return f"{part} by step: {per_step(signals.batches, lambda b: getattr(b, part).mean, form)}"


def per_step(batches: list[Batch], get: Callable[[Batch], float], form: str = ".2f") -> str:
    """Return a series at up to eight steps: ``0: 0.12, 10: 0.20, …``."""
    stride = max(1, -(-len(batches) // 8))
    chosen = [*batches[:-1:stride], batches[-1]]
    return ", ".join(f"{b.step}: {get(b):{form}}" for b in chosen)


def grading_reasons(window: list[Batch]) -> str:
    """Return the four most frequent reasons of a window: ``grading reasons: equal 12, no_answer 3``."""
    reasons: Counter[str] = sum((b.reasons for b in window), Counter())
    return f"grading reasons: {', '.join(f'{name} {count}' for name, count in reasons.most_common(4))}"


def sample_more_freely(settings: Settings) -> str:
    """Return the change for groups whose completions are copies of each other."""
    warmer = 1.0 if settings.number("grpo.temperature", 1.0) < 0.95 else 1.3
    return settings.change(grpo__temperature=warmer, grpo__top_k=0, grpo__top_p=1.0)


def larger_groups(signals: Signals) -> dict[str, int]:
    """Return the changes for groups twice as large; a step keeps a whole number of groups."""
    size = int(signals.settings.number("grpo.group_size", 8)) * 2
    batch = int(signals.settings.number("grpo.batch_size", 16))
    windows = int(signals.settings.number("grpo.gradient_accumulation_steps", 1))
    fits = next(w for w in range(windows, windows + size + 1) if batch * w % size == 0)
    changed = {"grpo__group_size": size}
    return changed if fits == windows else {**changed, "grpo__gradient_accumulation_steps": fits}


@CAUSES.register("all_right")
def all_right(signals: Signals) -> Finding | None:
    """Nearly every group is answered right by all its completions: no completion is better than the others."""
    window = recent(signals.batches)
    if not window or share(window, "all_right") < NEARLY_ALL:
        return None
    harder = {"gsm8k": "math", "arithmetic": "gsm8k"}.get(str(signals.settings.get("data.train.name")))
    change = {"data__train__name": harder} if harder else {}
    return Finding(
        "all_right",
        "The problems are too easy: in nearly every group all completions are right, so every advantage is 0.",
        2,
        (
            f"{percent(share(window, 'all_right'))} of the groups are all right ({span(window)})",
            by_step(signals, "accuracy"),
            f"groups without any difference in reward: {percent(share(window, 'same_reward'))}",
        ),
        signals.samples("right"),
        signals.settings.change(**change, **larger_groups(signals), grpo__temperature=1.2),
    )


@CAUSES.register("all_wrong")
def all_wrong(signals: Signals) -> Finding | None:
    """Nearly every group has no right completion, although the completions end and can be read."""
    window = recent(signals.batches)
    if not window or share(window, "all_wrong") < NEARLY_ALL:
        return None
    easier = {"math": "gsm8k"}.get(str(signals.settings.get("data.train.name")))
    change = {"data__train__name": easier} if easier else {}
    return Finding(
        "all_wrong",
        "No completion of nearly any group is right: the problems are too hard for this model, the model was not "
        "prepared, or the gold answers are not what the grader compares with.",
        1,
        (
            f"{percent(share(window, 'all_wrong'))} of the groups are all wrong ({span(window)})",
            by_step(signals, "accuracy", ".3f"),
            grading_reasons(window),
        ),
        signals.samples("wrong"),
        signals.settings.change(**change, sft__enabled=True, **larger_groups(signals)),
    )


@CAUSES.register("flat_reward")
def flat_reward(signals: Signals) -> Finding | None:
    """All completions of a group get the same reward although some are right and some are wrong."""
    window = recent(signals.batches)
    if not window or share(window, "same_reward") < NEARLY_ALL:
        return None
    if share(window, "all_right") + share(window, "all_wrong") > FLAT_BY_GRADE:
        return None
    return Finding(
        "flat_reward",
        "The rewards do not tell right from wrong: in nearly every group all completions get the same reward.",
        1,
        (
            f"{percent(share(window, 'same_reward'))} of the groups have one reward only, but only "
            f"{percent(share(window, 'all_right') + share(window, 'all_wrong'))} are all right or all wrong ({span(window)})",
            by_step(signals, "reward", ".3f"),
            by_step(signals, "accuracy"),
        ),
        (*signals.samples("right")[:1], *signals.samples("wrong")[:2]),
        "rewards:\n  - {name: correct, weight: 1.0}\n  - {name: well_formed, weight: 0.2}",
    )


@CAUSES.register("reward_fails")
def reward_fails(signals: Signals) -> Finding | None:
    """A reward raises, or returns no finite number, on most completions."""
    rollouts = sum(b.rollouts for b in signals.batches)
    failures: Counter[str] = Counter()
    for line in signals.lines.get("grpo", ()):
        for key, value in line.items():
            if key.startswith("rewards/") and key.endswith("/failures"):
                failures[key.split("/")[1]] += int(value or 0)
    if not failures or not rollouts:
        return None
    name, count = failures.most_common(1)[0]
    if count < FAILS * rollouts:
        return None
    return Finding(
        "reward_fails",
        f"The reward '{name}' fails on most completions; they get its floor, so it teaches nothing.",
        1,
        (
            f"'{name}' failed {count} times on {rollouts} completions; training.log says how",
            f"failures of each reward: {', '.join(f'{n} {c}' for n, c in failures.most_common())}",
        ),
        signals.samples("any"),
        "rewards:  # correct the function, or leave it out\n  - {name: correct, weight: 1.0}",
    )


@CAUSES.register("identical_completions")
def identical_completions(signals: Signals) -> Finding | None:
    """The completions of a group are copies of each other: there is nothing to compare."""
    window = recent(signals.batches)
    if (
        not window
        or share(window, "identical") < COPIES
        or pooled(window, lambda b: b.accuracy).mean > NEARLY_ALL
    ):
        return None
    sampling = signals.settings
    return Finding(
        "identical_completions",
        "The completions of a group are the same text, so their rewards are equal and every advantage is 0.",
        1,
        (
            f"{percent(share(window, 'identical'))} of the groups hold one text only ({span(window)})",
            f"temperature {sampling.number('grpo.temperature', 1.0):g}, top_p {sampling.number('grpo.top_p', 1.0):g}, "
            f"top_k {sampling.number('grpo.top_k', 0):g}",
            f"share of such groups by step: {per_step(signals.batches, lambda b: share([b], 'identical'))}",
        ),
        signals.samples("any"),
        sample_more_freely(sampling),
    )


@CAUSES.register("truncated")
def truncated(signals: Signals) -> Finding | None:
    """Most completions are cut off at the token limit before an answer."""
    window = recent(signals.batches)
    if not window or share(window, "truncated", "rollouts") < MOSTLY:
        return None
    limit = int(signals.settings.number("grpo.max_completion_tokens", 256))
    return Finding(
        "truncated",
        f"Most completions are cut off at the limit of {limit} tokens, before they reach an answer.",
        1,
        (
            f"{percent(share(window, 'truncated', 'rollouts'))} of the completions are truncated ({span(window)})",
            f"of these {percent(share(window, 'truncated_answered', 'truncated'))} hold an answer",
            f"mean {by_step(signals, 'tokens', '.0f')}",
        ),
        signals.samples("truncated"),
        signals.settings.change(grpo__max_completion_tokens=4 * limit),
    )


@CAUSES.register("unparseable")
def unparseable(signals: Signals) -> Finding | None:
    """Completions end, but hold no answer that can be read: tags are missing or the answer is no mathematics."""
    window = recent(signals.batches)
    if not window:
        return None
    finished = sum(b.rollouts - b.truncated for b in window)
    odd = sum(b.finished_unreadable for b in window)
    if finished < MIN_STEPS * 4 or odd / finished < MOSTLY:
        return None
    reasons: Counter[str] = sum((b.reasons for b in window), Counter())
    missing = reasons["no_answer"] >= reasons["unparseable_answer"] + reasons["ambiguous"]
    what = (
        "the answer tags of the prompt format are missing"
        if missing
        else "what stands in the answer cannot be read"
    )
    form = signals.settings.get("prompt.format", "reasoning_answer")
    return Finding(
        "unparseable",
        f"Most finished completions hold no readable answer: {what}.",
        1,
        (
            f"{percent(odd / finished)} of the finished completions are unreadable ({span(window)})",
            grading_reasons(window),
            f"{by_step(signals, 'readable')}; prompt format {form}",
        ),
        signals.samples("unreadable"),
        signals.settings.change(sft__enabled=True, sft__max_steps=200)
        + "\nrewards:\n  - {name: correct, weight: 1.0}\n  - {name: well_formed, weight: 0.5}",
    )


@CAUSES.register("no_stop")
def no_stop(signals: Signals) -> Finding | None:
    """Completions go on behind their answer, or show the end-of-turn token as text: template and stop token differ."""
    window = recent(signals.batches)
    if not window:
        return None
    cut, shown = share(window, "truncated", "rollouts"), share(window, "end_of_turn", "rollouts")
    behind = share(window, "truncated_answered", "truncated")
    if not ((cut >= MOSTLY and behind >= ANSWERED) or shown >= END_SHOWN):
        return None
    why = (
        "show an end-of-turn token as text"
        if shown >= END_SHOWN
        else "give an answer and then go on to the token limit"
    )
    name = signals.settings.get("model.name", "the model")
    return Finding(
        "no_stop",
        f"The model does not stop: completions {why}. The chat template and the tokenizer's end-of-sequence token do "
        "not belong together.",
        1,
        (
            f"{percent(cut)} of the completions are truncated, {percent(behind)} of these hold an answer ({span(window)})",
            f"{percent(shown)} of the completions show an end-of-turn token as text",
            f"set eos_token in tokenizer_config.json and eos_token_id in generation_config.json of {name} to the token "
            "that ends a turn in its chat template",
        ),
        signals.samples("end_of_turn" if shown >= END_SHOWN else "truncated_answered"),
        "# after eos_token is repaired; a base model has no end of turn before SFT\n"
        + signals.settings.change(model__chat_template="chatml.jinja", sft__enabled=True),
    )
