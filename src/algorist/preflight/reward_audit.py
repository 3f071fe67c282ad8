"""Audit of rewards: what each pays for completions whose worth is known, before a run optimises it.

Each problem is answered in ways that are right (the gold answer, the same value written otherwise, the worked solution, a long text)
and wrong (a near miss, nothing, all tags and no answer, cut, repeated, several answers, thinking that never ends). Wrong and right
are decided by algorist's grader. A reward is then judged by what it pays: ``judge`` has the rules.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from statistics import fmean, median
from typing import Any, Literal

from algorist.errors import RewardError
from algorist.evaluation.estimators import Interval, wilson
from algorist.prompts import PromptFormat
from algorist.rewards import Reward, RewardSet
from algorist.rewards.user import UserFunction
from algorist.store.run_log import without_warnings
from algorist.types import Group, Problem, Rollout
from algorist_grader import grade, grade_completion, hash_answer, last_boxed

RIGHT = ("gold", "rewritten", "final answer", "worked", "long")
NO_ANSWER = ("empty", "tags only", "cut", "repeated")
SEVERAL = ("several answers", "list of guesses", "unfinished thinking")
WRONG = ("near miss", *NO_ANSWER, *SEVERAL)
MEANING = {
    "gold": "a short text with the gold answer",
    "rewritten": "the gold answer written otherwise",
    "final answer": "the final answer of a gold that is a worked solution",
    "worked": "the worked solution of the data",
    "long": "a long text with the gold answer",
    "near miss": "an answer that is nearly the gold answer",
    "empty": "nothing",
    "tags only": "all tags, no answer",
    "cut": "ended before the answer",
    "repeated": "one sentence 70 times, no answer",
    "several answers": "the gold answer, then another one",
    "list of guesses": "many numbers in place of an answer, the gold answer among them",
    "unfinished thinking": "the gold answer within thinking that never ends",
}
"""Description of each kind of probe."""
FEW, MANY = 0.02, 0.2
"""Shares of problems: above ``FEW`` a wrong answer that is paid is a fault, above ``MANY`` a right one that is not."""
OWN_PROBLEMS = 8
"""Problems on which preflight tries a user's rewards, with about 30 completions each."""
SLOW_S = 0.1
"""Seconds for one completion; a step of 64 completions would wait for 6 s."""
_SHORT = "We work it out step by step."
Level = Literal["fault", "note"]


@dataclass(frozen=True)
class AuditFinding:
    """Something that a reward does wrong, or that its user should know.

    Attributes:
        reward: Its name, or ``total`` for the weighted sum.
        level: ``fault`` trains the wrong thing; ``note`` may be meant.
        name: Of the rule.
        text: What was seen.
        advice: What to change.
        share: Of the problems, with its 95 % interval; None where nothing was counted.
        example: Completion, gold answer and value of one case.
    """

    reward: str
    level: Level
    name: str
    text: str
    advice: str
    share: Interval | None = None
    example: dict[str, Any] | None = None


@dataclass
class Paid:
    """Values that one reward paid for the probes of one kind, by problem."""

    values: dict[str, list[float]] = field(default_factory=dict)
    failures: int = 0
    texts: dict[str, list[str]] = field(default_factory=dict)

    def usual(self, problem: str) -> float:
        """The median of a problem's probes."""
        return median(self.values[problem])

    @property
    def overall(self) -> float:
        """The mean over all probes; NaN without any."""
        every = [value for values in self.values.values() for value in values]
        return fmean(every) if every else math.nan


Pays = dict[str, Paid]
"""By kind of probe."""


@dataclass
class Audit:
    """Values that the rewards of a recipe paid, and faults of the rewards."""

    problems: int
    pays: dict[str, Pays]
    findings: list[AuditFinding]


@without_warnings()  # failures are findings
def audit_rewards(
    rewards: RewardSet, problems: Sequence[Problem], form: PromptFormat, *, matcher: str = "symbolic"
) -> Audit:
    """Try rewards on probes of each problem.

    Args:
        rewards: Of the recipe; those that need a trainer are left out.
        problems: With gold answers; 30 to 50 are enough.
        form: The prompt format that renders and reads completions.
        matcher: How answers are compared.
    """
    probes = {p.id: list(probes_of(p, form, matcher)) for p in problems}
    names = [*rewards.names, *(["total"] if len(rewards) > 1 else [])]
    pays: dict[str, Pays] = {name: {} for name in names}
    findings: list[AuditFinding] = []
    tried = RewardSet(reward for reward in rewards if not reward.needs_trainer)
    for kind in MEANING:
        groups = [_group(p, [r for k, r in probes[p.id] if k == kind]) for p in problems]
        groups = [group for group in groups if group.rollouts]
        before = tried.failures
        try:
            scored = tried.pay(groups)
        except RewardError as error:
            findings.append(_ends("total", error))
            break
        for name in names:
            paid = pays[name][kind] = Paid(
                failures=sum(tried.failures.values()) - sum(before.values())
                if name == "total"
                else tried.failures.get(name, 0) - before.get(name, 0)
            )
            for group in scored:
                paid.values[group.problem.id] = [_value(rollout, name) for rollout in group.rollouts]
                paid.texts[group.problem.id] = [rollout.text for rollout in group.rollouts]
    golds, ended = {p.id: p.answer for p in problems}, bool(findings)
    for reward in tried:
        if pays[reward.name]:
            try:
                findings += [] if ended else behaviour(reward, problems, probes)
            except RewardError as error:
                findings.append(_ends(reward.name, error))
            findings += judge(
                reward.name, pays[reward.name], golds, first_failure=reward.first_failure, high=reward.high
            )
    if len(rewards) > 1 and pays["total"]:
        findings += judge("total", pays["total"], golds)
    return Audit(len(problems), pays, sorted(findings, key=lambda f: f.level))


def _ends(name: str, error: RewardError) -> AuditFinding:
    return AuditFinding(name, "fault", "ends", str(error), "Correct the function first.")


def audit_own(
    rewards: RewardSet, problems: Sequence[Problem], form: PromptFormat, *, matcher: str
) -> dict[str, dict[Level, list[str]]]:
    """Audit the rewards that a user wrote, on ``OWN_PROBLEMS`` problems.

    Returns:
        Name of a reward → level → what was seen, in words, with the share of problems.
    """
    own = RewardSet(
        replace(r, function=copy(r.function), failures=0, first_failure="")  # whose counts are not the run's
        for r in rewards
        if isinstance(r.function, UserFunction) and r.weight
    )
    if not len(own) or not problems:
        return {}
    some = problems[:: max(1, len(problems) // OWN_PROBLEMS)][:OWN_PROBLEMS]
    seen: dict[str, dict[Level, list[str]]] = {name: {} for name in own.names}
    for f in audit_rewards(own, some, form, matcher=matcher).findings:
        share = f" ({f.share.value:.0%} of problems)" if f.share else ""
        for name in own.names:
            if f.reward == name or (f.reward, f.name) == ("total", "ends"):
                seen[name].setdefault(f.level, []).append(f"{f.text}{share}")
    return seen


def probes_of(problem: Problem, form: PromptFormat, matcher: str) -> Iterator[tuple[str, Rollout]]:
    """Write the probes of a problem, each read and graded; what the grader judges otherwise is left out."""
    gold = problem.answer
    same = [text for text in _rewritten(gold) if grade(text, gold, matcher=matcher).correct]
    near = [text for text in _near(gold) if not grade(text, gold, matcher=matcher).correct]
    shown = form.demonstrate(_SHORT, gold)
    final = (hash_answer(gold) or last_boxed(gold) or "").strip()
    where = shown.rfind(gold)
    opening = "" if form.prefilled_start else f"{form.tags.reasoning_open or '<think>'}\n"
    cut = shown[: max(where - len(form.tags.answer_open) - 2, len(shown) // 3)]
    texts = {
        "gold": [shown],
        "rewritten": [form.demonstrate(_SHORT, text) for text in same],
        "final answer": [form.demonstrate(_SHORT, final)] if final else [],
        "worked": [form.demonstrate(problem.solution, gold)] if problem.solution.strip() else [],
        "long": [form.demonstrate(" ".join([_SHORT, "Then we check the result once more."] * 70), gold)],
        "near miss": [form.demonstrate(_SHORT, text) for text in near],
        "empty": [""],
        "tags only": [form.demonstrate("…", "")],
        "cut": [cut],
        "repeated": [" ".join(["Then we check the result once more."] * 70)],
        "several answers": [f"{shown}\n{_stated(form, text)}" for text in near[:1]],
        "list of guesses": [form.demonstrate(_SHORT, ", ".join([*near, gold]))] if near else [],
        "unfinished thinking": [f"{opening}Perhaps it is {_stated(form, gold)}, but let me check"],
    }
    for kind, written in texts.items():
        for text in written:
            rollout = _read(problem, text, form, matcher, truncated=kind in ("cut", "unfinished thinking"))
            right = rollout.grade is not None and rollout.grade.correct
            if kind in RIGHT or not right:  # in the final answer the gold column is on trial, not the grader
                yield kind, rollout


def behaviour(
    reward: Reward, problems: Sequence[Problem], probes: Mapping[str, Sequence[tuple[str, Rollout]]]
) -> Iterator[AuditFinding]:
    """Call a reward again, in another order, and on completions alone, with a clock beside it."""
    few = [_group(p, [r for _, r in probes[p.id]]) for p in problems[:8]]
    count = sum(len(group.rollouts) for group in few)
    began = time.perf_counter()
    first = _column(reward, few)
    seconds = (time.perf_counter() - began) / max(count, 1)
    if _differ(first, _column(reward, few)):
        yield AuditFinding(
            reward.name, "fault", "random", "the same completions earn another value each time",
            "Take chance, clocks and counters out of the reward.",
        )  # fmt: skip
        return
    turned = [replace(group, rollouts=group.rollouts[::-1]) for group in few]
    other = [value for part in _split(_column(reward, turned), few) for value in part[::-1]]
    alone = [
        v
        for group in few[:2]
        for r in group.rollouts
        for v in _column(reward, [replace(group, rollouts=[r])])
    ]
    if _differ(first, other):
        yield AuditFinding(
            reward.name, "fault", "order", "a value depends on the place of its completion in the batch",
            "Pair each completion with its own row: zip(completions, answer).",
        )  # fmt: skip
    elif _differ(first[: len(alone)], alone):
        yield AuditFinding(
            reward.name, "note", "batch", "a value depends on the other completions of the batch",
            "Meant for a comparison within a group; else score each completion alone.",
        )  # fmt: skip
    if seconds > SLOW_S:
        yield AuditFinding(
            reward.name, "note", "slow", f"{seconds:.2f} s for a completion: {64 * seconds:.0f} s for a step of 64",
            "Compile patterns and load models once, outside the function.",
        )  # fmt: skip


def judge(
    name: str, pays: Pays, golds: Mapping[str, str], *, first_failure: str = "", high: float = math.inf
) -> Iterator[AuditFinding]:
    """Judge one reward, or the weighted sum, by what it paid.

    Args:
        name: Of the reward, or ``total``.
        pays: What it paid by kind of probe.
        golds: Gold answer by problem.
        first_failure: What the reward first raised.
        high: The greatest value that it declares.
    """
    failed = {kind: paid.failures for kind, paid in pays.items() if paid.failures}
    if failed and name != "total":
        kinds = ", ".join(failed)
        yield AuditFinding(
            name, "fault", "fails", f"it fails on: {kinds}. The first time: {first_failure}",
            "A completion is any text: return a number for each, also without an answer.",
        )  # fmt: skip
    every = _every(pays)
    if max(every) - min(every) < 1e-9:
        if not failed:
            yield AuditFinding(
                name, "fault", "constant", f"it pays {every[0]:g} for everything, right and wrong, full and empty",
                "Look at its pattern or column: nothing that was tried meets it.", example=_example(pays, "gold", golds),
            )  # fmt: skip
        return
    if _looks_at_answers(pays):
        yield from _judge_answers(name, pays, golds)
    elif name == "total":
        yield AuditFinding(
            name, "fault", "no_answer_counts", "the sum hardly pays a right answer more than a wrong one",
            "Add rewards=[correct, …], with more weight than the others together.",
        )  # fmt: skip
    else:
        yield from _judge_form(name, pays, golds, high)


def _judge_answers(name: str, pays: Pays, golds: Mapping[str, str]) -> Iterator[AuditFinding]:
    """Rules for a reward that looks at the answer."""
    gold, near, empty = (
        {id: pays[kind].usual(id) for id in pays[kind].values} for kind in ("gold", "near miss", "empty")
    )

    def fault(
        rule: str, kind: str, bad: list[str], text: str, advice: str, limit: float = FEW
    ) -> Iterator[AuditFinding]:
        share = wilson(len(bad), len(pays[kind].values)) if pays[kind].values else None
        if share is not None and share.value > limit:
            yield AuditFinding(
                name,
                "fault",
                rule,
                text,
                advice,
                share,
                _example(pays, kind, golds, bad[0], worst=kind in RIGHT),
            )

    if pays["gold"].overall < pays["near miss"].overall:
        yield AuditFinding(
            name, "fault", "inverted",
            f"wrong answers earn {pays['near miss'].overall:.3g} on average, right ones {pays['gold'].overall:.3g}",
            "Turn its sign, or its weight, round.", example=_example(pays, "near miss", golds),
        )  # fmt: skip
        return
    yield from fault(
        "gold_unpaid", "gold", [id for id in gold if gold[id] <= empty[id]],
        "the gold answer earns no more than an empty completion",
        "Look at how the gold column is read: a worked solution, a label or a unit beside the answer (algorist data check).",
    )  # fmt: skip
    told_apart = [id for id in gold if gold[id] > min([empty[id], *pays["near miss"].values.get(id, [])])]
    for kind in WRONG:
        yield from fault(
            f"pays_{kind.replace(' ', '_')}", kind,
            [id for id in told_apart if max(pays[kind].values.get(id, [-math.inf])) >= gold[id]],
            f"{MEANING[kind]}: paid like the gold answer",
            "A policy finds this within a few hundred steps: compare the whole answer, and read it only after the reasoning ends.",
        )  # fmt: skip
    for kind in RIGHT[1:]:
        yield from fault(
            f"{kind.replace(' ', '_')}_unpaid", kind,
            [id for id in told_apart if id in near and min(pays[kind].values.get(id, [math.inf])) <= near[id] < gold[id]],
            f"{MEANING[kind]}: paid no more than a wrong answer",
            "Compare values, not texts: rewards=[correct], or algorist.grade inside your function.", MANY,
        )  # fmt: skip
    gap = pays["long"].overall - pays["gold"].overall
    if abs(gap) > 1e-9:
        yield AuditFinding(
            name, "note", "length", f"a long right text earns {abs(gap):.3g} {'more' if gap > 0 else 'less'} than a short one",
            "Completions will grow." if gap > 0 else "Completions will shrink; reasoning may go first.",
        )  # fmt: skip


def _judge_form(name: str, pays: Pays, golds: Mapping[str, str], high: float) -> Iterator[AuditFinding]:
    """Rules for a reward that does not look at the answer: of form, length or style."""
    worst = max(NO_ANSWER, key=lambda kind: pays[kind].overall)
    gold, other = pays["gold"].overall, pays[worst].overall
    right = max(pays[kind].overall for kind in RIGHT if pays[kind].values)
    if right < other - 1e-9:
        yield AuditFinding(
            name, "note", "pays_no_answer", f"{MEANING[worst]}: earns {other:.3g}, a right completion {gold:.3g}",
            "Keep its weight well below that of correct, or pay it only for right answers.",
            example=_example(pays, worst, golds),
        )  # fmt: skip
    if math.isfinite(high) and max(_every(pays)) < high - 1e-6:
        yield AuditFinding(
            name, "note", "never_full", f"no completion that was tried reaches its greatest value, {high:g}; a right one earns {gold:.3g}",
            "If it rewards a form, are its tags those of the prompt format (prompt.format)?", example=_example(pays, "gold", golds),
        )  # fmt: skip


def _every(pays: Pays) -> list[float]:
    return [value for paid in pays.values() for values in paid.values.values() for value in values]


def _looks_at_answers(pays: Pays) -> bool:
    """Return whether a near miss is paid otherwise than the gold answer: by a twentieth of the range, since length or a sign count too."""
    near, gold = pays["near miss"], pays["gold"]
    every = _every(pays)
    least = 0.05 * (max(every) - min(every))
    ids = list(near.values)
    lower = sum(min(near.values[id]) < gold.usual(id) - least for id in ids)
    higher = sum(near.usual(id) > gold.usual(id) + least for id in ids)
    return max(lower, higher) > 0.1 * len(ids)


def _example(
    pays: Pays, kind: str, golds: Mapping[str, str], id: str | None = None, *, worst: bool = False
) -> dict[str, Any] | None:
    """Show the best paid probe of a problem, or the worst paid."""
    id = id or next(iter(pays[kind].values), None)
    if id is None:
        return None
    values = pays[kind].values[id]
    at = values.index((min if worst else max)(values))
    return {"kind": kind, "completion": pays[kind].texts[id][at], "gold": golds[id], "value": values[at]}


def _column(reward: Reward, groups: Sequence[Group]) -> list[float]:
    return [0.0 if value is None else value for value in reward.values(groups)]


def _split(values: Sequence[float], groups: Sequence[Group]) -> Iterator[Sequence[float]]:
    begin = 0
    for group in groups:
        yield values[begin : begin + len(group.rollouts)]
        begin += len(group.rollouts)


def _differ(one: Sequence[float], other: Sequence[float]) -> bool:
    return any(abs(a - b) > 1e-6 for a, b in zip(one, other, strict=True))


def _value(rollout: Rollout, name: str) -> float:
    value = rollout.reward if name == "total" else rollout.rewards.get(name)
    return 0.0 if value is None else value


def _group(problem: Problem, rollouts: list[Rollout]) -> Group:
    return Group(problem, problem.question, [], rollouts)


def _read(problem: Problem, text: str, form: PromptFormat, matcher: str, *, truncated: bool) -> Rollout:
    parsed = form.parse(text)
    grade = grade_completion(text, problem.answer, parsed=parsed, matcher=matcher, problem=problem.columns())
    return Rollout([0] * len(text.split()), text, None, truncated, parsed, grade)


def _stated(form: PromptFormat, answer: str) -> str:
    return (
        f"{form.tags.answer_open}{answer}{form.tags.answer_close}"
        if form.tags.answer_open
        else f"\\boxed{{{answer}}}"
    )


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", "").replace("$", "").strip())
    except (ValueError, ZeroDivisionError):
        return None


def _near(gold: str) -> list[str]:
    """Write answers that are nearly ``gold``; the caller asks the grader whether they differ from it."""
    value, text = _number(gold), gold.strip()
    if len(text) == 1 and text.isalpha():
        return [chr(ord(text) + 1), chr(ord(text) + 2)]
    if value is None:
        return [f"{text}+1", f"2({text})", f"-({text})"]
    digits = str(value)
    return [str(value + 1), str(value * 10), str(-value), digits + digits[-1], digits[:-1] or "7"]


def _rewritten(gold: str) -> list[str]:
    """Write ``gold`` in other ways; the caller asks the grader whether they are equal to it."""
    value, text = _number(gold), gold.strip()
    if value is None or value.denominator != 1:
        return [f"${text}$", f" {text} "]
    return [f"{value}.0", f"${value}$", *([f"{int(value):,}"] if abs(value) >= 1000 else [])]
