"""Answer extraction and comparison of published evaluations; ``evaluation.protocols`` names their versions and what else they fix.

Each function returns what was read, the verdict of the original's headline metric, and that of its lenient one.
``benchmarks/protocols.py`` compares them item by item with the originals' own code; ``docs/evaluation.md`` lists what differs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from algorist_grader.child_process import Answer
from algorist_grader.grade import is_right_leniently
from algorist_grader.markers import boxed, find_boxes, outermost
from algorist_grader.numeric import numeric_value
from algorist_grader.workers import pool_for

Score = Callable[[str, Mapping[str, Any]], tuple[str | None, bool, bool]]
"""(completion, the problem's columns) → (answer, right strictly, right leniently)."""

WORK_S = 5.0
"""Limit of one comparison by math-verify in its worker (s), as in the originals."""


# --- lm-evaluation-harness

_FLEXIBLE = re.compile(r"(?:-?[$0-9.,]{2,})|(?:-?[0-9]+)")


def gsm8k(strict: str) -> Score:
    """Return the scoring of a GSM8K task: its strict-match pattern, the last number (flexible-extract), exact match."""

    def score(text: str, problem: Mapping[str, Any]) -> tuple[str | None, bool, bool]:
        first, numbers = re.search(strict, text), _FLEXIBLE.findall(text)
        gold = _bare(problem["answer"])
        last = _bare(numbers[-1].strip()) == gold if numbers else False
        return (first[1], _bare(first[1].strip()) == gold, last) if first else (None, False, last)

    return score


def _bare(text: str) -> str:
    """Return the text that exact_match compares: without commas, dollars, what comes before ``####`` and one final point."""
    return re.sub(r"\.$", "", re.sub(r"(?s).*#### ", "", text.replace(",", "").replace("$", ""))).lower()


def minerva(text: str, problem: Mapping[str, Any]) -> tuple[str | None, bool, bool]:
    """Score as ``minerva_math`` does: exact_match on the stated final answer, math-verify on the whole text."""
    stated = re.search(
        r"Final Answer: The final answer is(.*?). I hope it is correct.", f"{text}I hope it is correct."
    )
    answer = minerva_form(stated[1].strip()) if stated else None
    gold = minerva_form(next(iter(boxed(problem["solution"])[-1:]), ""))
    exact = bool(answer) and (answer == gold or ask_published("same_latex", str(answer), gold).value)
    return answer, bool(exact), bool(ask_published("same_texts", text, problem["solution"]).value)


_UNITS = (
    "square ways integers dollars mph inches ft hours km units sue points feet minutes digits cents degrees cm gm pounds "
    "meters meals edges students childrentickets multiples"
).split()
_MARKS = (
    "\\ldots", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}",
    "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_WORDS = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REWRITTEN = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt(\[[^\]]*\])(\w)", r"sqrt\1{\2}"),
    (r"sqrt(?!\[)([^{])", r"sqrt{\1}"),
)


def minerva_form(answer: str) -> str:
    """Return the normal form of a final answer.

    Source: Lewkowycz et al. 2022, appendix D, with what lm-evaluation-harness 3.1 changed: units are words, commas thousands.
    """
    text = answer.split("=")[-1]
    text = re.sub(rf"(?<!\\)\b(?:{'|'.join(_UNITS)})\b", "", text)
    for before, after in _WORDS:
        text = text.replace(before, after)
    for unit in _UNITS:
        text = "".join(
            part if part.startswith("\\") else part.replace(unit, "")
            for part in re.split(r"(\\[a-zA-Z]+)", text)
        )
    for mark in _MARKS:
        text = text.replace(mark, "")
    for pattern, form in _REWRITTEN:
        text = re.sub(pattern, form, text)
    text = text.replace("$", "")
    return text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+", text) else text


# --- lighteval


def lighteval_math_500(text: str, problem: Mapping[str, Any]) -> tuple[str | None, bool, bool]:
    """Score as lighteval's ``math_500``: mathematics in the text equals that in "ANSWER: " and the worked solution."""
    return _lighteval(text, f"ANSWER: {problem['solution']}")


def lighteval_aime(text: str, problem: Mapping[str, Any]) -> tuple[str | None, bool, bool]:
    """Score as lighteval's ``aime24`` and ``aime25``: mathematics in the text equals the answer."""
    return _lighteval(text, str(problem["answer"]))


def _lighteval(text: str, gold: str) -> tuple[str | None, bool, bool]:
    right = bool(ask_published("same_texts", _last_boxes(text.strip()), _last_boxes(gold)).value)
    return _last_box(text), right, right


def _last_boxes(text: str) -> str:
    """Return the text with only its last boxes: one, or several joined by commas, "and", "or"; others are plain groups."""
    boxes = outermost(find_boxes(text)[0])
    first = len(boxes) - 1
    while first > 0 and re.fullmatch(
        r"[\s$]*(?:,?\s*and|,?\s*or|,)[\s$]*", text[boxes[first - 1].end + 1 : boxes[first].command]
    ):
        first -= 1
    return (
        text
        if first < 1
        else text[: boxes[first].command].replace("\\boxed{", "{") + text[boxes[first].command :]
    )


def ask_published(function: str, text: str, gold: str) -> Answer:
    """Run a function of ``algorist_grader.math_verify`` in a worker process with limits."""
    pool = pool_for(f"algorist_grader.math_verify:{function}", WORK_S, 1024)
    return pool.ask(text, json.dumps({"gold": gold}))


def _last_box(text: str) -> str | None:
    return next(iter(boxed(text)[-1:]), None)


# --- MathArena

_SIZES = re.compile(r"\\(?:left|right|[Bb]igg?[lr]?|[Ll]arge|displaystyle|hline|vline)(?![a-zA-Z])")
_SPELLED = {
    "\u221a": "\\sqrt",
    "\u00d7": "\\cdot",
    "\u202f": " ",
    "\u2212": "-",
    "–": "-",
    "\u03c0": "\\pi",
    "·": " \\cdot ",
}


def matharena(text: str, problem: Mapping[str, Any]) -> tuple[str | None, bool, bool]:
    """Score as MathArena does: the last box, or the last integer where it cannot be read; several answers in any order."""
    gold = str(problem["answer"])
    several = "," in gold
    for sign, spelled in _SPELLED.items():
        text = text.replace(sign, spelled)
    last = next((line for line in reversed(text.split("\n")) if boxed(line)), "")
    answer = ",".join(boxed(last)) if several and last else _last_box(text)
    right = None if answer is None else _same_parts(_parts(answer, several), _parts(gold, several))
    if right is None:
        answer = next(iter(re.findall(r"\b\d+\b", text)[-1:]), None)
        right = answer is not None and bool(_same_parts([answer], _parts(gold, several)))
    return answer, right, right or is_right_leniently(text, gold)


def _parts(answer: str, several: bool) -> list[str]:
    """Return an answer's parts in MathArena's normal form; sets, intervals and tuples are lists."""
    text = _SIZES.sub("", re.sub(r"\\[;:,!]|\$|\^(?:\\circ|\{\\circ\})", "", answer)).replace("\\quad", " ")
    text = re.sub(r"\\f?box(?:ed)?\{(.*)\}", r"\1", text)
    text = text.replace("\\{", "(").replace("\\}", ")").replace("[", "(").replace("]", ")").removesuffix(".")
    text = (
        re.sub(r"\\text\s*\{\s*(and|or)\s*\}|\b(and|or)\b", ",", text)
        if several
        else re.sub(r"(\d+),(\d+)", r"\1\2", text)
    )
    text = re.sub(r"\\text\{.*?\}", "", text.replace(";", ",") if several else text)
    text = re.sub(r"\\mathrm\{(.*?)\}", r" \1 ", text).split("=")[-1].split("\\approx")[0].strip()
    text = re.sub(r"sqrt(\d+)", r"sqrt{\1}", re.sub(r"_(\d+)", r"_{\1}", re.sub(r"^(\\ )+", "", text)))
    text = re.sub(r"\\?\b[dt]?(sqrt|frac|binom)\{", r"\\\1{", text)
    while text.startswith("(") and text.endswith(")") and _balanced(text[1:-1]):
        text = text[1:-1].strip()
    parts, begin = [], 0
    for place, sign in enumerate(f"{text},"):
        if sign == "," and (place == len(text) or _balanced(text[begin:place])):
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [part for part in parts if part]


def _balanced(text: str) -> bool:
    depth = 0
    for sign in text:
        depth += (sign in "({") - (sign in ")}")
        if depth < 0:
            return False
    return depth == 0


def _same_parts(answers: list[str], golds: list[str]) -> bool | None:
    """Return whether each gold part has an answer of its own; None where an answer cannot be read."""
    rest = list(answers)
    for gold in golds:
        verdicts = [_same_part(part, gold) for part in rest]
        if None in verdicts:
            return None
        if True not in verdicts:
            return False
        del rest[verdicts.index(True)]
    return not rest


def _same_part(answer: str, gold: str) -> bool | None:
    left, right = (
        numeric_value(text) if re.fullmatch(r"-?[\d.]+", text) else None for text in (answer, gold)
    )
    if left is not None and right is not None:
        return abs(left - right) < 1e-10
    reply = ask_published("same_latex", answer, gold) if _balanced(answer) else Answer(None, "raised")
    return None if reply.error == "raised" else bool(reply.value)
