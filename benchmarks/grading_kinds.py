"""More kinds of rewritings and near-misses, written apart from ``grading_rewritings`` and from our parser, as tables.

A row is (kind, pattern of the gold, what is written for it): the pattern's groups fill the braces, ``<C>`` and its like are
made by ``_extra``. Kinds that real golds seldom have (residues, general solutions) are made with the numbers of real golds.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator

INTEGER, DECIMAL = r"(?P<n>[1-9]\d*)", r"(?P<n>-?\d+\.\d*[1-9])"
FRACTION = r"(?P<s>-?)\\d?frac\{(?P<a>\d+)\}\{(?P<b>\d+)\}"
ROOT = r"(?P<c>\d*)\\sqrt\{(?P<n>\d+)\}"
POINT = r"(?:\\left)?\( *(?P<x>-?\d+) *, *(?P<y>-?\d+) *(?:\\right)?\)"
HALF_OPEN = r"\[ *(?P<x>-?\d+) *, *(?P<y>-?\d+) *\)"
UP, DOWN = r"(?P<o>[(\[]) *(?P<x>-?\d+) *, *\\infty *\)", r"\( *-\\infty *, *(?P<x>-?\d+) *(?P<o>[)\]])"
TWO = r"(?P<x>-?\d+) *, *(?P<y>-?\d{1,2}|-\d+)"
ANY = r"(?P<g>(?!.*(?:=|\\text|\\begin|solution)).*\d)"
LETTER = r"(?:\\text\{)?\(?(?P<l>[A-E])\)?\}?"
SCIENCE = r"(?P<m>\d+(?:\.\d+)?) *\\(?:times|cdot) *10\^\{? *(?P<p>-?\d+) *\}?"
LINE = r"y *= *(?P<r>[-+0-9x{}\\frac ]+)"
SIN = r"(?P<f>sin|cos|tan)"

FAIR = [
    ("wrap", ANY, "\\[{g}\\]|$${g}$$|`{g}`|\\fbox{{{g}}}|Answer: {g}|**Answer:** {g}|Final Answer: {g}|\\text{{Answer: }}{g}|\\;{g}\\;|{{{g}}}|= {g}|\\therefore {g}|\\boxed{{{g}}}."),
    ("number", INTEGER, "({n})|{n}.0|{n}.00|+{n}|<words>|<Words>|\\mathbf{{{n}}}|\\text{{{n}}}|{n}/1|\"{n}\"|*{n}*"),
    ("thousands", r"(?P<n>[1-9]\d{3,8})", "<,>|<brace,>|<\\,>|<thin>|<'>"),
    ("money", INTEGER, "\\${n}|{n} dollars|{n} USD|USD {n}|${n}.00"),
    ("cents", r"(?P<n>[1-9]\d*)\.(?P<c>[1-9]\d)", "${n}.{c}|{n} dollars and {c} cents|{n} dollars {c} cents"),
    ("decimal", DECIMAL, "{n}0|({n})|\\text{{{n}}}"),
    ("fraction", FRACTION, "{s}{a}/{b}|{s}\\tfrac{{{a}}}{{{b}}}|{s}\\frac {{{a}}} {{{b}}}|{s}({a})/({b})|({s}{a})/{b}|{s}{a} / {b}|{s}{{{a}}}/{{{b}}}|{s}{{{a}\\over {b}}}|{s}{a}⁄{b}|{s}{a} \\div {b}|{s}{a}\\cdot\\frac{{1}}{{{b}}}|{s}\\cfrac{{{a}}}{{{b}}}|\\frac{{{s}{a}}}{{{b}}}"),
    ("mixed", FRACTION, "<m 1/2>|<m and 1/2>|<m and frac>|<m \\frac>|<m + 1/2>|<m text and>|<m\\ frac>"),
    ("mixed in words", FRACTION, "<m words>|<m digit words>"),
    ("root", ROOT, "{c}sqrt({n})|{c}√{n}|{c}\\sqrt{{{n}}}|{c} \\sqrt {{{n}}}|<c*>sqrt({n})|{c}\\sqrt[2]{{{n}}}|<c*>{n}^(1/2)|<c*>{n}^{{1/2}}|<c*>{n}^{{0.5}}|<c*>{n}**0.5"),
    ("pi", r"(?P<n>\d+) *\\pi", "{n}π|{n}pi|{n} pi|{n}*pi|\\pi\\cdot {n}|{n}\\cdot\\pi|pi*{n}|{n} \\times \\pi"),
    ("pi over", r"\\d?frac\{\\pi\}\{(?P<n>\d+)\}", "π/{n}|pi/{n}|\\pi/{n}|\\frac{{1}}{{{n}}}\\pi|{{\\pi \\over {n}}}|\\tfrac{{\\pi}}{{{n}}}"),
    ("combinations", INTEGER, "<C>|<\\binom>|<C_n^k>|<bare_nCk>|<_nC_k>|<^nC_k>|<nCk>|<nCr>|<choose>|<\\dbinom>|<bare^nCk>"),
    ("permutations", INTEGER, "<P>|<bare_nPk>|<_nP_k>|<^nP_k>|<nPk>|<nPr>|<P_n^k>|<A_n^k>"),
    ("factorial", INTEGER, "<!>"),
    ("degrees", r"(?P<n>\d+) *\^\{?\\circ\}?", "{n}°|{n} degrees|{n}^\\circ|{n}^{{\\circ}}|{n} deg|{n}|{n}\\degree|{n}\\text{{ degrees}}|\\ang{{{n}}}"),
    ("percent", r"(?P<n>\d+) *\\?%", "{n}%|{n} %|{n} percent|{n}\\%|{n}\\text{{ percent}}|{n} \\text{{%}}|{n} per cent"),
    ("ratio", r"(?P<x>\d+): ?(?P<y>\d)", "{x} : {y}|{x} to {y}|{x}/{y}|\\frac{{{x}}}{{{y}}}|{x} \\text{{ to }} {y}|{x}\\colon {y}"),
    ("point", POINT, "({x}, {y})|({x};{y})|x={x}, y={y}|x = {x} and y = {y}|\\left({x},{y}\\right)|(x,y)=({x},{y})|x={x}, \\; y={y}|x={x}\\text{{ and }}y={y}|\\left( {x}, \\, {y} \\right)|\\bigl({x},{y}\\bigr)|y={y}, x={x}|P({x},{y})"),
    ("half open", HALF_OPEN, "{x} \\le x < {y}|x \\in [{x},{y})|\\{{x \\in \\mathbb{{R}} : {x} \\le x < {y}\\}}|x \\ge {x} \\text{{ and }} x < {y}|{x}<=x<{y}|{y} > x \\ge {x}|[{x};{y})|[{x},{y}[|x≥{x} and x<{y}|\\{{x\\mid {x} \\leq x < {y}\\}}|x \\geq {x} \\land x < {y}"),
    ("up", UP, "{o}{x},+\\infty)|{o}{x},∞)|{o}{x}, oo)|{o}{x}, inf)|x <g> {x}|x \\in {o}{x}, \\infty)|\\{{x: x <g> {x}\\}}|{x} <l> x|\\{{x \\in \\mathbb{{R}} \\mid x <g> {x}\\}}"),
    ("down", DOWN, "(-∞,{x}{o}|(-oo, {x}{o}|(-inf, {x}{o}|x <l> {x}|x \\in (-\\infty, {x}{o}|{x} <g> x"),
    ("positive reals", r"\( *0 *, *\\infty *\)", "\\mathbb{{R}}^+|\\mathbb{{R}}^{{+}}|\\mathbb{{R}}_{{>0}}|\\mathbb{{R}}_+|ℝ^+|R^+|x > 0|\\mathbf{{R}}^+|\\mathbb R^+|\\text{{all positive real numbers}}|positive real numbers|x\\in\\mathbb{{R}}^+"),
    ("nonnegative reals", r"\[ *0 *, *\\infty *\)", "\\mathbb{{R}}_{{\\ge 0}}|\\mathbb{{R}}_{{\\geq0}}|\\mathbb{{R}}^+_0|\\mathbb{{R}}_0^+|\\mathbb{{R}}^+\\cup\\{{0\\}}|x \\geq 0|all nonnegative real numbers|all non-negative real numbers"),
    ("reals", r"\( *-\\infty *, *\\infty *\)", "\\mathbb{{R}}|ℝ|\\text{{all real numbers}}|x \\in \\mathbb{{R}}|(-\\infty, +\\infty)|-\\infty < x < \\infty"),
    ("two values", TWO, "{y}, {x}|\\{{{x},{y}\\}}|{{{x}, {y}}}|{x} and {y}|{x} \\text{{ and }} {y}|x = {x}, {y}|x={x} or x={y}|x_1={x}, x_2={y}|x={x}, x={y}|x \\in \\{{{x},{y}\\}}|x={x} \\lor x={y}|x={x}; x={y}|{x};{y}|{x} or {y}|x={x} \\text{{ or }} x={y}|x_1 = {x} \\text{{ and }} x_2 = {y}|x={x} \\vee x={y}"),
    ("both signs", r"\\pm *(?P<n>\d+)", "±{n}|{n}, -{n}|-{n}, {n}|{n} or -{n}|x=\\pm {n}|+/-{n}|+-{n}|{n} \\text{{ and }} -{n}|\\{{-{n},{n}\\}}"),
    ("choice", LETTER, "({l})|{l}.|{l})|\\text{{{l}}}|\\textbf{{{l}}}|option {l}|Choice ({l})|\\mathrm{{{l}}}|\\textbf{{({l})}}|**{l}**|Answer: {l}|[{l}]"),
    ("science", SCIENCE, "{m}e{p}|{m}E{p}|{m} x 10^{p}|{m}*10^{{{p}}}|{m} × 10^{p}|{m} \\cdot 10^{{{p}}}|{m} * 10**{p}|{m} \\times 10^{{{p}}}|10^{{{p}}} \\times {m}|{m}*10^({p})"),
    ("line", LINE, "f(x) = {r}|{r} = y|y - ({r}) = 0|y(x) = {r}|y={r}+0|\\text{{y}}={r}"),
    ("power of a function", rf"\\{SIN}\^\{{?2\}}? *(?P<x>x|\\theta)", "(\\{f} {x})^2|\\{f}^2({x})|{f}^2({x})|{f}({x})^2|\\left(\\{f} {x}\\right)^2|{f}({x})*{f}({x})"),
    ("logarithm", r"\\ln *(?P<n>\d+)", "ln({n})|ln {n}|\\ln({n})|\\log_e {n}|\\log_{{e}}({n})|\\mathrm{{ln}} {n}|\\operatorname{{ln}}({n})|\\ln{{{n}}}"),
    ("log to a base", r"\\log_\{?(?P<b>\d)\}? *(?P<n>\d+)", "log_{b}({n})|\\log_{{{b}}}{{{n}}}|log_{b} {n}|\\frac{{\\ln {n}}}{{\\ln {b}}}|\\log_{b}({n})"),
    ("exponential", r"e\^\{?(?P<n>-?\d+)\}?", "exp({n})|\\exp({n})|e^{{{n}}}|\\mathrm{{e}}^{{{n}}}|e**({n})|e^({n})|\\exp{{{n}}}|(e)^{{{n}}}"),
    ("complex", r"(?P<a>-?\d+) *(?P<o>[+-]) *(?P<b>\d+)i", "{o}{b}i+({a})|{a} {o} {b} i|{a}{o}i{b}|{a}{o}{b}\\mathrm{{i}}|{a}{o}{b}\\cdot i|z={a}{o}{b}i|{a}{o}i\\cdot{b}"),
    ("nothing", r"\\emptyset", "∅|\\varnothing|\\{{\\}}|\\text{{no solution}}|empty set|no solutions"),
]  # fmt: skip
WRONG = [
    ("mixed", FRACTION, "<m and 1 more>|<m - 1/2>|<m * 1/2>"),
    ("combinations", INTEGER, "<C+>|<P for C>|<\\binom+>"),
    ("permutations", INTEGER, "<C for P>"),
    ("positive reals", r"\( *0 *, *\\infty *\)", "\\mathbb{{R}}|\\mathbb{{R}}^-|\\mathbb{{R}}_{{\\ge 0}}|\\mathbb{{R}}^2|\\mathbb{{Z}}^+|x \\ge 0|all positive integers|all real numbers|\\mathbb{{Q}}^+"),
    ("nonnegative reals", r"\[ *0 *, *\\infty *\)", "\\mathbb{{R}}^+|\\mathbb{{R}}_{{>0}}|\\mathbb{{R}}|\\mathbb{{R}}^-"),
    ("two values", TWO, "{x}|{y}|({x}, {y}, 0)|{x}, {y}, 7654|x={x} and y={y} and z=0|{x}{y}"),
    ("point", POINT, "({y}, {x}, 1)|x={x}|x={x}, y={y}, z=0|{x}|({x})({y})"),
    ("cents", r"(?P<n>[1-9]\d*)\.(?P<c>[1-9]\d)", "{n} dollars|{c} cents|{n} cents and {c} dollars|{n} dollars and 0 cents"),
    ("number", INTEGER, "<n+m> \\pmod m|{n} and 1/2|{n}x|{n}i|\\sqrt{{{n}}}+0.1|not {n}|{n}?|{n}, \\ldots|{n} or more|at most {n}|{n} + k, k\\in\\mathbb{{Z}}|{n}, x\\in\\mathbb{{Z}}"),
    ("half open", HALF_OPEN, "({x},{y})|({x},{y}]|[{x},{y}]|[{y},{x})|{x} < x < {y}|x \\ge {x} \\text{{ or }} x < {y}"),
    ("both signs", r"\\pm *(?P<n>\d+)", "{n}|-{n}|\\mp {n}1"),
    ("percent", r"(?P<n>\d+) *\\?%", "{n}0%|0.{n}%|{n} percent off"),
]  # fmt: skip
# General solutions and residues with numbers of real golds: (gold, fair answers, near-misses), {n} is the number.
MADE = [
    ("\\frac{{\\pi}}{{{n}}}+2k\\pi", "\\frac{{\\pi}}{{{n}}}+2k\\pi, k \\in \\mathbb{{Z}}|x = \\frac{{\\pi}}{{{n}}}+2k\\pi, k\\in\\mathbb{{Z}}|x=\\frac{{\\pi}}{{{n}}}+2k\\pi \\quad (k \\in \\mathbb{{Z}})|\\frac{{\\pi}}{{{n}}}+2k\\pi \\text{{ where }} k \\in \\mathbb{{Z}}|\\frac{{\\pi}}{{{n}}}+2k\\pi, where k is an integer|π/{n} + 2kπ, k ∈ ℤ|\\frac{{\\pi}}{{{n}}}+2\\pi k, k \\in Z|\\frac{{\\pi}}{{{n}}}+2k\\pi, \\text{{ for any integer }} k|\\frac{{\\pi}}{{{n}}}+2k\\pi \\ (k\\text{{ is an integer}})|\\frac{{\\pi}}{{{n}}}+2k\\pi, \\forall k \\in \\mathbb{{Z}}|\\frac{{\\pi}}{{{n}}}+2k\\pi \\text{{ for integer }} k|\\frac{{\\pi}}{{{n}}}+2k\\pi,\\ k\\in\\mathbf{{Z}}|\\frac{{\\pi}}{{{n}}}+2k\\pi \\text{{ for all integers }} k|\\frac{{\\pi}}{{{n}}}+2k\\pi, k=0,\\pm1,\\pm2,\\ldots",
     "\\frac{{\\pi}}{{{n}}}+k\\pi, k \\in \\mathbb{{Z}}|\\frac{{\\pi}}{{{n}}}, k\\in\\mathbb{{Z}}|\\frac{{\\pi}}{{{n}}}+2k\\pi, k \\in \\mathbb{{R}}|\\frac{{\\pi}}{{{n}}}+2k, k\\in\\mathbb{{Z}}|-\\frac{{\\pi}}{{{n}}}1+2k\\pi, k\\in\\mathbb{{Z}}|\\frac{{\\pi}}{{{n}}}+2k\\pi, k \\in \\mathbb{{Z}}, k \\ne 0|\\frac{{\\pi}}{{{n}}}+2k\\pi, k > 0"),
    ("x = \\frac{{\\pi}}{{{n}}} + k\\pi, k \\in \\mathbb{{Z}}", "\\frac{{\\pi}}{{{n}}}+k\\pi|\\frac{{\\pi}}{{{n}}}+n\\pi, n\\in\\mathbb{{Z}}|x=k\\pi+\\frac{{\\pi}}{{{n}}} (k\\in\\mathbb{{Z}})|\\frac{{\\pi}}{{{n}}} + m\\pi where m is an integer|x = \\frac{{\\pi}}{{{n}}}+\\pi k, \\; k \\in \\mathbb Z",
     "\\frac{{\\pi}}{{{n}}}+2k\\pi, k\\in\\mathbb{{Z}}|\\frac{{\\pi}}{{{n}}}, k\\in\\mathbb{{Z}}|k\\pi, k\\in\\mathbb{{Z}}|\\frac{{\\pi}}{{{n}}}+k\\pi, k\\in\\mathbb{{N}}|\\frac{{\\pi}}{{{n}}}|k\\in\\mathbb{{Z}}"),
    ("x = {n}k, k \\in \\mathbb{{Z}}", "{n}k|{n}m, m\\in\\mathbb{{Z}}|{n}k \\text{{ for }} k\\in\\mathbb{{Z}}|x={n}t \\text{{ where }} t \\text{{ is an integer}}|x = {n}n, \\quad n \\in \\mathbb{{Z}}", "{n}|{n}k+1, k\\in\\mathbb{{Z}}|{n}1k|k\\in\\mathbb{{Z}}|{n}k, k\\in\\mathbb{{N}}"),
    ("x \\equiv {n} \\pmod{{<m>}}", "x \\equiv {n} \\pmod <m>|{n} \\pmod{{<m>}}|{n} mod <m>|x ≡ {n} (mod <m>)|x \\equiv {n} \\mod <m>|x\\equiv {n}\\ (\\text{{mod }}<m>)|x \\equiv {n} \\bmod <m>|{n} (mod <m>)|x \\equiv {n} \\;(\\mathrm{{mod}}\\; <m>)|x = {n} \\pmod{{<m>}}|x \\equiv <n+m> \\pmod{{<m>}}|x\\equiv {n}(\\bmod <m>)",
     "{n}|x = {n}|n \\equiv {n} \\pmod{{<m>}}|x \\equiv {n} \\pmod{{<m+1>}}|x \\equiv <n+1> \\pmod{{<m>}}|<n+m>|<m>|x \\equiv {n}|x \\equiv <m> \\pmod{{{n}}}|<n+1> mod <m>"),
    ("{n} \\pmod{{<m>}}", "x\\equiv {n} \\pmod{{<m>}}|{n} (mod <m>)|{n} modulo <m>|<n+m> \\pmod{{<m>}}", "{n}|<n+m>|{n} \\pmod{{<m+1>}}|<n+1>"),
    ("{n}", "", "{n} \\pmod{{<m>}}|\\equiv {n} \\pmod{{<m>}}|{n} (mod <m>)|<n+m> \\pmod{{<m>}}|<m>|{n} mod 1|{n} + <m>k, k\\in\\mathbb{{Z}}"),
]  # fmt: skip

_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
_PARTS = {2: "half", 3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth", 9: "ninth", 10: "tenth"}  # fmt: skip


def _words(number: int) -> str | None:
    if number < 20:
        return _ONES[number]
    if number < 100:
        return _TENS[number // 10] + (f"-{_ONES[number % 10]}" if number % 10 else "")
    rest = _words(number % 100) if number % 100 else ""
    return f"{_ONES[number // 100]} hundred" + (f" {rest}" if rest else "") if number < 1000 else None


def _counted(number: int, count: Callable[[int, int], int]) -> tuple[int, int] | None:
    """Return n and k with 1 < k < n - 1 whose number of choices this is."""
    return next(((n, k) for n in range(4, 31) for k in range(2, n - 1) if count(n, k) == number), None)


def _extra(values: dict[str, str]) -> Iterator[tuple[str, str | None]]:
    """Yield what stands for ``<name>``; None leaves the answer out."""
    number = int(values["n"]) if values.get("n", "").isdigit() else None
    small = number is not None and number < 1000
    words = _words(number) if number is not None and small else None
    yield from [("words", words), ("Words", words and words.capitalize())]
    for mark, text in ((",", ","), ("brace,", "{,}"), ("\\,", "\\,"), ("thin", "\u2009"), ("'", None)):
        yield mark, f"{number:,}".replace(",", text) if text and number is not None else None
    for name, count in (("C", math.comb), ("P", math.perm)):
        found = _counted(number, count) if number else None
        n, k = found or (0, 0)
        shapes = [
            name,
            f"bare_n{name}k",
            f"_n{name}_k",
            f"^n{name}_k",
            f"n{name}k",
            f"n{name}r",
            f"bare^n{name}k",
        ]
        texts = [f"{name}({n},{k})", f"{{}}_{{{n}}}{name}_{{{k}}}", f"_{{{n}}}{name}_{k}", f"^{{{n}}}{name}_{{{k}}}", f"{n}{name}{k}", f"n{name}r({n},{k})", f"{{}}^{{{n}}}{name}_{k}"]  # fmt: skip
        yield from ((shape, text if found else None) for shape, text in zip(shapes, texts, strict=True))
        if name == "C":
            yield from [("\\binom", f"\\binom{{{n}}}{{{k}}}" if found else None), ("C_n^k", f"C_{{{n}}}^{{{k}}}" if found else None), ("choose", f"{{{n} \\choose {k}}}" if found else None)]  # fmt: skip
            yield from [("\\dbinom", f"\\dbinom{{{n}}}{{{k}}}" if found else None), ("C+", f"C({n + 1},{k})" if found else None)]  # fmt: skip
            yield from [("P for C", f"P({n},{k})" if found else None), ("\\binom+", f"\\binom{{{n}}}{{{k - 1}}}" if found and n != 2 * k - 1 else None)]  # fmt: skip
        else:
            yield from [("P_n^k", f"P_{n}^{k}" if found and n < 10 else None), ("A_n^k", f"A_{{{n}}}^{{{k}}}" if found else None), ("C for P", f"C({n},{k})" if found else None)]  # fmt: skip
    yield "!", next((f"{n}!" for n in range(3, 12) if math.factorial(n) == number), None)
    yield "c*", f"{values['c']}*" if values.get("c") else "" if "c" in values else None
    opened = values.get("o", "") in "()"
    yield from [("g", ">" if opened else "\\ge"), ("l", "<" if opened else "\\le")]
    if number is not None:
        modulus = number + 3
        yield from [("m", str(modulus)), ("m+1", str(modulus + 1)), ("n+1", str(number + 1)), ("n+m", str(number + modulus))]  # fmt: skip
    if "b" in values and "a" in values and values["b"].isdigit():
        top, bottom = int(values["a"]), int(values["b"])
        whole, rest = divmod(top, bottom)
        usable = bool(whole and rest) and math.gcd(rest, bottom) == 1
        s, part = values.get("s", ""), f"\\frac{{{rest}}}{{{bottom}}}"
        spoken = _PARTS.get(bottom) if not s and whole < 1000 and rest < 20 else None
        plural = f"{_ONES[rest]} {spoken}{'s' if rest > 1 else ''}" if spoken and not (rest == 1 and bottom == 2) else "a half" if spoken else ""  # fmt: skip
        made = {"m 1/2": f"{s}{whole} {rest}/{bottom}", "m and 1/2": f"{s}{whole} and {rest}/{bottom}", "m and frac": f"{s}{whole} and {part}", "m \\frac": f"{s}{whole}{part}",
                "m + 1/2": f"{s}({whole} + {rest}/{bottom})", "m text and": f"{s}{whole} \\text{{ and }} {part}", "m\\ frac": f"{s}{whole}\\ {part}", "m and 1 more": f"{s}{whole + 1} and {rest}/{bottom}",
                "m - 1/2": None if s else f"{whole} - {rest}/{bottom}", "m * 1/2": f"{s}{whole} \\cdot {rest}/{bottom}" if whole * rest != top else None}  # fmt: skip
        yield from ((name, text if usable else None) for name, text in made.items())
        yield "m words", f"{_words(whole)} and {plural}" if usable and plural else None
        yield "m digit words", f"{whole} and {plural}" if usable and plural else None


def _filled(shape: str, values: dict[str, str]) -> str | None:
    text = shape.format(**values)
    for name, found in _extra(values):
        if f"<{name}>" in text:
            if found is None:
                return None
            text = text.replace(f"<{name}>", found)
    return None if re.search(r"<[^<> =0-9]+>", text) else text


def kinds(gold: str, most: int = 6) -> Iterator[tuple[str, str, bool, str]]:
    """Yield (kind, gold, whether fair, answer) for a bare gold; up to ``most`` of each kind, chosen by the gold."""
    for fair, rows in ((True, FAIR), (False, WRONG)):
        for kind, pattern, shapes in rows:
            found = re.fullmatch(pattern, gold)
            if not found or (kind == "wrap" and len(gold) > 80):
                continue
            values = {name: value or "" for name, value in found.groupdict().items()}
            texts = {t for shape in shapes.split("|") if (t := _filled(shape, values))} - {
                gold,
                f"{{{gold}}}" if re.search(r"[,:$<>\\]", gold) else "",
            }
            for text in random.Random(kind + gold).sample(sorted(texts), min(most, len(texts))):
                yield f"kind: {kind}", gold, fair, text
    if re.fullmatch(r"[2-9]\d?", gold):
        for made, fair_shapes, wrong_shapes in MADE:
            truth = _filled(made, {"n": gold}) or ""
            for fair, shapes in ((True, fair_shapes), (False, wrong_shapes)):
                for shape in shapes.split("|"):
                    text = _filled(shape, {"n": gold})
                    if text and text != truth:
                        yield f"made: {made.format(n='n')}", truth, fair, text
