"""Near-misses of every kind that public reports found paid or unpaid: made by a fixed generator, none is paid."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from algorist_grader import grade, grade_completion
from algorist_grader.markers import REASONING_TAGS

Miss = tuple[str, str]
EACH = 60


def _steps(draw: Random) -> Iterator[Miss]:
    """Rounding down for up; what is equal for every whole number is left out."""
    while True:
        a, b, c, shift = draw.randint(1, 5), draw.randint(-4, 4), draw.randint(2, 7), draw.choice((-1, 0, 1))
        inner = f"\\frac{{{a}n{b:+d}}}{{{c}}}"
        down, up = f"\\lfloor{inner}\\rfloor", f"\\lceil{inner}\\rceil"
        if any((a * n + b) // c != -((-a * n - b) // c) + shift for n in range(1, 200)):
            yield f"{up}{shift:+d}".removesuffix("+0"), down
            yield down, f"{up}{shift:+d}".removesuffix("+0")
        k = draw.randint(2, 5)
        yield f"\\lceil\\log_{k} n\\rceil", f"\\lfloor\\log_{k} n\\rfloor+1"
        yield f"\\lceil x\\rceil+{k}", f"\\lfloor x\\rfloor+{k + 1}"
        yield f"\\lfloor x+\\frac1{k}\\rfloor", f"\\lceil x-\\frac{{{k - 1}}}{k}\\rceil"


def _signs(draw: Random) -> Iterator[Miss]:
    while True:
        k = draw.randint(1, 30)
        yield f"{k}(-1)^{{n}}", f"{k}(-1)^{{n+1}}"
        yield f"{k}\\cos n\\pi", f"{k}(-1)^{{n+1}}"
        yield f"{k}\\cos 2n\\pi", f"{k}(-1)^n"
        yield f"{k}\\sin^2\\frac{{n\\pi}}{{2}}", f"\\frac{{{k}+{k}(-1)^n}}{{2}}"


def _dates(draw: Random) -> Iterator[Miss]:
    while True:
        y, m, d = draw.randint(1900, 2099), draw.randint(1, 12), draw.randint(1, 28)
        yield str(y - m - d), f"{y}-{m:02d}-{d:02d}"
        yield f"{y}-{m:02d}-{d + 1:02d}", f"{y}-{m:02d}-{d:02d}"
        yield f"{m}/{y * d}", f"{m}/{d}/{y}"
        yield f"{-m} hours", f"{d}-{d + m} hours"


def _roots(draw: Random) -> Iterator[Miss]:
    while True:
        name, k, m = (
            draw.choice(("arctan", "sin", "ln", "cos")),
            draw.randint(2, 9),
            draw.choice((2, 3, 5, 7)),
        )
        yield f"\\sqrt{m}\\{name} {k}", f"\\{name} {k}\\sqrt{m}"
        yield f"\\{name}(2\\sqrt{m})", f"\\{name} {2 * k}\\sqrt{m}"


def _names(draw: Random) -> Iterator[Miss]:
    while True:
        first, second = sorted(draw.sample("abmnpqxy", 2))
        a, b = draw.sample(range(1, 60), 2)
        yield f"({second},{first})=({a},{b})", f"({a},{b})"
        yield f"({second},{first})=({a},{b})", f"({first},{second})=({a},{b})"
        yield f"{second}:{first}={a}:{b}", f"{a}:{b}"


def _labels(draw: Random) -> Iterator[Miss]:
    while True:
        letter, other = draw.sample("ABCDE", 2)
        v = draw.randint(2, 99)
        gold = draw.choice(
            (
                f"\\textbf{{({letter})}}\\ {v}",
                f"({letter})~{v}",
                f"{letter}) {v}",
                f"{v} \\text{{ ({letter})}}",
                f"\\text{{({letter}) }}{v}",
            )
        )
        yield other, gold
        yield str(v + 1), gold
        yield f"\\textbf{{({other})}}\\ {v}", gold
        yield f"({letter}) {v + 1}", gold
        yield f"{letter} or {other}", gold
        yield f"({letter}) or ({other})", letter
        yield f"\\text{{{other}: a longer text}}", letter


def _factors(draw: Random) -> Iterator[Miss]:
    while True:
        k, c = draw.randint(2, 9), draw.randint(1, 9)
        yield f"(n{k})^{{n-{c}}}", f"n{k}^{{n-{c}}}"
        yield f"n{k}^{{n-{c}}}", f"n{k}^{{n-{c + 1}}}"
        yield f"(n+{c}){k}^n", f"(n+{c + 1}){k}^n"
        yield f"n!{k}^{{n}}", f"(n+1)!{k}^n"
        yield f"n{k}^{{n}}", f"n+{k}^n"


def _functions(draw: Random) -> Iterator[Miss]:
    while True:
        name, other = draw.sample(("N", "A", "a", "D", "C", "M", "\\phi", "s"), 2)
        k = draw.randint(2, 40)
        yield f"{name}(n)={k}n+1", f"{k}n+2"
        yield f"{name}(n)={k}n+1", f"{other}(n)={k}n+1"
        yield f"{k + 1}n+1", f"{name}(n)={k}n+1"


def _small(draw: Random) -> Iterator[Miss]:
    while True:
        k, m = draw.randint(2, 59), draw.randint(1, 8)
        yield f"{k}^\\circ {m}'", f"{k}^\\circ {m + 1}'"
        yield f"{k}^\\circ {m}'", f"{k}.{m}^\\circ"
        yield f"{k}‰", f"{k}\\%"
        yield f"{k} pct", f"{k}00"
        yield f"0.\\dot{{{m}}}", f"0.{m}"
        yield f"0.{m}\\dot{{{m + 1}}}", f"0.\\dot{{{m}}}\\dot{{{m + 1}}}"
        yield f"{m}{m}_{{10}}", f"{m}{m}_{{9}}"
        yield f"x &lt; {k}", f"x > {k}"
        yield f"x<sup>{m}</sup>", f"x^{m + 1}"
        yield f"{m + 1} pm", f"{m + 1}:00 am"
        yield f"{m} hours, {k} minutes", f"{m}.{k} hours" if k != 30 else f"{m} hours"
        yield "a>b", "a<b"
        yield "x<y<z", "z<y<x"
        yield (
            f"{m}\\operatorname{{cis}}\\frac{{\\pi}}{{{k}}}",
            f"{m}\\operatorname{{cis}}\\frac{{\\pi}}{{{k + 1}}}",
        )
        yield f"{k}n-{m} (n\\in\\mathbb{{N}}^*)", f"{k}n+{m}"
        yield f"{k}n (n\\in\\mathbb{{N}}^*)", f"{k}n, n\\in\\mathbb{{Z}}"
        yield f"\x0crac{{{k}}}{{{m}}}", f"rac{{{k}}}{{{m}}}"
        yield f"{k}rac", f"rac{{{k}}}{{1}}"
        yield f"['{k}']", str(k + 1)
        yield f"['{k}', '{m}']", str(k)
        yield f"The minimum is {k}", f"The maximum is {k}"


def _levels(draw: Random) -> Iterator[Miss]:
    """What is applied, nested or written large is not what is multiplied, flat or written small."""
    while True:
        k, m = draw.randint(2, 40), draw.randint(2, 9)
        yield f"f({k}x)", f"{k}f(x)"
        yield f"f(x+{k})", f"f(x)+{k}f"
        yield f"f(x+{k}y)", f"f(x)+f({k}y)"
        yield f"-f({m}x)", f"f(-{m}x)"
        yield f"f(x)f({k})", f"f({k}x)"
        yield f"f({m})", f"{m}f"
        yield f"\\{{\\{{{k}\\}},\\{{{k + m}\\}}\\}}", f"\\{{{k},{k + m}\\}}"
        yield f"{k} mg", f"{k} Mg"
        yield f"{k} \\text{{ MW}}", f"{k} \\text{{ mW}}"
        yield f"{k} ms", f"{k} Ms"


def _placeholders(draw: Random) -> Iterator[Miss]:
    words = (
        "proof",
        "Proof.",
        "notfound",
        "not found",
        "N/A",
        "n/a",
        "null",
        "NaN",
        "see solution",
        "TBD",
        "varies",
        "answers may vary",
    )
    while True:
        word = draw.choice(words)
        yield word, draw.choice((word, f"\\text{{{word}}}", f"${word}$"))


ANSWERS = (
    _steps,
    _signs,
    _dates,
    _roots,
    _names,
    _labels,
    _factors,
    _functions,
    _small,
    _levels,
    _placeholders,
)


@pytest.mark.parametrize("kind", ANSWERS)
def test_no_near_miss_of_an_answer_is_paid(kind: object) -> None:
    made = kind(Random(59))  # type: ignore[operator]
    misses = [next(made) for _ in range(EACH * (2 if kind in (_steps, _labels, _small) else 1))]
    paid = [(answer, gold) for answer, gold in misses if grade(answer, gold).correct]
    assert not paid


def _completions(draw: Random) -> Iterator[Miss]:
    while True:
        a, b = draw.sample(range(2, 99), 2)
        opened, closed = draw.choice(REASONING_TAGS)
        scale = draw.choice((" million", "\\text{ million}", " dozen", " thousand", "~billion"))
        yield f"{opened}maybe \\boxed{{{a}}}, but wait", str(a)
        yield f"{opened.upper()}maybe <answer>{a}</answer>, but", str(a)
        yield f"{opened}\\boxed{{{a}}}{closed}\\boxed{{{b}}}", str(a)
        yield f"\\boxed{{{a}}}{scale}", str(a)
        yield f"\\boxed{{{a}}}, \\boxed{{{b}}}", str(a)
        yield f"\\boxed{{{a}}} and \\boxed{{{b}}}", str(b)
        yield f"\\boxed{{{a}}}, \\boxed{{{b}}}", f"{a},{b + 1}"
        yield f"\\boxed{{{a}}}. Wait, I made an error; it is {b}.", str(a)
        yield f"\\boxed{{{a}}}. Actually, the answer is {b}.", str(a)
        yield f"\\boxed{{{a}}} (incorrect)", str(a)
        yield f"Is it \\boxed{{{a}}}? No.", str(a)
        yield f"The wrong answer would be \\boxed{{{a}}}", str(a)
        yield f"The answer is {a}, or maybe {b}.", str(a)
        yield f"The answer is {a}. Or maybe {b}.", str(a)
        yield f"The answer is {a}, but it should be {b}.", str(a)
        yield f"The answer would be {a} because {a}={a}, or not.", str(a)
        yield f"**Answer:** {a} million", str(a)
        yield f"## Answer\n{a} or {b}", str(a)


def test_no_near_miss_of_a_completion_is_paid() -> None:
    made = _completions(Random(59))
    misses = [next(made) for _ in range(EACH * 9)]
    assert [(text, gold) for text, gold in misses if grade_completion(text, gold).correct] == []


def test_there_are_more_than_a_thousand() -> None:
    pairs: Counter[Miss] = Counter()
    for kind in (*ANSWERS, _completions):
        made = kind(Random(59))
        pairs.update(
            next(made)
            for _ in range(
                EACH * (9 if kind is _completions else 2 if kind in (_steps, _labels, _small) else 1)
            )
        )
    assert len(pairs) >= 1000 and math.isclose(sum(pairs.values()), 9 * EACH + 14 * EACH)
