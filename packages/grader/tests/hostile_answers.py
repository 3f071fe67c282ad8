"""Answers that hang, crash, fill the memory of, or run code in graders: made here, so that the sizes can be read."""

from __future__ import annotations

_CANARY = "algorist_was_here"


def _towers() -> list[str]:
    towers = [
        "9^{9^{9}}", "9^{9^{9^{9}}}", "9^{9^{9^{9^{9}}}}", "9**9**9**9", "9^9^9^9", "2^{2^{2^{2^{2^{2}}}}}", "10^{10^{10}}",
        "10^{100000000}", "10^{-100000000}", "7^{10^{9}}", "(-9)^{9^{9}}", "(1/9)^{9^{9}}", "1.0000001^{10^{12}}", "e^{e^{e^{e^{e}}}}",
        "\\pi^{\\pi^{\\pi^{\\pi^{\\pi}}}}", "2^{10^{6}}", "3^{999999}", "3^{999999}+1", "\\sqrt{2}^{10^{9}}", "x^{10^{12}}", "x^{x^{x^{x^{x}}}}",
        "1e999999999", "1e-999999999", "1E400", "9e9e9e9", "10^{10^{10}}-10^{10^{10}}", "e^{10^{9}}", "e^{-10^{9}}", "\\exp(\\exp(\\exp(9)))",
        "i^{9^{9^{9}}}", "2^{\\sqrt{10^{30}}}", "0^{0^{0^{0}}}", "0^{-1}", "(1+10^{-30})^{10^{30}}", "123456789^{123456789}",
    ]  # fmt: skip
    return (
        towers
        + ["^".join(["9"] * n) for n in (50, 500, 1500)]
        + ["9^{" * n + "9" + "}" * n for n in (20, 39, 41, 300)]
    )


def _combinatorics() -> list[str]:
    return [
        "100000000!", "10000000000!", "(10^9)!", "((9!)!)!", "9!!!!!!!", "(9!)!", "\\binom{10^9}{5*10^8}", "\\binom{1000000000}{500000000}",
        "{10^9 \\choose 5}", "\\binom{10^{100}}{10^{99}}", "\\binom{-1}{10^{9}}", "(-5)!", "(1/2)!", "10^{9}!!", "\\gcd(10^{9999},10^{9998})",
        "\\sum_{k=1}^{10^{12}}k^k", "\\prod_{k=1}^{10^{9}}k", "\\int_0^1 x^{x^{x}} dx", "\\lim_{x\\to\\infty}x^{x^x}", "400!", "400!/399!", "401!",
    ]  # fmt: skip


def _large_algebra() -> list[str]:
    return [
        "(x+y+z+w+v+u)^{400}", "(a+b+c+d+e+f+g+h)^{64}", "(1+x)^{1000}", "(1+x)^{100000}", "((1+x)^{64})^{64}", "((((x+1)^9+1)^9+1)^9+1)^9",
        "\\sin(10^{100})", "\\sin(10^{1000000})", "\\tan(\\pi/2)", "\\ln(0)", "\\ln(-1)", "\\arcsin(10^{50})", "\\sin(\\sin(\\sin(9^{9^9})))",
        "\\sqrt{\\sqrt{\\sqrt{\\sqrt{9^{9^9}}}}}", "\\sqrt[10^{9}]{2}", "\\log_{1}(5)", "\\frac{1}{0}", "\\frac{1}{1-1}", "1/(x-x)", "\\sqrt{-1}^{\\sqrt{-1}}",
        "\\lfloor 10^{300}\\pi \\rfloor", "\\begin{vmatrix}" + "\\\\".join("&".join(f"x^{{{i * j}}}" for j in range(12)) for i in range(12)) + "\\end{vmatrix}",
        "+".join(f"\\sqrt{{{n}}}" for n in range(2, 120)), "*".join(f"(x+{n})" for n in range(1, 120)), "+".join(f"x^{{{n}}}" for n in range(250)),
        "-".join(["\\sqrt{2}"] * 200), "\\frac{1}{" * 30 + "x" + "}" * 30, "x_" + "{1" * 30 + "}" * 30, "\\sqrt{1+" * 35 + "x" + "}" * 35,
        "123456789012345678901234567890" * 60, "1." + "3" * 1900, "1/" + "7" * 1900, "0.\\overline{" + "1234567890" * 150 + "}",
    ]  # fmt: skip


def _nesting() -> list[str]:
    found = []
    for n in (39, 41, 100, 1_000, 10_000):
        found += [
            "(" * n + "1" + ")" * n,
            "{" * n + "1" + "}" * n,
            "[" * n,
            "\\frac{1}{" * n + "2" + "}" * n,
            "\\sqrt{" * n + "2" + "}" * n,
        ]
        found += [
            "-" * n + "1",
            "\\boxed{" * n + "3" + "}" * n,
            "\\text{" * n + "3" + "}" * n,
            "\\left(" * n,
            "|" * n,
            "1" + "!" * n,
        ]
        found += [
            "\\begin{pmatrix}" * n,
            "\\{" * n + "1" + "\\}" * n,
            "$" * n,
            "**" * n,
            "\\sin " * n + "x",
            "1" + "^2" * n,
        ]
    return found


def _megabytes() -> list[str]:
    size = 1_000_000
    return [
        "1" * size, "x" * size, " " * size + "3", "(" * size, "\\" * size, "{" * size, "1+" * (size // 2) + "1", "$" * size, "\n" * size + "3",
        "\\frac" * (size // 5), "," * size, "1," * (size // 2), "3" + "." * size, "\\boxed{" + "9" * size + "}", "٣" * (size // 2), "1 " * (size // 2),
        "\\text{" + "a " * (size // 2) + "}", "=" * size, "3=" * (size // 2) + "3", "^" * size, "0." + "0" * size + "1", "é" * (size // 2),
    ]  # fmt: skip


def _injection() -> list[str]:
    return [
        f"__import__('os').system('touch {_CANARY}')", f"exec(\"open('{_CANARY}','w')\")", f"eval('open(\"{_CANARY}\",\"w\")')",
        "().__class__.__bases__[0].__subclasses__()", f"lambda: open('{_CANARY}','w')", f"[x for x in (open('{_CANARY}','w'),)]",
        f"open('{_CANARY}','w').write('x')", f"import os; os.system('touch {_CANARY}')", "{{7*7}}", "${7*7}", "#{7*7}", "%(x)s", "{0.__class__}",
        f"\\write18{{touch {_CANARY}}}", "\\input{/etc/passwd}", f"\\immediate\\write18{{touch {_CANARY}}}", "\\csname end\\endcsname",
        "\\def\\x{\\x\\x}\\x", "\\newcommand{\\a}{\\a\\a}\\a", "\\loop\\repeat", f"'; touch {_CANARY}; '", f"$(touch {_CANARY})", f"`touch {_CANARY}`",
        "sympy.sympify('1')", "S('os.getpid()')", "Integer(3)", "Symbol('x', __class__=1)", "x.__class__", "3 if 1 else 4", "print(3)", "exit()", "quit",
        "True", "None", "nan", "inf", "-inf", "NaN", "1_000", "0x3", "0b11", "0o3", "3j", "3L", "３", "<script>alert(3)</script>", "' or '1'='1",
    ]  # fmt: skip


def _damaged() -> list[str]:
    return [
        "\x00", "3\x00", "\x003", "3\x1b[2J", "\x1b]0;title\x07", "3\r\n4", "\ud800"[:0] + "\ufffd3", "\u202e3", "3\u0301\u0301" * 40, "\U0001f600",
        "\\frac{1}{2", "\\frac{1}", "\\frac", "{3", "3}", "}{", "\\boxed{3", "\\left(3", "\\right)", "\\begin{matrix}3", "\\end{matrix}", "\\begin{", "\\text{3",
        "$3", "3$", "$$3", "\\(3", "3\\)", "\\", "\\\\", "^", "_", "^_", "x^", "x_", "_3", "&", "3&4", "#", "@", "~", "''", '""', "``", "((", "))", "][", "1..2",
        "1,,2", ",", ";", ":", "::", "1:", ":1", "1/", "/1", "1//2", "*", "**", "1**", "+-+-+-3", "3+", "=", "=3=", "==", "<", "<>", "\\ne", "1<", "\\in", "!",
        "%", "\\%", "3%%", "|", "|3", "||", "|||3|||", "\\sqrt", "\\sqrt[", "\\sqrt[3]", "\\sqrt[]{}", "\\log_", "\\sin", "\\sin^", "\\binom{1}", "\\infty",
        "\\infty-\\infty", "\\infty/\\infty", "0\\cdot\\infty", "\\mathbb", "\\mathbb{", "\\unknowncommand{3}", "\\pm\\pm\\pm 3", "\\pm" * 30 + "3", "0.\\overline{}",
        "0.\\overline{9}" * 20, "....", "3....", "3...", "\\dots", "1, 2, \\dots", "1,\\ldots,n", "\\begin{pmatrix}1&2\\\\3\\end{pmatrix}", "_".join("x" * 200),
    ]  # fmt: skip


def hostile() -> list[str]:
    """Return every hostile answer."""
    return [
        *_towers(), *_combinatorics(), *_large_algebra(), *_nesting(), *_megabytes(), *_injection(), *_damaged(),
    ]  # fmt: skip


CANARY = _CANARY
