"""From a run folder, from signals, or from the completions of an evaluation, to the findings in order of severity."""

from __future__ import annotations

import logging
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from algorist.config.schema import Recipe
from algorist.diagnosis.course import rises
from algorist.diagnosis.demonstrations import local_problems
from algorist.diagnosis.facts import MOVING_STEPS
from algorist.diagnosis.rule import FACTS, Facts, Finding, Rule, Share, apply
from algorist.diagnosis.rules import CLEAR, all_rules
from algorist.diagnosis.settings import Settings
from algorist.diagnosis.signals import (
    MIN_GROUPS,
    MIN_STEPS,
    Signals,
    ends,
    make_batch,
    pooled,
    read_signals,
    recent,
)
from algorist.diagnosis.weights import MOVED_SHARE
from algorist.diagnosis.wrong_answers import wrong_in_common
from algorist.store.read import opened
from algorist.store.safe_text import one_line
from algorist.store.stages import STAGES

__all__ = ["diagnose", "find_causes", "moved", "not_explained", "of_evaluation", "too_little"]


GOOD = 0.9
"""Accuracy above which a run need not rise further."""
SFT = "sft.enabled=true"
WITHOUT_SOLUTIONS = (
    " The data has no worked solutions for SFT. Ask in a form that the model knows (algorist new finds one), or let a larger model "
    "write solutions, to be trained on first: algorist data sample RECIPE --model LARGER --samples 8 --out right.jsonl"
)


def diagnose(run_folder: str | Path) -> list[Finding]:
    """Return what keeps a run from learning, the most severe first; empty for a healthy run.

    Args:
        run_folder: A run, finished or not.

    Raises:
        CheckpointError: There is no run, or a part of it is damaged.
    """
    with opened(Path(run_folder)):
        return find_causes(read_signals(Path(run_folder)))


def without_solutions(findings: list[Finding]) -> list[Finding]:
    """Return the findings; what advises SFT also says where its solutions come from, the first one in words."""
    words, advised = WITHOUT_SOLUTIONS, []
    for each in findings:
        if SFT in each.change:
            each = replace(
                each,
                sentence=f"{each.sentence}{words}",
                change=(*each.change, "data.sft={name: local, path: right.jsonl}"),
                before=(*each.before, ""),
            )
            words = ""
        advised.append(each)
    return advised


def find_causes(signals: Signals) -> list[Finding]:
    """Return the findings of signals, without those that follow from another one."""
    views = [Facts(signals.settings, signals=signals, stage=stage) for stage in STAGES]
    with opened(signals.run) if signals.run is not None else nullcontext():
        findings = apply(list(all_rules().values()), *views)
    problems = local_problems(signals.run, "train") if any(SFT in f.change for f in findings) else []
    return without_solutions(findings) if problems and not any(p.solution for p in problems) else findings


def moved(signals: Signals) -> list[str]:
    """Return a line for each cause that moved the weights of the last stage; empty where nothing measured them."""
    stage = next((stage for stage in reversed(STAGES) if signals.lines.get(stage)), "")
    facts = Facts(signals.settings, signals=signals, stage=stage)
    return [facts.shown(name) for name in FACTS if FACTS.get(name).first and facts.get(name) is not None]


def not_explained(signals: Signals) -> str:
    """Return a sentence on an accuracy that did not rise, or an empty string."""
    facts = Facts(signals.settings, signals=signals)
    if facts.get("accuracy_rise") is None or rises(facts) or facts.get("held_out_errors", 0.0) >= CLEAR:
        return ""
    last = pooled(ends(signals.batches)[1], lambda b: b.accuracy).mean
    graded = any(reason not in ("None", "") for batch in signals.batches for reason in batch.reasons)
    if not graded or last >= GOOD:
        return ""
    own = signals.settings.own_code()
    leave_out = f"; code of its own, to leave out first: {', '.join(own)}" if own else ""
    common = wrong_in_common(signals.run) if signals.run else []
    share = f"; wrong most often: problems with {', or with '.join(common)}" if common else ""
    return f"the accuracy did not rise: {facts['accuracy_course']}{share}{leave_out}"


def too_little(signals: Signals) -> str:
    """Return why a run without findings cannot be judged yet, or an empty string."""
    lines = sum(len(lines) for lines in signals.lines.values())
    if lines < MIN_STEPS and not signals.batches:
        return f"fewer than {MIN_STEPS} steps were logged"
    if not signals.batches and signals.lines.get("grpo"):
        return "the first rollouts of GRPO are not stored yet"
    if not signals.batches:
        return "GRPO has not begun; no rule applies to SFT" if signals.settings.get("grpo.enabled") else ""
    change = signals.weights.get("grpo")
    if change is not None and (change.empty_adapter or change.share < MOVED_SHARE):
        return f"the weights have not moved yet, which {MOVING_STEPS} steps with a gradient decide"
    if recent(signals.batches):
        return ""
    return f"it takes {MIN_STEPS} GRPO steps and {MIN_GROUPS} groups of completions"


RULES_OF_EVALUATION = ("nothing_answered", "truncated", "no_stop")
"""What a few completions of a model show, whether or not it was trained."""


def of_evaluation(rows: Sequence[Mapping[str, Any]], protocol: Mapping[str, Any]) -> list[Finding]:
    """Return what the rules say of the completions of an evaluation.

    Args:
        rows: Its samples, with the columns of ``store.write.SCHEMA``.
        protocol: How they were drawn.
    """
    if not rows:
        return []
    batch, count = make_batch(rows), len(rows)
    facts = {
        "where": f"{count} completions",
        "completions": count,
        "silent": batch.unreadable,
        "unreadable": Share(batch.unreadable / count),
        "truncated": Share(batch.truncated / count),
        "truncated_answered": Share(batch.truncated_answered / max(1, batch.truncated)),
        "end_of_turn": Share(batch.end_of_turn / count),
        "reasons": dict(Counter(batch.reasons).most_common(4)),
        "limit": protocol.get("max_completion_tokens"),
        "prompt_format": protocol.get("prompt_format"),
    }
    rules = all_rules()
    return apply([rules[name] for name in RULES_OF_EVALUATION], Facts(Settings(), facts))


# ---- the same diagnosis while a run trains: one line per cause, once

log = logging.getLogger("algorist.diagnosis.diagnose")

CHECKS_PER_RUN = 50
"""Every step up to here, then every N // 50 steps: the cost of looking stays far below that of a step."""


class LiveDiagnosis:
    """Watches a run: feed it with graded rollouts and metric lines, it says each cause at most once.

    What a checkpoint tells (unchanged weights) is left to ``diagnose``.

    Args:
        recipe: The resolved recipe.
        say: Shows one line.
        run_folder: Named in the line as the place to ask for more.
    """

    def __init__(self, recipe: Recipe, say: Callable[[str], None], run_folder: str) -> None:
        self.signals = Signals(settings=Settings(recipe.model_dump()))
        self.say, self.run_folder = say, run_folder
        self.said: set[str] = set()

    def on_rollouts(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take the graded rollouts of one generation batch; never raises."""
        try:
            self.signals.add_rollouts(records)
        except Exception:
            log.exception("the diagnosis could not read a batch of rollouts")

    def on_metrics(self, step: int, values: Mapping[str, Any], stage: str) -> None:
        """Take one line of metrics and say what is new; never raises."""
        try:
            self.signals.add_metrics(stage, step, values)
            count = len(self.signals.lines[stage])
            if count % max(1, count // CHECKS_PER_RUN) == 0:
                self._look()
        except Exception:
            log.exception("the diagnosis failed at step %d; training continues", step)

    def _look(self) -> None:
        for finding in find_causes(self.signals):
            if finding.name not in self.said:
                self.said.add(finding.name)
                self.say(
                    one_line(f"warning: {finding.one_line()} · more: algorist diagnose {self.run_folder}")
                )


# ---- docs/troubleshooting.md, written from the rules

ROOMS = {
    "start": "What shows before training\n\n`preflight` finds these.",
    "rollouts": "What shows in the rollouts",
    "training": "What shows in the training",
    "": "What extensions look at",
}
"""Room of a rule → heading of its chapter, and what holds for all of them; rules of extensions have no room."""
WIDTH = 118


def troubleshooting_page() -> str:
    """Return the whole page: how to read a diagnosis, the rules, and what no rule sees."""
    text = Path(__file__).with_name("troubleshooting.md").read_text(encoding="utf-8")
    rooms: dict[str, list[Rule]] = {room: [] for room in ROOMS}
    for rule in all_rules().values():
        rooms[rule.room].append(rule)
    parts = [
        f"## {ROOMS[room]}\n\n" + "\n".join(map(_section, rules)) for room, rules in rooms.items() if rules
    ]
    return text.replace("<!-- rules -->\n", "\n".join(parts))


def _section(rule: Rule) -> str:
    text = rule.text.removeprefix("**Means**: ")
    paragraphs = f"[{rule.severity}] {text}".split("\n\n")
    return f"### {rule.name}\n\n" + "\n".join(
        textwrap.fill(paragraph, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False,
                      break_on_hyphens=False)
        for paragraph in paragraphs
    ) + "\n"  # fmt: skip
