"""Third-party judgement: math-verify (and with it sympy and latex2sympy2), imported only in a worker."""

from __future__ import annotations

from algorist.errors import MissingExtraError

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


def latex_verify(answer: str, gold: str) -> bool | None:
    """Return math-verify's verdict, its own timeouts off (the worker has a harder one); None: the gold is unreadable."""
    ways = [LatexExtractionConfig(), ExprExtractionConfig()]
    truth = parse(_marked(gold), extraction_config=ways, parsing_timeout=None, raise_on_error=False)
    if not truth:
        return None
    parsed = parse(_marked(answer), extraction_config=ways, parsing_timeout=None, raise_on_error=False)
    return bool(verify(truth, parsed, timeout_seconds=None))


def _marked(text: str) -> str:
    return text if "$" in text or "\\boxed" in text else f"${text}$"
