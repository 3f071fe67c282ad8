"""Special gold answers: a placeholder, a date or a range, a choice with its label, damaged text."""

from __future__ import annotations

import re
from typing import NamedTuple

from algorist_grader.algebra.units import is_noun

_PLACEHOLDER = re.compile(
    r"(?:proof|(?:answer )?not ?(?:found|available|provided|given|applicable)|n\s*/\s*a|null|nan|tbd|tba|todo|varies|(?:answers? )?(?:will|may) vary"
    r"|see (?:the )?(?:solution|answer|explanation|proof|above|below|figure|diagram)|no answer(?: provided)?|missing|placeholder)[.!]?",
    re.IGNORECASE,
)
_DATE = re.compile(
    r"\d{4}([-/])(?:0?[1-9]|1[0-2])\1(?:0?[1-9]|[12]\d|3[01])|(?:0?[1-9]|[12]\d|3[01])([-/])(?:0?[1-9]|[12]\d|3[01])\2[12]\d{3}"
)
_RANGE = re.compile(
    r"\d+(?:\.\d+)? ?-{1,2} ?\d+(?:\.\d+)? *(?:\\(?:text|mathrm) *\{ *([a-zA-Z.]+) *\}|(?<=[ ])([a-zA-Z]{2,}\.?))"
)
_DAMAGED = re.compile(r"(?<![a-zA-Z\\])(?:rac|oxed|ext)\{")
"""LaTeX that lost its backslash and a letter on the way through JSON."""

_GAP = r"(?:\s|~|\\[ ,;:!]|\\q?quad(?![a-zA-Z]))"
_STYLE = r"\\(?:text|textbf|textrm|mathrm|mathbf|bf|rm)\s*\{\s*"
_FORMS = tuple(
    re.compile(form, re.DOTALL)
    for form in (
        rf"{_STYLE}(?:\((?P<letter>[A-J])\)|(?P<bare>[A-J])[).:]){_GAP}*\}}{_GAP}*(?P<value>\S.*)",
        rf"\({_GAP}*{_STYLE}(?P<letter>[A-J])\s*\}}{_GAP}*\){_GAP}*(?P<value>\S.*)",
        rf"\((?P<letter>[A-J])\){_GAP}+(?P<value>\S.*)",
        rf"(?P<value>\S.*?){_GAP}*{_STYLE}\((?P<letter>[A-J])\)\s*\}}",
        rf"(?P<strict>(?P<letter>[A-J])[).:]){_GAP}+(?P<value>\S.*)",
        r"\\text\s*\{(?:\((?P<letter>[A-J])\)|(?P<bare>[A-J])[):])\s+(?P<value>[^{}]+)\}",
    )
)
_NO_VALUE = re.compile(
    r"[=<>^_'*/,;&|!+]|-(?!\s*[\d\\.])|\\(?:cup|cap|times|cdot|to|in|le|ge|ne|leq|geq|neq|subset|setminus|approx)(?![a-zA-Z])"
    rf"|(?:{_STYLE})?(?:and|or|not)\b|\(?[A-J]\)?$"
)
_SEVERAL = re.compile(r"\([A-J]\)|(?<![a-zA-Z\\])[A-J][).:](?:\s|$)|\b(?:or|not)\b[^a-z]*[A-J]\b")
_LONGEST_LABELLED = 300


class Choice(NamedTuple):
    """The letter of a choice and its value; ``strict``: only a label where the rest is mathematics."""

    letter: str
    value: str
    strict: bool


def labelled(text: str) -> Choice | None:
    """Read ``\\textbf{(B)}\\ 27``, ``(B)~27``, ``B) 27`` or ``27 \\text{ (B)}``; None for everything else."""
    text = text.strip()
    if text[:1] == text[-1:] == "$" and text.count("$") == 2:
        text = text[1:-1].strip()
    if len(text) > _LONGEST_LABELLED:
        return None
    for form in _FORMS:
        if match := form.fullmatch(text):
            parts = match.groupdict()
            value = parts["value"].strip()
            if _NO_VALUE.match(value) or _SEVERAL.search(value):
                return None
            return Choice(parts["letter"] or parts["bare"], value, bool(parts.get("strict")))
    return None


def why_no_answer(gold: str) -> str:
    """Explain why a gold answer is none: a placeholder, or LaTeX that lost its backslash; an empty string where it is one."""
    bare = re.sub(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}|[$*`\"']", r"\1", gold).strip()
    if _PLACEHOLDER.fullmatch(bare):
        return f"a placeholder ({bare}), not an answer"
    damaged = _DAMAGED.search(gold)
    return (
        f'\'{damaged[0]}\' lost a backslash and a letter, as "\\frac" does in JSON; write "\\\\frac"'
        if damaged
        else ""
    )


def is_date_or_range(text: str) -> bool:
    """Return whether cleaned text is a date or a range with its unit: ``2024-05-05``, ``5/5/2024``, ``2-3 hours`` are no differences."""
    if _DATE.fullmatch(text):
        return True
    between = _RANGE.fullmatch(text)
    return between is not None and is_noun(between[1] or between[2])
