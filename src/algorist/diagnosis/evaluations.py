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
from algorist.store.read import query
from algorist.store.safe_text import one_line

FAR_BELOW, SOME = 0.3, 0.1
"""Part of the held-out accuracy, of at least the second, below which the first rollouts are not just sampled where the other is greedy."""
OFTEN, AHEAD = 8, 0.25
"""Times that each problem was sampled, and lead of their accuracy over that of held-out problems, of what is known by heart."""
CUT_MORE = 0.3
"""Share of an evaluation's completions that is cut off beyond that of the rollouts."""
LOST = -3.0
"""Standard errors by which held-out accuracy has fallen."""
FEW_BATCHES = 8
"""Rollout batches of a whole run that are too few."""
NOTHING = 0.5
"""Share of the wrong completions that get no reward at all."""
MOSTLY_WORDS = 0.7
"""Share of the completions whose answer is a number where the gold answer holds none."""
MISREAD, READ = 0.15, 0.9
"""Lenient accuracy beyond the strict one, where so many completions are in the format, that shows that answers are read wrongly."""
ENDED = 0.5
"""Part of the steps before whose end no plugin should end a run."""
NOT_ASKED = 0.5
"""Share of the rollouts whose prompt does not hold their question."""
ACCEPTED = 0.3
"""Share of the answers called right whose number is not that of the gold answer; 50 % for 0.5 is one, too."""


def evaluated(f: Facts, stage: str) -> dict[str, Any]:
    """Return the evaluation after a stage, or of the ``base`` (Unknown: there is none)."""
    if f.signals.run is not None:
        with suppress(OSError, ValueError):
            return dict(json.loads((f.signals.run / "eval" / f"{stage}.json").read_text(encoding="utf-8")))
    raise Unknown("evaluation")


def _before(f: Facts) -> str:
    return "sft" if f.settings.get("sft.enabled") else "base"


def _metric(f: Facts, stage: str, name: str = "greedy_accuracy") -> Moments:
    """Return a share of the evaluation after a stage, of its problems (Unknown: there is none)."""
    try:
        value = evaluated(f, stage)["metrics"][name]
        right = value["value"] * value["n"]
    except (KeyError, TypeError):
        raise Unknown(name) from None
    return Moments(value["n"], right, right)


def _gain(f: Facts) -> tuple[float, float]:
    """Return the gain of held-out accuracy during GRPO, and its standard error."""
    before, after = _metric(f, _before(f)), _metric(f, "grpo")
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


def _same_source(f: Facts) -> bool:
    """See whether training and held-out problems come from one dataset, or files; those of another one may well be harder."""
    return bool(f.settings.get("data.train.name") == f.settings.get("data.eval.name"))


@fact("held-out accuracy {}")
def held_out_course(f: Facts) -> str:
    after = _metric(f, "grpo")
    return f"{f['held_out_before']} → {Share(after.mean)} ({f['held_out_errors']:+.1f} SE)"


@fact("held-out accuracy changes by {:+.1f} SE")
def held_out_errors(f: Facts) -> float:
    gain, error = _gain(f)
    return gain / error


@fact("{} of the evaluation's completions are cut off at {eval_limit} tokens")
def evaluation_truncated(f: Facts) -> Share:
    return Share(_metric(f, "grpo", "truncated").mean)


@fact("{} tokens")
def eval_limit(f: Facts) -> int:
    return int(evaluated(f, "grpo").get("protocol", {}).get("max_completion_tokens") or 0)


@fact("{} different problems")
def distinct_problems(f: Facts) -> int:
    if f.signals.run is None:
        raise Unknown("run")
    (row,) = query(f.signals.run, "SELECT count(DISTINCT problem_id) AS n FROM rollouts WHERE stage = 'grpo'")
    return int(row["n"])


@fact("each was sampled {:.0f} times")
def times_sampled(f: Facts) -> float:
    return sum(b.accuracy.n for b in f.signals.batches) / max(1, f["distinct_problems"])


@fact("rollout batches in all: {:.0f}")
def rollout_batches(f: Facts) -> float:
    return float(f["grpo.max_steps"]) / max(1, int(f.settings.get("grpo.num_iterations") or 1))


@fact("{} of the wrong completions have no reward")
def wrong_without_reward(f: Facts) -> Share:
    if f.signals.run is None:
        raise Unknown("run")
    count = "count(*) FILTER (NOT correct AND reward IS NULL) AS none, count(*) FILTER (NOT correct) AS wrong"
    right = "count(*) FILTER (correct AND reward IS NOT NULL) AS paid"
    (row,) = query(f.signals.run, f"SELECT {count}, {right} FROM rollouts WHERE stage = 'grpo'")
    return Share(row["none"] / row["wrong"] if row["wrong"] and row["paid"] else 0.0)


@fact("{}")
def golds_in_words(f: Facts) -> str | None:
    """Count the answers that are numbers where the gold answer holds none; None where they are few."""
    if f.signals.run is None:
        return None
    words = "count(*) FILTER (NOT regexp_matches(gold, '[0-9]') AND regexp_matches(extracted, '[0-9]')) AS numbers"
    (row,) = query(
        f.signals.run,
        f"SELECT {words}, count(*) AS n, any_value(gold) AS gold, any_value(extracted) AS answer FROM rollouts WHERE stage = 'grpo'",
    )
    if not row["n"] or row["numbers"] < MOSTLY_WORDS * row["n"]:
        return None
    return f"{row['numbers']} of {row['n']} completions answer with a number, such as {one_line(row['answer'], 20)} where the gold answer is {one_line(row['gold'], 20)}"


@fact("{}")
def asked_otherwise(f: Facts) -> dict[str, Any] | None:
    """Compare what the model carried of its prompt with what it was asked in the run: key of the recipe → its value in training."""
    from algorist.prompts.attached import attached

    run = f.signals.run
    folders = [Path(str(f.settings.get("model.name", ""))).expanduser()]
    folders += [run / f.stage / "final"] if run is not None else []
    known = [attached(folder) for folder in folders if folder.is_dir()]
    if len(known) < 2 or None in known:
        return None
    before, after = (prompt.recorded() for prompt in known if prompt is not None)
    keys = {
        "prompt_format": "prompt.format",
        **{key: f"prompt.{key}" for key in ("tags", "system_prompt", "system_role", "template_kwargs")},
    }
    template = {"model.chat_template": None} if f.settings.get("model.chat_template") else {}
    return {keys[k]: before.get(k) for k in keys if before.get(k) != after.get(k)} | template or None


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
    if f.signals.run is None:
        raise Unknown("run")
    words = [f"regexp_replace(trim({name}), '\\s+', ' ', 'g')" for name in ("prompt", "question")]
    (row,) = query(
        f.signals.run,
        f"SELECT avg(CASE WHEN contains({words[0]}, {words[1]}) THEN 0 ELSE 1 END) AS share "
        "FROM (SELECT prompt, question FROM rollouts WHERE stage = 'grpo' LIMIT 2000)",
    )
    return Share(row["share"] or 0.0)


@fact("{accepted_share} of the answers called right are another number than the gold answer, such as {}")
def accepted(f: Facts) -> str:
    return str(f["accepted_answers"][1])


@fact("{}")
def accepted_share(f: Facts) -> Share:
    return Share(f["accepted_answers"][0])


@fact("{}")
def accepted_answers(f: Facts) -> tuple[float, str]:
    if f.signals.run is None:
        raise Unknown("run")
    rows = query(
        f.signals.run,
        "SELECT DISTINCT extracted, gold FROM rollouts WHERE stage = 'grpo' AND correct AND extracted IS NOT NULL LIMIT 2000",
    )
    pairs = [
        (r["extracted"], r["gold"])
        for r in rows
        if same_number(r["extracted"], r["extracted"]) and same_number(r["gold"], r["gold"])
    ]
    others = [f"{one_line(a, 20)} for {one_line(gold, 20)}" for a, gold in pairs if not same_number(a, gold)]
    if len(pairs) < MIN_GROUPS:
        raise Unknown("answers")
    return len(others) / len(pairs), next(iter(others), "")


@fact("{} of {grpo.max_steps} steps were done")
def steps_done(f: Facts) -> int:
    """Count the steps of a finished stage (Unknown: it is not)."""
    lines = f.signals.lines.get(f.stage)
    if not lines or f.signals.run is None or not (f.signals.run / f.stage / "final").is_dir():
        raise Unknown("final")
    return int(lines[-1]["step"])


def plugin_ends_run(f: Facts) -> bool:
    stops = bool(f.settings.get("plugins")) and not f.get("ended")
    return stops and f["steps_done"] < ENDED * f["grpo.max_steps"]


def right_too_easily(f: Facts) -> bool:
    return f["accepted_share"] >= ACCEPTED


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


def few_batches(f: Facts) -> bool:
    return int(f["grpo.num_iterations"]) >= FEW_BATCHES and f["rollout_batches"] < FEW_BATCHES


def wrong_not_compared(f: Facts) -> bool:
    return f["wrong_without_reward"] >= NOTHING
