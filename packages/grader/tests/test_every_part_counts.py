"""Nothing that was read is dropped: every token of an answer is in its tree, every part of a gold answer counts."""

from __future__ import annotations

import ast
import os
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from algorist_grader import grade_many, is_text_only
from algorist_grader.algebra import parser, parser_atoms
from algorist_grader.algebra.canonical import canonical
from algorist_grader.algebra.parser import Parser
from algorist_grader.algebra.spelling import respelled
from algorist_grader.algebra.tokens import Token, Tokenizer
from algorist_grader.algebra.tree import Node, Unreadable
from algorist_grader.text import clean
from benchmarks.golds import datasets, golds
from pairs import pairs
from tests.marks import but

MOST = int(os.environ.get("ALGORIST_GOLDS", 400))
"""Real gold answers of each dataset, drawn by its name; ``ALGORIST_GOLDS=10000`` takes all."""
STAND_IN = (Path(__file__).parents[3] / "tests/data/golds.txt").read_text(encoding="utf-8").splitlines()
SIGNS = {"+": "-", "-": "+", "*": "/", "/": "*", "^": "_", "_": "^", "!": "'", ",": "/", "%": "!", ":": ","}
CHOICE = re.compile(r"\W*(?:\\(?:text|textbf|mathrm)\s*\{)?\W*[A-J]\W*")
ZERO_OR_ONE = re.compile(r"(?<![\d.])0*[01](?:\.0*)?(?![\d.])|(\d) ?/ ?\1")
GENERAL = re.compile(r"\\mathbb\{Z\}|integer")
"""A general solution may lack its clause, and its integer may run backwards."""
SAME = re.compile(r"i\^\{?\d|\^\{?0|\|= ?-?\d")
"""Powers of i and of 0, a determinant: another number gives the same value at times."""
PERIODIC = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot)\b")
BEHIND = [
    " 77", " 13 pears", " cm 13 cm", ", 77", " and 77", " or 77", "; 77", " 77 cm", " 9 mm", " min 30 s", " % 77", "+77", "-77", "=77",
    r" \text{ and }77", " of 77", " per 77", " of x", r"\pmod{77}", " base 77", ">77", " x>77", r"\{77\}", "[77]", "_7",
    r"\text{ cm }77", " basis points", r"\tag{or 77}",
]  # fmt: skip
BEFORE = ["77, ", "77 apples ", "77 and ", "77:", "77=", "x^2=", "77<", "not ", "77 or "]
FACTORS = (
    ["/77", ":77", " to 77", " in 77", r"\cdot 77", r" \times 77", "(77)", "x", "1", "^2"],
    ["-", r"2\cdot ", "77 ", "77/", "5 ft ", r"\sqrt "],
)
"""Behind and before; they change nothing where a 0 or a 1 stands."""


def drawn(name: str, texts: list[str]) -> list[str]:
    return random.Random(name).sample(texts, min(MOST, len(texts)))


def tree(tokens: list[Token]) -> Node | None:
    """Read tokens as ``algebra.read`` does; None: unreadable."""
    for letters in (False, True):
        try:
            return canonical(Parser(list(tokens), units_are_letters=letters).whole())
        except (Unreadable, ArithmeticError, ValueError):
            continue
    return None


def another(token: Token) -> Token | None:
    """A token of the same kind that says something else; None for brackets and commands."""
    kind, value, space = token
    if kind == "num":
        return Token(kind, (value[0] + Fraction(7, 3), f"{value[1]}7"), space)  # type: ignore[index]
    other = {
        "sym": "QW",
        "fn": ("tan", "cos"),
        "rel": "<>",
        "word": ("zebras", "lions"),
        "text": ("zebras", "lions"),
    }.get(kind)
    if other:
        return Token(kind, other[value == other[0]], space)
    return Token(kind, SIGNS[str(value)], space) if value in SIGNS else None


def unused(text: str) -> Iterator[tuple[str, str]]:
    """Yield the tokens of an answer whose change leaves its tree as it is."""
    try:
        tokens = Tokenizer(respelled(clean(text) or "")).run()
    except Unreadable:
        return
    whole = tree(tokens)
    for place, token in enumerate(tokens if whole else []):
        changed = another(token)
        if changed and tree([*tokens[:place], changed, *tokens[place + 1 :]]) == whole:
            yield text, token.text


@pytest.mark.slow
def test_every_token_of_an_answer_is_part_of_its_tree() -> None:
    texts = {text for pair in pairs() for text in pair[2:]} | set(STAND_IN)
    counted = sorted(text for text in texts if not ZERO_OR_ONE.search(text))
    assert len(counted) > 1_500
    assert [one for text in counted for one in unused(text)] == []


@pytest.mark.slow
def test_every_token_of_every_gold_is_part_of_its_tree(shared_data: Path) -> None:
    texts = set()
    for name in datasets():
        texts |= set(drawn(name, sorted({gold for gold in golds(name) if not gold.strip("-").isdigit()})))
    assert [one for text in sorted(texts) if not ZERO_OR_ONE.search(text) for one in unused(text)] == []


def test_only_four_methods_of_the_parser_move_its_cursor() -> None:
    """``step`` and ``take`` return the token, ``attempt`` gives back what made nothing, ``again`` must end where the first reading did."""
    moves = set()
    for module in (parser, parser_atoms):
        for function in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if (
                        isinstance(node, ast.Attribute)
                        and node.attr == "at"
                        and isinstance(node.ctx, ast.Store)
                    ):
                        moves.add(function.name)
    assert moves == {"__init__", "step", "take", "attempt", "again"}


def items(text: str) -> list[str]:
    """The items of a list, or of what stands between the outermost brackets, with their separators: joined they are the text."""
    parts, depth, start = [], 0, 0
    for mark in re.finditer(r"\\[{},;]|[()\[\]{},;]| and | or |\\text *\{ *(?:and|or) *\}", text):
        sign = mark[0]
        if sign in ("\\,", "\\;"):
            continue
        if sign in "()[]{}" or sign in ("\\{", "\\}"):
            depth += 1 if sign[-1] in "([{" else -1
        elif depth == 0:
            parts += [text[start : mark.start()], sign]
            start = mark.end()
    return [*parts, text[start:]]


def dropped_or_added(gold: str) -> Iterator[str]:
    bracketed = re.fullmatch(
        r"((?:\w+ *= *)?(?:\\left *)?(?:\\\{|[(\[]))(.+?)((?:\\right *)?(?:\\\}|[)\]]))", gold
    )
    before, inner, behind = bracketed.groups() if bracketed else ("", gold, "")
    parts = items(inner)
    if len(parts) < 3 or len({p.strip() for p in parts[::2]}) < len(parts[::2]) or GENERAL.search(parts[-1]):
        return
    for place in range(0, len(parts), 2):
        rest = parts[:place] + parts[place + 2 :] if place + 1 < len(parts) else parts[: place - 1]
        yield f"{before}{''.join(rest)}{behind}"
        yield f"{before}{''.join([*parts[: place + 1], ', 77', *parts[place + 1 :]])}{behind}"


def changed(gold: str) -> Iterator[str]:
    """Answers in which one part of the gold answer is another, is missing, or is one too many."""
    for number in [] if PERIODIC.search(gold) else re.finditer(r"\d+(?:\.\d+)?", gold):
        start, end = number.span()
        if not SAME.search(gold.replace("\n", " ")):
            yield f"{gold[:start]}{int(float(number[0])) + 5}{gold[end:]}"
        if start or not re.match(r" *=", gold[end:]):  # 0.56 = 56% is 56%
            yield gold[:start] + gold[end:]
    yield from dropped_or_added(gold)
    factors = ([], []) if ZERO_OR_ONE.search(gold) or "\\pm" in gold or GENERAL.search(gold) else FACTORS
    yield from (f"{gold}{text}" for text in BEHIND + factors[0])
    yield from (f"{text}{gold}" for text in BEFORE + factors[1])


def paid(texts: list[str], most: int) -> tuple[int, list[tuple[str, str]]]:
    """Count the changed answers graded, and return those that were paid: at most so many of each gold."""
    asked = []
    for gold in texts:
        plain = gold.strip("$ ")
        if plain == "77" or CHOICE.fullmatch(plain) or (not re.search(r"\d", plain) and is_text_only(plain)):
            continue
        answers = [answer for answer in dict.fromkeys(changed(plain)) if answer != plain]
        asked += [(a, gold) for a in random.Random(gold).sample(answers, min(most, len(answers)))]
    verdicts = grade_many(asked, workers=2)
    return len(asked), [pair for pair, verdict in zip(asked, verdicts, strict=True) if verdict.correct]


@pytest.mark.slow
def test_no_changed_part_is_paid() -> None:
    count, found = paid(STAND_IN, 100)
    assert count > 2_000 and found == []


@pytest.mark.slow
@pytest.mark.parametrize("name", but(datasets(), "college math", "math train", "math test", "olympiadbench"))
def test_no_changed_part_of_a_real_gold_is_paid(shared_data: Path, name: str) -> None:
    texts = list(dict.fromkeys(golds(name)))
    numbers = [gold for gold in texts if re.fullmatch(r"-?[\d.,]+", gold)]
    count, found = paid(drawn(name, [gold for gold in texts if gold not in set(numbers)]), 12)
    plain, more = paid(numbers[:200], 12)
    assert count + plain >= 300 and found + more == []
