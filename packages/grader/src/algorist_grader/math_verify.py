"""Third-party judgement: math-verify (and with it sympy and latex2sympy2), imported only in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from algorist_grader.errors import MissingExtraError

INSTALL = "pip install 'math-verify[antlr4_13_2]>=0.9'"

_needed = "latex2sympy2_extended"
try:
    import latex2sympy2_extended as _parser  # noqa: F401  # alone first, to name what is missing

    _needed = "math_verify"
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig
except ImportError as error:
    raise MissingExtraError(
        f"{_needed} cannot be imported ({str(error) or type(error).__name__}); install it with: {INSTALL}"
    ) from error


_WAYS = [LatexExtractionConfig(), ExprExtractionConfig()]


def latex_verify(answer: str, gold: str) -> bool | None:
    """Return math-verify's verdict, its own timeouts off (the worker has a harder one); None: the gold is unreadable."""
    truth = parse(_marked(gold), extraction_config=_WAYS, parsing_timeout=None, raise_on_error=False)
    if not truth:
        return None
    parsed = parse(_marked(answer), extraction_config=_WAYS, parsing_timeout=None, raise_on_error=False)
    return bool(verify(truth, parsed, timeout_seconds=None))


def _marked(text: str) -> str:
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def same_texts(problem: Mapping[str, Any], text: str) -> bool:
    """Return whether the mathematics that a whole text ends with equals that of ``problem["gold"]``."""
    golds, answers = (
        parse(one, extraction_config=_WAYS, parsing_timeout=None, raise_on_error=False)
        for one in (problem["gold"], text)
    )
    return bool(verify(golds, answers, timeout_seconds=None))


def same_latex(problem: Mapping[str, Any], answer: str) -> bool:
    """Return whether sympy reads two LaTeX texts and simplifies their difference to 0; raises where it cannot."""
    import sympy
    from sympy.parsing.latex import _parse_latex_antlr as reader

    # sympy asks for antlr4 4.11; its parser reads the same with 4.13, which math-verify needs.
    reader.version = lambda _: "4.11"
    return bool(sympy.simplify(reader.parse_latex(answer) - reader.parse_latex(problem["gold"])) == 0)
