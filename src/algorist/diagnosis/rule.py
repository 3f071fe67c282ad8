"""A rule is data: a name, the facts it reads, a small ``when``, one sentence, the recipe lines to change, what it explains.

One table of rules serves ``preflight``, the warnings of a running training, ``diagnose``, and the hints of an evaluation; what differs is
where the facts come from. A fact that is not known there keeps the rules that read it silent.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import yaml

from algorist.diagnosis.settings import Settings
from algorist_grader.registry import Registry

if TYPE_CHECKING:
    from algorist.diagnosis.signals import Signals

Changes = Mapping[str, Any]
"""Key of the recipe → value, or a function of the facts; ``{stage}`` in a key is the stage."""
F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger("algorist.diagnosis.rule")


class Unknown(Exception):
    """A fact is not known here."""


class Share(float):
    """A share; in percent as text, where what is not quite all or nothing does not look like it."""

    def __str__(self) -> str:
        shown = f"{100 * float(self):.0f} %"
        return f"{100 * float(self):.1f} %" if shown in ("0 %", "100 %") and self not in (0, 1) else shown

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)


@dataclass(frozen=True, slots=True)
class Fact:
    """Something known of a run, by name: how it is shown, and how it follows from a run's signals (None: by the caller only)."""

    shows: str
    of: Callable[[Facts], Any] | None = None
    first: bool = False
    """``diagnose`` shows it before its findings: what moved the weights."""


FACTS: Registry[Fact] = Registry("fact")


def fact(shows: str, name: str = "", *, first: bool = False) -> Callable[[F], F]:
    """Register a function of ``Facts`` as the fact of its name; ``shows`` is a text with ``{}`` for the value and names of other facts."""

    def register(of: F) -> F:
        FACTS.register(name or of.__name__)(Fact(shows, of, first))
        return of

    return register


class Facts:
    """The facts of a run, a preflight or an evaluation, each computed when it is first read.

    Beside the facts by name, a key of the recipe (``grpo.beta``) and a logged metric (``tools/failed_share``: the median of the last
    quarter of the logged steps) are facts.

    Args:
        settings: The recipe's values.
        values: Facts that the caller knows.
        signals: What other facts follow from.
        stage: The stage that is looked at.
    """

    def __init__(
        self,
        settings: Settings,
        values: Mapping[str, Any] | None = None,
        *,
        signals: Signals | None = None,
        stage: str = "grpo",
    ) -> None:
        self.settings, self.stage, self._signals = settings, stage, signals
        self._values: dict[str, Any] = dict(values or {})

    @property
    def signals(self) -> Signals:
        if self._signals is None:
            raise Unknown("signals")
        return self._signals

    def __getitem__(self, name: str) -> Any:
        """Return a fact.

        Raises:
            Unknown: It is not known here.
        """
        if name not in self._values:
            try:
                self._values[name] = self._compute(name)
            except Unknown:
                self._values[name] = None
        if self._values[name] is None:
            raise Unknown(name)
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a fact, or ``default`` where it is not known."""
        try:
            return self[name]
        except Unknown:
            return default

    def number(self, key: str, default: float) -> float:
        """Return a number of the recipe; ``{stage}`` in the key is the stage."""
        return self.settings.number(key.format(stage=self.stage), default)

    def samples(self, kind: str) -> tuple[str, ...]:
        """Return completions of a kind as text, where there are any."""
        return self._signals.samples(kind) if self._signals is not None else ()

    def _compute(self, name: str) -> Any:
        if name in FACTS:
            of = FACTS.get(name).of
            return of(self) if of is not None else None
        if "/" in name:
            from algorist.diagnosis.signals import last_quarter

            return last_quarter(self.signals.series(name, self.stage))
        return self.settings.get(name)

    def fill(self, text: str, value: Any = None) -> str:
        """Return a text with facts in the place of their names in braces, ``{name}`` or ``{name:.3g}``."""

        def put(match: re.Match[str]) -> str:
            named, form = match.groups()
            entry = self[named] if named else value
            if isinstance(entry, Mapping):
                return ", ".join(f"{k} {v}" for k, v in entry.items())
            if isinstance(entry, (list, tuple)):
                return "; ".join(map(str, entry[:8]))
            return format(entry, form or "") if isinstance(entry, (int, float)) else str(entry)

        return re.sub(r"\{([\w./]*)(?::([^}]*))?\}", put, text)

    def shown(self, name: str) -> str:
        """Return a fact as a sentence of evidence."""
        value = self[name]
        if name in FACTS:
            return self.fill(FACTS.get(name).shows, value)
        number = f"{value:.3g}" if isinstance(value, float) else str(value)
        return f"{name} {number}" + (
            ", median of the last quarter of the logged steps" if "/" in name else ""
        )


HELPED = "the accuracy of the first 20 steps rises, and diagnose no longer names this"


@dataclass(frozen=True, slots=True)
class Rule:
    """One fault and how it is recognised.

    Attributes:
        name: Its name, a heading of docs/troubleshooting.md.
        severity: 1 nothing can be learned, 2 training does harm, 3 training is slower or worse than it need be.
        facts: What is shown as evidence, where it is known.
        when: Whether the facts show it; a fact that is not known means no.
        says: The sentence, with facts in braces, or a function of the facts.
        change: The lines of the recipe that it proposes.
        explains: Names of rules that follow from it and are then left out.
        samples: Kind of completions that are shown (``Signals.samples``), the first that there are of several.
        stages: The stages that are looked at, in this order; the first that shows it counts.
        every_stage: Each stage that shows it counts.
        text: Markdown of its section in the page: what it means, how it is recognised, what to do.
        helped: What a run with the change shows where it helped, with facts in braces.
        last_resort: It is said only where no rule of severity 1 or 2 is.
        room: Its chapter of the page: start, rollouts, training; none for rules of extensions and users.
    """

    name: str
    severity: Literal[1, 2, 3]
    facts: tuple[str, ...]
    when: Callable[[Facts], bool]
    says: str | Callable[[Facts], str]
    change: Changes | Callable[[Facts], Changes] = ()  # type: ignore[assignment]
    explains: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    stages: tuple[str, ...] = ("grpo",)
    every_stage: bool = False
    text: str = ""
    helped: str = HELPED
    last_resort: bool = False
    room: str = ""

    def look(self, facts: Facts) -> Finding | None:
        """Return what the rule says of these facts, or None."""
        try:
            if not self.when(facts):
                return None
        except Unknown:
            return None
        except Exception as error:
            if self.when.__module__.partition(".")[0] == "algorist":
                raise
            _failed(self.name, repr(error))  # a diagnosis ends no training
            return None
        shown = [name for name in self.facts if facts.get(name) is not None]
        kinds = (facts.samples(kind) for kind in self.samples)
        return Finding(
            self.name,
            self.says(facts) if callable(self.says) else facts.fill(self.says),
            self.severity,
            tuple(facts.shown(name) for name in shown),
            next(filter(None, kinds), ()),
            *facts.settings.changed(self.changes(facts)),
            facts.stage,
            {name: facts[name] for name in shown},
            facts.fill(self.helped),
        )

    def changes(self, facts: Facts) -> dict[str, Any]:
        """Return key of the recipe → value; a function that returns None changes nothing, a plain None is ``null``."""
        if callable(self.change):
            return {key: value for key, value in self.change(facts).items() if value is not None}
        pairs = (
            (key.format(stage=facts.stage), v, v(facts) if callable(v) else v)
            for key, v in dict(self.change).items()
        )
        return {key: value for key, v, value in pairs if value is not None or v is None}


RULES: Registry[Rule] = Registry("rule")


@functools.cache
def _failed(name: str, error: str) -> None:
    log.warning("rule '%s' raised %s; it says nothing (shown once)", name, error)


def make_rule(
    when: Callable[[Facts], bool],
    severity: Literal[1, 2, 3],
    *,
    name: str = "",
    text: str = "",
    thresholds: Mapping[str, Any] | None = None,
    **parts: Any,
) -> Rule:
    """Return a rule with the name of ``when``, and with its docstring, thresholds by name filled in, as text."""
    named = {
        key: Share(v) if isinstance(v, float) and 0.005 <= v < 1 else v
        for key, v in (thresholds or when.__globals__).items()
        if key.isupper()
    }
    text = text or inspect.cleandoc(when.__doc__ or "")
    text = re.sub(r"\{([A-Z_]+)(?::(\w+|\.\w+))?\}", lambda m: _constant(named[m[1]], m[2]), text)
    for key in ("facts", "explains", "samples", "stages"):
        if isinstance(parts.get(key), str):
            parts[key] = tuple(parts[key].split())
    return Rule(name=name or when.__name__, severity=severity, when=when, text=text, **parts)


def rules_of(table: Path, module: Mapping[str, Any]) -> list[Rule]:
    """Return the rules of a table.

    Args:
        table: A YAML file: name → the parts of a ``Rule``; ``when`` is ``fact`` or ``fact >= THRESHOLD``.
        module: The globals of the module beside it: thresholds, the function that decides for a rule without ``when``, and in ``SAYS``
            and ``CHANGE`` what needs more than facts in braces.
    """
    rules = []
    for name, row in yaml.safe_load(table.read_text(encoding="utf-8")).items():
        when = _compared(row.pop("when"), module) if "when" in row else module[name]
        row |= {
            key: module[key.upper()][name]
            for key in ("says", "change")
            if name in module.get(key.upper(), ())
        }
        rules.append(make_rule(when, name=name, thresholds=module, **row))
    return rules


def _compared(text: str, thresholds: Mapping[str, Any]) -> Callable[[Facts], bool]:
    if " " not in text:
        return lambda f: bool(f[text])
    fact, sign, threshold = text.split()
    compare = {">=": operator.ge, ">": operator.gt}[sign]
    return lambda f: bool(compare(f[fact], thresholds[threshold]))


def rule(severity: Literal[1, 2, 3], **parts: Any) -> Callable[[F], F]:
    """Register the decorated ``when`` as a rule; tuples of names may be written as one text with blanks."""

    def register(when: F) -> F:
        RULES.register(when.__name__)(make_rule(when, severity, **parts))
        return when

    return register


def apply(rules: Sequence[Rule], *views: Facts) -> list[Finding]:
    """Return the findings of the facts of each stage, most severe first, without those that follow from another one."""
    of = {view.stage: view for view in views}
    hits: dict[str, list[Finding]] = {}
    for each in rules:
        looks = filter(None, (each.look(of[stage]) for stage in each.stages if stage in of))
        if hit := list(looks) if each.every_stage else list(islice(looks, 1)):
            hits[each.name] = hit
    explains = {each.name: {*each.explains} - {each.name} for each in rules}
    roots = hits.keys() - {name for hit in hits for name in explains[hit]}
    follow: set[str] = set()
    news = roots
    while news := {name for hit in news for name in explains[hit] if name in hits} - follow:
        follow |= news
    left = hits.keys() - follow
    harm = {f.name for name in left for f in hits[name] if f.severity < 3}
    left -= {each.name for each in rules if each.last_resort and harm - {each.name}}
    findings = (finding for name in left for finding in hits[name])
    return sorted(findings, key=lambda finding: (finding.severity, finding.name, finding.stage))


def _constant(value: Any, form: str | None) -> str:
    return format(value, form or "") if form else f"{value:g}" if type(value) is float else str(value)


# ---- what a rule says of a run: a name, one sentence, the facts, a few completions and the lines of the recipe to change


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault that a run has.

    ``severity`` orders findings: 1 nothing can be learned, 2 training does harm, 3 training is slower or worse than it
    need be. ``change`` are lines as ``algorist run RECIPE`` takes them, ``before`` the values in force ("" where there is none).
    """

    name: str
    sentence: str
    severity: int
    evidence: tuple[str, ...]
    samples: tuple[str, ...] = ()
    change: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    stage: str = "grpo"
    facts: Mapping[str, Any] = field(default_factory=dict)
    helped: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary: name, stage, severity, explanation, evidence (fact, value, text), samples, change, helped."""
        evidence = [
            {"fact": name, "value": value, "text": text}
            for (name, value), text in zip(self.facts.items(), self.evidence, strict=True)
        ]
        return {
            "name": self.name,
            "stage": self.stage,
            "severity": self.severity,
            "explanation": self.sentence,
            "evidence": evidence,
            "samples": list(self.samples),
            "change": list(self.change),
            "helped": self.helped if self.change else "",
        }

    def one_line(self) -> str:
        """Return the line shown once during training: the sentence, and the first evidence that it does not hold already."""
        more = next((text for text in self.evidence if text not in self.sentence), "")
        return f"{self.name}: {self.sentence} {more}".rstrip()
