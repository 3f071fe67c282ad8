"""Facts of the course of a run: rise and fall of its accuracy, its data, stop strings and matcher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

from algorist.declared import registered
from algorist.diagnosis.demonstrations import (
    ENOUGH_ROWS,
    absent_answers,
    answers_alone,
    cut_questions,
    cut_solutions,
    earlier_answers,
    local_problems,
    other_endings,
)
from algorist.diagnosis.facts import share, window
from algorist.diagnosis.rule import Facts, Share, Unknown, fact
from algorist.diagnosis.signals import (
    NUMBER,
    Moments,
    ends,
    middle,
    pooled,
    same_number,
    stop_strings,
    z_score,
)
from algorist.diagnosis.sums import wrong_sums
from algorist.store.read import query
from algorist.store.safe_text import one_line
from algorist.types import Problem
from algorist_grader.extract import last_number

RISEN = 2.0
"""Standard errors from the first to the last window from which on an accuracy has risen."""
MOST_OF_THEM = 0.5
"""Share of problems whose question shows that it comes from another column."""

LOOKED_AT = 2000
"""Rows that are looked at."""
SEVERAL = 3
"""Gold answers of one question that are no slip of the data."""
PLACEHOLDERS = ("0", "1")
"""Gold answers that most problems may have: labels, and what an environment does not read."""
NEARLY_EVERY, HARDLY_ANY, ABSENT = 0.8, 0.2, 0.2
"""Shares of problems that are no chance: of questions that end in their gold answer, of solutions that do, and of those that hold it
nowhere (of those of GSM8K's test set 0.004)."""
WRONG_PAID = 0.3
"""Share of the wrong completions that earn as much as right ones, of rewards that hardly tell them apart; by ``correct`` none does."""
SAME = 1e-6
"""Difference of rewards that are one value."""
FELL_TO = 0.5
"""Part of what a right completion earned at first that is left at the end."""


@fact("accuracy in the first and the last window: {accuracy_course}")
def accuracy_rise(f: Facts) -> float:
    """Return the difference in standard errors."""
    first, last = ends(f.signals.batches)
    if not first:
        raise Unknown("windows")
    return z_score(*(pooled(part, lambda b: b.accuracy) for part in (first, last)), least_variance=0.01)


@fact("{}")
def accuracy_course(f: Facts) -> str:
    first, last = ends(f.signals.batches)
    before, after = (pooled(part, lambda b: b.accuracy).mean for part in (first, last))
    return f"{before:.2f} → {after:.2f} ({f['accuracy_rise']:+.1f} SE)"


def rises(f: Facts) -> bool:
    """Return whether the accuracy clearly rises; no where that is not known."""
    return bool(f.get("accuracy_rise", 0.0) >= RISEN)


@fact("a teacher or another signal beside the rewards: {}")
def taught(f: Facts) -> bool:
    """See whether an extension has a signal of its own."""
    return any(
        f.settings.get(f"{section}.{key}" if section else key)
        for cls in registered()
        if getattr(cls, "teaches", False)
        for section, keys in cls.keys.items()
        for key in keys.model_fields
    )


@fact("no reward has a weight: {}")
def unpaid(f: Facts) -> bool:
    """See whether the rewards are measured only, because something else teaches."""
    weights = [float(reward.get("weight", 1.0)) for reward in f.settings.rewards()]
    return bool(f["taught"] and weights and not any(weights))


@fact("longest step: {:.2g} of the weights' length")
def longest_step(f: Facts) -> float | None:
    return max((v for _, v in f.signals.series("ledger/step/length", f.stage)), default=None)


@fact("advantage and correctness agree by {:+.2f}, median over the run")
def aligned(f: Facts) -> float | None:
    return middle(series) if (series := f.signals.series("ledger/correct/advantage")) else None


@fact("{} of the completions end with one of the stop strings {stop_strings} and have no answer")
def stopped(f: Facts) -> Share:
    """Count them in the recent window, or where the accuracy does not rise in the first: a policy learns to avoid what ends it."""
    first, _ = ends(f.signals.batches)
    before = 0.0 if rises(f) else share(first, "stopped", "rollouts")
    return Share(max(share(window(f), "stopped", "rollouts"), before))


@fact("{} of the wrong completions earn what right ones do on average")
def wrong_paid(f: Facts) -> Share | None:
    """Compare rewards of wrong completions with the mean of right ones, in the last quarter of the steps; None where all are paid alike."""
    if (run := f.signals.run) is None:
        return None
    last = "stage = 'grpo' AND step >= (SELECT 0.75 * max(step) FROM rollouts WHERE stage = 'grpo') AND isfinite(reward)"
    columns = (
        f"SELECT correct, reward, avg(reward) FILTER (correct) OVER () AS usual FROM rollouts WHERE {last}"
    )
    counts = "avg((reward >= usual)::INT) FILTER (NOT correct) AS share, count(*) FILTER (NOT correct) AS n"
    (row,) = query(run, f"SELECT {counts}, max(reward) - min(reward) AS spread FROM ({columns})")
    known = row["n"] >= ENOUGH_ROWS and row["share"] is not None and row["spread"] > SAME
    return Share(row["share"]) if known else None


def reward_pays_wrong(f: Facts) -> bool:
    return f["wrong_paid"] >= WRONG_PAID and not rises(f) and not f["taught"]


@fact("{}", "stop_strings")
def _stop_strings(f: Facts) -> str | None:
    return ", ".join(map(repr, stop_strings(f.settings))) or None


@fact("{} of the answers with the number of the gold answer are called wrong ({same_number} of {where})")
def misjudged(f: Facts) -> Share:
    return share(window(f), "same_number_wrong", "same_number")


@fact("{} completions have the number of the gold answer", "same_number")
def _same_number(f: Facts) -> int:
    return sum(b.same_number for b in window(f))


@fact("matcher {}")
def matcher(f: Facts) -> str:
    return str(f.settings.get("matcher", "symbolic"))


@fact("{}", "odd_data")
def _data_of(f: Facts) -> dict[str, str]:
    """Collect the oddities of a run's problems: of its training data where that is a local file, and of its rollouts."""
    run = f.signals.run
    if run is None:
        return {}
    rows = query(
        run,
        "SELECT DISTINCT problem_id, question, gold, checker FROM rollouts WHERE stage = 'grpo' LIMIT 2000",
    )
    sampled = [
        Problem(str(r["problem_id"]), str(r["question"]), str(r["gold"]), checker=r["checker"] or "")
        for r in rows
        if r["question"]
    ]
    return odd_data(local_problems(f.signals.run, "train"), f["demonstrations"]) | odd_data(sampled)


@fact("a right completion earned {}")
def paid_for_right(f: Facts) -> str | None:
    """Compare what right completions earn at first and at the end, where it falls to less than a half."""
    first, last = (sum((b.paid for b in part), Moments()) for part in ends(f.signals.batches))
    if min(first.n, last.n) < ENOUGH_ROWS or not 0 <= last.mean < FELL_TO * first.mean:
        return None
    return f"{first.mean:.2f} in the first window, {last.mean:.2f} in the last one"


@fact("{}", "falling_reward")
def _falling_reward(f: Facts) -> str:
    """Name the reward whose part of the sum falls most from the first to the last quarter of the logged steps."""
    falls = {}
    for reward in f.settings.rewards():
        name = str(reward["name"]).rpartition(":")[2]
        first, last = ends(f.signals.series(f"rewards/{name}/mean"))
        falls[name] = float(reward.get("weight", 1.0)) * (middle(first) - middle(last)) if first else 0.0
    return max(falls, key=falls.__getitem__, default="a reward")


for _name in (
    "odd_questions",
    "one_question",
    "stated_answers",
    "other_golds",
    "cut_questions",
    "cut_solutions",
    "earlier_answers",
    "answers_alone",
    "wrong_sums",
):

    @fact("{}", _name)
    def _(f: Facts, name: str = _name) -> str | None:
        return f["odd_data"].get(name)


def odd_data(problems: Sequence[Problem], demonstrations: Sequence[Problem] = ()) -> dict[str, str]:
    """Collect the oddities of problems and of SFT's demonstrations, by the fact that says them; of many, of evenly spaced ones."""
    problems, demonstrations = (
        rows[:: max(1, len(rows) // LOOKED_AT)] for rows in (problems, demonstrations)
    )
    signs = {
        "odd_questions": _other_column(problems),
        "one_question": _one_question(problems),
        "stated_answers": _stated(problems) or _stated(demonstrations),
        "other_golds": _other_golds(problems),
        "cut_questions": cut_questions(problems) or cut_questions(demonstrations),
        "cut_solutions": cut_solutions(demonstrations),
        "earlier_answers": earlier_answers(demonstrations),
        "answers_alone": answers_alone(demonstrations),
        "wrong_sums": wrong_sums(demonstrations),
    }
    return {name: text for name, text in signs.items() if text}


def _one_question(problems: Sequence[Problem]) -> str | None:
    count = Counter(problem.question.strip() for problem in problems)
    question, times = max(count.items(), key=lambda item: item[1], default=("", 0))
    if len(problems) < ENOUGH_ROWS:
        return None
    if times >= MOST_OF_THEM * len(problems):
        return f"{times} of {len(problems)} problems are the same one: {one_line(question, 60)}"
    gold, times = Counter(p.answer.strip() for p in problems).most_common(1)[0]
    meant = gold in PLACEHOLDERS or not same_number(gold, gold) or any(p.checker for p in problems)
    if meant or times < NEARLY_EVERY * len(problems):
        return None
    return f"{times} of {len(problems)} different problems have one gold answer: {one_line(gold, 20)}"


def _stated(problems: Sequence[Problem]) -> str | None:
    for place, which in (("begin with", 0), ("end in", -1)):
        numbers = ((p, NUMBER.findall(p.question.replace(",", "").replace("-", " "))) for p in problems)
        stated = [p for p, each in numbers if each and not p.checker and same_number(each[which], p.answer)]
        if len(problems) >= ENOUGH_ROWS and len(stated) >= NEARLY_EVERY * len(problems):
            shown = stated[0].question[:60] if which == 0 else f"…{stated[0].question[-60:]}"
            return f"{len(stated)} of {len(problems)} questions {place} their answer, such as: {one_line(shown, 61)}"
    return None


def _other_golds(problems: Sequence[Problem]) -> str | None:
    count, other = other_endings(problems)
    if count < ENOUGH_ROWS:
        return None
    known, absent = absent_answers(problems)
    if len(absent) >= ABSENT * known > 0:
        return (
            f"{len(absent)} of {known} worked solutions hold their gold answer nowhere, such as "
            f"{one_line(absent[0].answer, 20)}, where the solution ends in {last_number(str(absent[0].solution))}"
        )
    if len(other) < (1 - HARDLY_ANY) * count:
        return None
    problem, number = other[0]
    return (
        f"{len(other)} of {count} worked solutions end in another number, such as {number} where the gold answer is "
        f"{one_line(problem.answer, 20)}"
    )


def _other_column(problems: Sequence[Problem]) -> str | None:
    """Return the sign that questions come from another column; None where there is none."""
    if len(problems) < 4:
        return None
    golds: dict[str, set[str]] = {}
    for problem in problems:
        golds.setdefault(problem.question.strip(), set()).add(problem.answer.strip())
    several = {question for question, answers in golds.items() if len(answers) >= SEVERAL}
    clash = sum(problem.question.strip() in several for problem in problems)
    if clash >= MOST_OF_THEM * len(problems):
        one = max(several, key=lambda question: len(golds[question]))
        return (
            f"{clash} of {len(problems)} problems have a question with several other answers: "
            f"{one_line(one, 60)} has {len(golds[one])} gold answers"
        )
    if _mean(p.question.strip() == p.answer.strip() for p in problems) >= MOST_OF_THEM:
        return f"the questions are the gold answers, such as {one_line(problems[0].question, 60)}"
    asks = _mean("?" in p.question for p in problems)
    for name in {name for p in problems[:200] for name, text in p.extra.items() if isinstance(text, str)}:
        texts = [str(p.extra.get(name) or "") for p in problems]
        if asks < 1 - MOST_OF_THEM and _mean("?" in text for text in texts) >= max(MOST_OF_THEM, 2 * asks):
            return (
                f"the column {name} asks ({one_line(texts[0], 60)}), the questions do not "
                f"({one_line(problems[0].question, 60)})"
            )
    return None


def _mean(values: Iterable[bool]) -> float:
    return fmean([*values] or [0.0])
