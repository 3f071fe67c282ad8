"""Facts of a run's evaluations beside its rollouts: what one solves and the other does not, and what rollouts were paid for."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from algorist.diagnosis.course import rises
from algorist.diagnosis.rule import Facts, Share, Unknown, fact
from algorist.diagnosis.signals import MIN_GROUPS, Moments, ends, pooled, same_number
from algorist.diagnosis.weights import MOVED_SHARE
from algorist.store.read import query
from algorist.store.safe_text import one_line

APART, SOLVED = 0.4, 0.9
"""Difference of held-out and training accuracy that no temperature makes, and a training accuracy that leaves nothing to learn."""
FAR_BELOW, SOME = 0.3, 0.1
"""Part of the held-out accuracy, of at least the second, below which the first rollouts are not just sampled where the other is greedy."""
OFTEN, AHEAD = 8, 0.25
"""Times that each problem was sampled, and lead of their accuracy over that of held-out problems, of what is known by heart."""
CUT_MORE = 0.3
"""Share of an evaluation's completions that is cut off beyond that of the rollouts."""
LOST, UNMOVED, TRAINED = -3.0, 2.0, 1e-4
"""Standard errors by which held-out accuracy has fallen, and within which it is as it was, after a step so long (of the weights)."""
FEW_BATCHES = 8
"""Rollout batches of a whole run that are too few."""
NOTHING = 0.5
"""Share of the wrong completions that get no reward at all."""
MOSTLY_WORDS = 0.7
"""Share of the completions whose answer is a number where the gold answer holds none."""
MISREAD, READ = 0.15, 0.9
"""Lenient accuracy beyond the strict one, where so many completions are in the format, that shows that answers are read wrongly."""
AS_BEFORE, SELDOM = 0.98, 2.0
"""Share of an evaluation's completions that stay word for word where the policy learned; and times that a problem is sampled before
it could be known by heart."""
ENDED = 0.5
"""Part of the steps before whose end no plugin should end a run."""
NOT_ASKED = 0.5
"""Share of the rollouts whose prompt does not hold their question."""
ACCEPTED = 0.3
"""Share of the answers called right whose number is not that of the gold answer; 50 % for 0.5 is one, too."""


def evaluated(f: Facts, stage: str) -> dict[str, Any]:
    """Return the evaluation after a stage, or of the ``base`` (Unknown: there is none)."""
    with suppress(OSError, ValueError):
        return dict(json.loads((run_of(f) / "eval" / f"{stage}.json").read_text(encoding="utf-8")))
    raise Unknown("evaluation")


def run_of(f: Facts) -> Path:
    """Return the folder of a run (Unknown: it still trains, or there is none)."""
    if f.signals.run is None:
        raise Unknown("run")
    return f.signals.run


def _before(f: Facts) -> str:
    """Return the evaluation before GRPO: after SFT, where this run has done that."""
    return "sft" if (run_of(f) / "eval" / "sft.json").is_file() else "base"


def _metric(f: Facts, stage: str, name: str = "greedy_accuracy") -> Moments:
    """Return a share of the evaluation after a stage, of its problems (Unknown: there is none)."""
    try:
        value = evaluated(f, stage)["metrics"][name]
        right = value["value"] * value["n"]
    except (KeyError, TypeError):
        raise Unknown(name) from None
    return Moments(value["n"], right, right)


def _gain(f: Facts, start: str = "", end: str = "grpo") -> tuple[float, float]:
    """Return the gain of held-out accuracy between two evaluations, those around GRPO, and its standard error."""
    before, after = _metric(f, start or _before(f)), _metric(f, end)
    variance = sum(m.mean * (1 - m.mean) / m.n for m in (before, after))
    return after.mean - before.mean, math.sqrt(max(variance, 1e-6))


@fact("held-out accuracy before GRPO {}")
def held_out_before(f: Facts) -> Share:
    return Share(_metric(f, _before(f)).mean)


@fact("right in the first window of rollouts {}")
def first_rollouts(f: Facts) -> Share:
    first, _ = ends(f.signals.batches)
    if sum(b.groups for b in first) < MIN_GROUPS:
        raise Unknown("rollouts")
    return Share(pooled(first, lambda b: b.accuracy).mean)


@fact("the same model solves far fewer training problems than held-out ones: {}")
def far_below(f: Facts) -> bool:
    before = f["held_out_before"]
    return bool(_same_source(f) and before >= SOME and f["first_rollouts"] <= FAR_BELOW * before)


@fact("the same model solves far fewer held-out problems than training ones: {}")
def far_above(f: Facts) -> bool:
    first = f["first_rollouts"]
    return bool(_same_source(f) and first >= SOME and f["held_out_before"] <= FAR_BELOW * first)


def _taught_nothing(f: Facts) -> bool:
    """See whether training problems of another kind are solved far less often at the start, and neither they nor held-out ones more often."""
    before = f.get("held_out_before", 0.0)
    below = before >= SOME and f.get("first_rollouts", 1.0) <= FAR_BELOW * before
    return below and not rises(f) and f.get("held_out_errors", 1.0) <= 0 and bool(f.get("kinds"))


def _same_source(f: Facts) -> bool:
    """See whether training and held-out problems come from one dataset, or files; those of another one may well be harder."""
    return bool(f.settings.get("data.train.name") == f.settings.get("data.eval.name"))


@fact("accuracy {}")
def held_out_apart(f: Facts) -> str | None:
    """Compare training and held-out problems: before GRPO; and after it, where the first were solved at the start, are harder, or taught nothing."""
    first, last = ends(f.signals.batches)
    cool = f.number("grpo.temperature", 1.0) <= 1
    if f.get("far_above") or (cool and (f.get("far_below") or _taught_nothing(f))):
        return f"before GRPO: {f['held_out_before']} on held-out problems, {f['first_rollouts']} on training ones"
    if f.signals.run is None or not first:
        return None
    before, after = (pooled(part, lambda b: b.accuracy).mean for part in (first, last))
    held_out = f["held_out"]
    still = (
        f.get("accuracy_rise") is not None
        and not rises(f)
        and abs(f.get("held_out_errors", LOST)) < UNMOVED
        and (f.get("longest_step") or 0.0) >= TRAINED
    )
    unmoved = abs(f.get("held_out_errors", LOST)) < UNMOVED and f.get("kinds")
    below = (before >= SOLVED and held_out <= before - APART) or (still and held_out <= before - AHEAD)
    below = below or (unmoved and held_out <= after - APART)
    if below or held_out >= after + APART:
        return f"{before:.2f} → {after:.2f} on training problems, {held_out:.2f} on held-out ones"
    return None


@fact("{} of the held-out problems are solved after the stage")
def held_out(f: Facts) -> Share:
    return Share(_metric(f, f.stage).mean)


@fact("held-out accuracy {}")
def held_out_course(f: Facts) -> str:
    after = _metric(f, "grpo")
    return f"{f['held_out_before']} → {Share(after.mean)} ({f['held_out_errors']:+.1f} SE)"


@fact("{} of the evaluation's completions are those from before GRPO, word for word")
def answered_as_before(f: Facts) -> Share:
    sides = "samples a JOIN samples b USING (problem_id) WHERE a.greedy AND b.greedy AND a.evaluation = ? AND b.evaluation = 'grpo'"
    (row,) = query(
        run_of(f),
        f"SELECT avg((a.completion = b.completion)::INT) AS share, count(*) AS n FROM {sides}",
        [_before(f)],
    )
    if row["n"] < MIN_GROUPS or row["share"] is None:
        raise Unknown("samples")
    return Share(row["share"])


@fact("held-out accuracy changes by {:+.1f} SE")
def held_out_errors(f: Facts) -> float:
    gain, error = _gain(f)
    return gain / error


@fact("held-out accuracy {}")
def sft_course(f: Facts) -> str:
    """Show what SFT made of held-out accuracy (Unknown: it was not evaluated before or after)."""
    return f"{Share(_metric(f, 'base').mean)} → {Share(_metric(f, 'sft').mean)}, before and after SFT"


def sft_lowers_accuracy(f: Facts) -> bool:
    gain, error = _gain(f, "base", "sft")
    return gain <= LOST * error


@fact("{} of the evaluation's completions are cut off")
def evaluation_truncated(f: Facts) -> Share:
    return Share(_metric(f, "grpo", "truncated").mean)


@fact("{} different problems")
def distinct_problems(f: Facts) -> int:
    (row,) = query(run_of(f), "SELECT count(DISTINCT problem_id) AS n FROM rollouts WHERE stage = 'grpo'")
    return int(row["n"])


@fact("each was sampled {:.0f} times")
def times_sampled(f: Facts) -> float:
    return sum(b.accuracy.n for b in f.signals.batches) / max(1, f["distinct_problems"])


@fact("rollout batches in all: {:.0f}")
def rollout_batches(f: Facts) -> float:
    return float(f["grpo.max_steps"]) / max(1, int(f.settings.get("grpo.num_iterations") or 1))


@fact("{} of the wrong completions have no reward")
def wrong_without_reward(f: Facts) -> Share:
    count = "count(*) FILTER (NOT correct AND reward IS NULL) AS none, count(*) FILTER (NOT correct) AS wrong"
    right = "count(*) FILTER (correct AND reward IS NOT NULL) AS paid"
    (row,) = query(run_of(f), f"SELECT {count}, {right} FROM rollouts WHERE stage = 'grpo'")
    return Share(row["none"] / row["wrong"] if row["wrong"] and row["paid"] else 0.0)


@fact("{}")
def golds_in_words(f: Facts) -> str | None:
    """Count the answers that are numbers where the gold answer holds none; None where they are few."""
    words = "count(*) FILTER (NOT regexp_matches(gold, '[0-9]') AND regexp_matches(extracted, '[0-9]')) AS numbers"
    (row,) = query(
        run_of(f),
        f"SELECT {words}, count(*) AS n, any_value(gold) AS gold, any_value(extracted) AS answer FROM rollouts WHERE stage = 'grpo'",
    )
    if not row["n"] or row["numbers"] < MOSTLY_WORDS * row["n"]:
        return None
    return f"{row['numbers']} of {row['n']} completions answer with a number, such as {one_line(row['answer'], 20)} where the gold answer is {one_line(row['gold'], 20)}"


@fact("other than in its training, where it was: {}")
def asked_otherwise(f: Facts) -> dict[str, Any] | None:
    """Compare what the model carried of its prompt with what it was asked in the run: key of the recipe → its value in training."""
    from algorist.prompts.attached import attached

    folders = (Path(str(f["model.name"])).expanduser(), run_of(f) / f.stage / "final")
    before, after = (attached(folder) if folder.is_dir() else None for folder in folders)
    if before is None or after is None:
        return None
    template = {"model.chat_template": None} if f.get("model.chat_template") else {}
    return {key: theirs for key, (theirs, _) in before.differences(after).items()} | template or None


@fact("{}")
def answers_misread(f: Facts) -> str | None:
    """Compare strict and lenient accuracy of the first evaluation, where the format is right; None where they are near."""
    names = ("greedy_accuracy", "lenient_accuracy", "format")
    strict, lenient, form = (_metric(f, _before(f), name).mean for name in names)
    if form < READ or lenient < strict + MISREAD:
        return None
    return f"before GRPO {Share(strict)} of the answers are right as they are read, and {Share(lenient)} leniently"


@fact("{} of the rollouts have a prompt without their question")
def not_asked(f: Facts) -> Share:
    words = [f"regexp_replace(trim({name}), '\\s+', ' ', 'g')" for name in ("prompt", "question")]
    part = "(SELECT prompt, question FROM rollouts WHERE stage = 'grpo' LIMIT 2000)"
    (row,) = query(run_of(f), f"SELECT avg((NOT contains({words[0]}, {words[1]}))::INT) AS share FROM {part}")
    return Share(row["share"] or 0.0)


@fact("{}")
def matcher_accepts(f: Facts) -> str | None:
    """Count the answers called right whose number is not that of the gold answer; None where they are few."""
    rows = query(
        run_of(f),
        "SELECT DISTINCT extracted, gold FROM rollouts WHERE stage = 'grpo' AND correct AND extracted IS NOT NULL LIMIT 2000",
    )
    pairs = [(row["extracted"], row["gold"]) for row in rows]
    pairs = [pair for pair in pairs if all(same_number(text, text) for text in pair)]
    others = [pair for pair in pairs if not same_number(*pair)]
    if len(pairs) < MIN_GROUPS or len(others) < ACCEPTED * len(pairs):
        return None
    answer, gold = (one_line(text, 20) for text in others[0])
    return f"{len(others)} of {len(pairs)} different answers that are called right are another number, such as {answer} for {gold}"


@fact("{} of {grpo.max_steps} steps were done")
def steps_done(f: Facts) -> int:
    """Count the steps of a finished stage (Unknown: it is not)."""
    lines = f.signals.lines.get(f.stage)
    if not lines or not (run_of(f) / f.stage / "final").is_dir():
        raise Unknown("final")
    return int(lines[-1]["step"])


def plugin_ends_run(f: Facts) -> bool:
    stops = bool(f.settings.get("plugins")) and not f.get("ended")
    return stops and f["steps_done"] < ENDED * f["grpo.max_steps"]


def question_not_asked(f: Facts) -> bool:
    return f["not_asked"] >= NOT_ASKED


def sampled_too_hot(f: Facts) -> bool:
    return f["far_below"] and f.number("grpo.temperature", 1.0) > 1


def prompt_changed(f: Facts) -> bool:
    return bool(f["asked_otherwise"]) and f["first_rollouts"] <= SOME


def evaluation_cut(f: Facts) -> bool:
    return f["evaluation_truncated"] >= f["truncated"] + CUT_MORE


def problems_by_heart(f: Facts) -> bool:
    return f["times_sampled"] >= OFTEN and f["pass_rate"] >= f["held_out"] + AHEAD


def held_out_falls(f: Facts) -> bool:
    """Return whether held-out accuracy fell, or did not rise while that of the rollouts did, by more than chance hides."""
    gain, error = _gain(f)
    apart = rises(f) and gain <= 0 and gain + 2 * error < f["accuracy_gain"]
    return gain <= LOST * error or apart


def why_held_out_falls(f: Facts) -> str:
    """Name the cause of the fall, where it shows."""
    if evaluates_others(f):
        return "The evaluation answers as before GRPO, word for word: its engine may not have the weights that were trained."
    alike = not (f.get("kinds") or _asked_apart(f)) and f.get("times_sampled", SELDOM) < SELDOM
    if f["held_out_errors"] <= LOST and rises(f) and alike:
        return (
            "Gold answers of training and of held-out problems may contradict each other: of problems that look alike ever more are "
            "right in training, and ever fewer in the evaluation."
        )
    return "Held-out accuracy does not follow: training pays for something else than the evaluation counts."


def evaluates_others(f: Facts) -> bool:
    """See whether an evaluation with an engine of its own does not know of the weights that moved."""
    moved = f.get("moved_share", 0.0) >= MOVED_SHARE and rises(f)
    return bool(moved and _other_engine(f) and f.get("answered_as_before", 0.0) >= AS_BEFORE)


def _other_engine(f: Facts) -> bool:
    return f.settings.get("eval.engine") not in (None, f.settings.get("grpo.engine"))


def _asked_apart(f: Facts) -> bool:
    """See whether the evaluation draws completions in its own way, or reads far fewer of them than before."""
    stops = [f.settings.get(f"{section}.stop_strings") or [] for section in ("eval", "grpo")]
    fewer = False
    with suppress(Unknown):
        fewer = _metric(f, "grpo", "format").mean < _metric(f, _before(f), "format").mean - CUT_MORE
    return fewer or stops[0] != stops[1] or _other_engine(f)


def few_batches(f: Facts) -> bool:
    return int(f["grpo.num_iterations"]) >= FEW_BATCHES and f["rollout_batches"] < FEW_BATCHES


def wrong_not_compared(f: Facts) -> bool:
    return f["wrong_without_reward"] >= NOTHING
