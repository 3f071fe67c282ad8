"""The marks that answers are read from: ``\\boxed{…}``, ``####``, reasoning tags. The only place that reads them; linear in the text.

Only the last ``MAX_COMPLETION`` characters are looked at: an answer is at the end, and no text can cost more than that.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_COMPLETION = 100_000
"""Characters at the end of a completion in which boxes are looked for."""
MOST_ANSWERS = 200
"""A completion with more boxes or answer blocks says nothing."""
REASONING_TAGS = (
    ("<think>", "</think>"), ("<reasoning>", "</reasoning>"), ("<start_working_out>", "<end_working_out>"), ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"), ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"), ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)  # fmt: skip
"""Opening and closing tags of each family's thinking; upper and lower case are the same."""
_LOWER_TAGS = tuple((start.lower(), end.lower()) for start, end in REASONING_TAGS)
_MARK = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{|\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_HASHES = re.compile(r"####\s*(.+)")
_OWN_LINE = re.compile(r"^[ \t]{0,8}####([^\n]+)", re.MULTILINE)
_FILLED = (
    r"(?:(?:really|exactly|actually|quite|simply|would|could|might|necessarily|just|be|is|are|equals?|to|the|an?|my|our|final|correct|right|answer|value|result)\b"
    r"|\\[(\[]|[ \t:$=(*])*"
)
_DENIED = re.compile(
    r"(?:(?:\b(?:in(?:correct|valid)|wrong|false|mistaken)(?=\s+(?:answer|value|result|solution|guess))|\bnot|\bnever|\bneither|\bnor|\bcannot|\bwithout|\bunlike|\brather than|\binstead of|\banything but|n['’]t)\b"
    rf"|\\neq?(?![a-zA-Z])|\\neg(?![a-zA-Z])|≠|(?<!\S)!=){_FILLED}\s*\Z",
    re.IGNORECASE,
)
_HIDDEN = re.compile(r"(?:^\s*|[^\d\\}\s]\s+)%|\\verb\*?([^\w\s])(?:(?!\1).)*\Z|~~\Z")
"""On the line before a box: a comment, verbatim text, struck out."""
_SCALED = re.compile(
    r"(?:[-+/^±×÷−][({]?|[\w)}\]][ \t]*\*|[\d}\])]_|\d|(?<![a-zA-Z\\])[a-zA-Z]|[)\]}]|\b(?i:minus|negative)[ \t]+\$?"
    r"|\\(?:cdot|times|div|pm|mp|sqrt|[dtc]?frac\d?|log|ln|lg|exp|(?:arc)?(?:sin|cos|tan)|cot|sec|csc)[ \t]*)\Z"
)
"""Text before a box that makes another value of it; a dash between words and a bullet do not."""
_LOOSE = re.compile(r"[+/^±×÷−*-][ \t]*\Z|\\[a-zA-Z]+[ \t]*\Z")
_HARMLESS = re.compile(
    r"(?:\\(?:text\w*|mbox|hbox|mathrm|mathbf|operatorname|stackrel\s*\{[^{}]*\}|xrightarrow|hspace\*?|color|begin|end|label|tag)\s*\{[^{}]*\}|\\[\])]|[=&]\s*\+"
    r"|(?:^|\s)\*+|^\s*[*+-][ \t]+|[a-zA-Z]{2,}:?[ \t]+-+[ \t]+|\\\\(?:\[\w+\])?)\Z"
)
_SCALE = r"(?:hundred|thousand|million|billion|trillion|dozen|score)s?\b"
_AFTER = re.compile(
    r"(?:[ \t]|\\[,;:!]|\{\})*(?:\d|\{,?\}?[ \t]*\d|\^[ \t]*\{?[ \t]*[-\w]|[*/+-][ \t]*(?:\d|\\(?:sqrt|[dt]?frac|pi)(?![a-zA-Z]))|\\(?:cdot|times|div|pm|mp|over|choose|sqrt|pi|[dtc]?frac(?!\s*\{\s*\\(?:text|mathrm)))(?![a-zA-Z]))"
    r"|(?:[.,:(]|[eE][+-]?)\d|!+[ \t]*\$"
    rf"|[ \t]*(?:\\[ ,;:!]|~)*[ \t]*(?:\\text\w*\s*\{{\s*)?{_SCALE}|\$[ \t]*{_SCALE}(?![ \t]+[a-z])"
)
_REFUSED = re.compile(
    r"[\s$*,;]*(?:\\[)\]])?[\s$*,;]*(?:(?:which|but|and|that|this|it)\s+){0,2}"
    r"(?:(?:is|was|are|seems|looks|would be)\s+(?:(?:also|clearly|definitely)\s+)?(?:not\s+(?:the\s+)?(?:final\s+)?(?:correct|right|answer|true|possible|valid|it\b)|not\s*[.,;!]|wrong|incorrect|false|invalid|impossible)"
    r"|(?:is|was)n['’]t\s+(?:the\s+)?(?:correct|right|answer|true|possible|valid|it\b)|cannot be\s+(?:the\s+)?(?:correct|right|answer|true|valid))"
    r"|[\s$*]*[(\[]\s*(?:incorrect|wrong|false|invalid|not (?:correct|right|valid|the answer))\b|[\s$*]*\?[\s$*]*(?:No|Nope|Wrong)\b"
)
_COMMAND = re.compile(r"\\([a-zA-Z]+)\*?\s*(?:\[[^\[\]]*\]\s*)?(?:\{[^{}]*\}\s*)*\Z")
_STYLES = re.compile(
    r"(?i:text|math|color|bm\Z|bold|under(?:line|brace)|emph|[fmh]?box|boxed|display|ensure|answer|center|large|Large|huge|fcolorbox|framebox|implies|to\Z|(?:long)?(?:left)?rightarrow|multicolumn)"
)
_NEAR = 80
"""Characters before a box in which the group that holds it is looked for."""


class Box(NamedTuple):
    """One brace-balanced ``\\boxed{…}``: where the command starts, and where its content starts and ends."""

    command: int
    start: int
    end: int


def find_boxes(text: str) -> tuple[list[Box], bool]:
    """Return all balanced boxes, outer and inner ones, by their start; and whether the last box is not closed."""
    last = [m.start() for m in _BOX.finditer(text, max(0, len(text) - MAX_COMPLETION))]
    if not last:
        return [], False
    open_braces: list[tuple[int, int]] = []  # (command, content), command -1 for a plain brace
    boxes: list[Box] = []
    newest = -1
    for mark in _MARK.finditer(text, last[0]):
        sign = mark[0]
        if len(sign) > 2:
            newest = mark.start()
            open_braces.append((newest, mark.end()))
        elif sign == "{":
            open_braces.append((-1, mark.end()))
        elif sign == "}" and open_braces:
            command, start = open_braces.pop()
            if command >= 0:
                boxes.append(Box(command, start, mark.start()))
    closed = {box.command for box in boxes}
    return sorted(boxes), newest not in closed or last[-1] > newest


def outermost(boxes: list[Box]) -> list[Box]:
    """Return the boxes that are in no other one."""
    outer: list[Box] = []
    for box in boxes:
        if not outer or box.command > outer[-1].end:
            outer.append(box)
    return outer


def boxed(text: str) -> list[str]:
    """Return the contents of all brace-balanced ``\\boxed{…}`` and ``\\fbox{…}``, outermost ones, in order."""
    return [text[box.start : box.end] for box in outermost(find_boxes(text)[0])]


def last_boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{}``, or None where there is none or it is not closed."""
    boxes, unclosed = find_boxes(text)
    return None if unclosed or not boxes else text[boxes[-1].start : boxes[-1].end]


def is_taken_back(text: str, place: int) -> bool:
    """Return whether the text just before a place denies what follows: ``not really \\boxed{5}``."""
    return bool(_DENIED.search(text[max(0, place - _NEAR) : place]))


def is_denied(text: str, place: int, end: int | None = None) -> bool:
    """Return whether the text around a box makes no answer or another one of it: ``not``, ``-``, ``\\frac{…}5``, ``is wrong``.

    Args:
        text: What holds the box.
        place: Where the box or another answer begins.
        end: Where the content of the box ends; None: only what takes it back is looked for.
    """
    if is_taken_back(text, place):
        return True
    if end is None:
        return False
    before, after = text[max(0, place - _NEAR) : place], text[end + 1 : end + 1 + _NEAR]
    line = before.rpartition("\n")[2]
    if _HIDDEN.search(line) or _REFUSED.match(after) or _AFTER.match(after) or _in_a_group(before):
        return True
    scaled = _SCALED.search(line) or (_LOOSE.search(line) and _SCALED.search(line.rstrip()))
    return bool(scaled) and not _HARMLESS.search(line)


def _in_a_group(before: str) -> bool:
    """Return whether a box is in the braces of a command that is more than a style: ``\\sqrt{``, ``\\cancel{``, ``^{``."""
    depth = 0
    for place in range(len(before) - 1, -1, -1):
        if before[place] in "{}" and (place == 0 or before[place - 1] != "\\"):
            depth += 1 if before[place] == "}" else -1
            if depth < 0:
                opened = before[:place].rstrip()
                command = _COMMAND.search(opened)
                if opened.endswith(("^", "_")) or (command and not _STYLES.match(command[1])):
                    return True
                depth = 0
    return False


def answer_blocks(text: str, start: str, end: str) -> list[str]:
    """Return the contents of the closed blocks between two tags, stripped; one that another opens in is an answer, too.

    A block that is taken back ("not" before it) is none.
    """
    blocks: list[str] = []
    place, opened = 0, []
    for part in re.split(f"({re.escape(start)}|{re.escape(end)})", text) if start and end else ():
        if part == start:
            opened.append(place + len(start))
        elif part == end:
            if opened and (len(blocks) > MOST_ANSWERS or not is_taken_back(text, opened[0] - len(start))):
                ends = [*(at - len(start) for at in opened[1:]), place]
                blocks += [text[a:b].strip() for a, b in zip(opened, ends, strict=True)]
            opened = []
        place += len(part)
    return blocks


def after_reasoning(text: str) -> str | None:
    """Return the text after the last closing reasoning tag; None if reasoning was opened and never closed."""
    place = -1
    opened = False
    lower = text.lower() if len(text.lower()) == len(text) else text
    for start, end in _LOWER_TAGS:
        position = lower.rfind(end)
        if position >= 0:
            place = max(place, position + len(end))
        opened = opened or lower.rfind(start) > max(position, place)
    if place >= 0:
        return text[place:]
    return None if opened else text


def after_thinking(text: str) -> str | None:
    """Return the text after thinking that was opened in it, in any family's tags; None if it never ends, all of it without."""
    lower = text.lower()
    return after_reasoning(text) if any(start in lower for start, _ in _LOWER_TAGS) else text


def opened_tag(prompt: str) -> str:
    """Return the tag with which a rendered prompt opens the thinking of its completions, or an empty string."""
    end = prompt[-200:].rstrip()
    return next((start for start, _ in REASONING_TAGS if end.lower().endswith(start.lower())), "")


def hash_answers(text: str, *, own_line: bool = False) -> list[str]:
    """Return the text after each ``####`` on its line, stripped; ``own_line`` requires the mark at the start of a line."""
    pattern = _OWN_LINE if own_line else _HASHES
    return [line.strip() for line in pattern.findall(text[-MAX_COMPLETION:])]


def hash_answer(text: str) -> str | None:
    """Return the text after the last ``####`` of a GSM8K solution, or None."""
    answers = hash_answers(text)
    return answers[-1] if answers else None
