"""Normalization of a model's text to one spelling: unicode, LaTeX spacing, wrappers. Linear in the length of the text."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

MAX_ANSWER = 4_000
"""Longer answers are refused before anything reads them (characters)."""

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣ", "0123456789+-()nix", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₙₓ", "0123456789+-nx", strict=True))
_VULGAR = {
    **dict(zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚", "12 13 23 14 34 15 25 35 45 16 56".split(), strict=True)),
    **dict(zip("⅛⅜⅝⅞⅐⅑", "18 38 58 78 17 19".split(), strict=True)),
}
_SIGNS = {
    "−": "-", "‐": "-", "‑": "-", "‒": "-", "–": "-", "—": "-", "﹣": "-", "－": "-",
    "×": "\\times ", "⋅": "\\cdot ", "·": "\\cdot ", "∙": "\\cdot ", "∗": "*", "÷": "/", "⁄": "/", "∕": "/", "∶": ":",
    "√": "\\sqrt ", "∛": "\\cbrt ", "π": "\\pi ", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "⩽": "\\le ", "⩾": "\\ge ",
    "≠": "\\ne ", "≈": "\\approx ", "≡": "\\equiv ", "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ",
    "°": "^\\circ ", "º": "^\\circ ", "˚": "^\\circ ", "℃": "^\\circ C", "℉": "^\\circ F", "…": "\\ldots ", "⌊": "\\lfloor ",
    "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "⟨": "\\langle ", "⟩": "\\rangle ", "〈": "\\langle ", "〉": "\\rangle ",
    "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}",
    "“": '"', "”": '"', "‘": "'", "’": "'", "′": "'", "，": ",", "。": ".", "％": "%", "٪": "%", "٫": ".", "٬": ",",
    "€": " euro ", "£": " sterling ", "₹": " rupee ", "¥": " yen ", "¢": " cents ", "Ω": "\\Omega ", "→": "\\to ", "∖": "\\setminus ", "∣": "|", "｜": "|", "∘": "\\circ ", "℅": "%", "‰": "\\cdot\\frac{1}{1000}",
}  # fmt: skip
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho _ sigma tau upsilon phi chi psi omega"
_GREEK_SIGNS = {chr(0x3B1 + i): f"\\{name} " for i, name in enumerate(_GREEK.split()) if name != "_"}
_TABLE = str.maketrans(
    {**_GREEK_SIGNS, **_SIGNS, **{c: f"\\frac{{{v[0]}}}{{{v[1]}}}" for c, v in _VULGAR.items()}}
)
_RUNS = (
    (re.compile(f"[{''.join(_SUPERSCRIPTS)}]+"), _SUPERSCRIPTS, "^"),
    (re.compile(f"[{''.join(_SUBSCRIPTS)}]+"), _SUBSCRIPTS, "_"),
)
_INVISIBLE = re.compile("[\u200b-\u200f\u2060-\u2064\ufeff\u00ad\u202a-\u202e\u2066-\u2069]")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffd]")
_EATEN = re.compile(
    r"[\x07\x08\x0b\x0c]|\t(?=(?:ext|frac|ilde)\{|imes|heta|riangle)|\r(?=ho\b|ight|angle|floor|ceil)"
)
"""Remains of ``\\frac``, ``\\text``, ``\\rho`` after a single backslash in JSON: refused before white space is taken off."""
_TWO_BACKSLASHES = re.compile(
    r"\\\\(?=(?:[dt]?frac|sqrt|pi|text|times|cdot|left|right|leq?|geq?|infty|pm|sin|cos|tan|ln|log|math\w+|boxed|theta|alpha|beta|circ)(?![a-z]))"
)
_HTML = re.compile(r"&(?:#\d{1,6}|#x[\da-fA-F]{1,5}|[a-zA-Z]{2,8}\d{0,2});|<su([pb])>([^<>]{1,40})</su[pb]>")
_DOTTED = re.compile(r"(?<=\.)(\d*)\\dot\s*\{?\s*(\d)\s*\}?(?:(\d*)\\dot\s*\{?\s*(\d)\s*\}?)?(?!\d)")
_QUOTED = re.compile(r"""\[\s*(?:'[^']*'|"[^"]*")(?:\s*,\s*(?:'[^']*'|"[^"]*"))*\s*\]""")
_ORDINAL = re.compile(r"(?<=\d)\^\s*\{?\s*\\(?:text|mathrm)\s*\{\s*(st|n[d]|rd|th)\s*\}\s*\}?")
_HOUR = re.compile(r"(1[0-2]|0?[1-9])(?: (?=[ap])|(?=[ap]\.)|(?=[AP]M))([apAP])\.? ?[mM]\.?")
_SIZES = re.compile(
    r"\\(?:left|right|[bB]ig{1,2}[lrm]?)(?![a-zA-Z])\s*\.?(?=[^\d])|\\(?:left|right)(?![a-zA-Z])"
)
_STYLES = re.compile(
    r"\\(?:displaystyle|textstyle|limits|nolimits|strut|quad|qquad|thinspace|medspace|enspace|negthinspace|hfill|noindent"
    r"|centering|rm|bf|it|large|Large)(?![a-zA-Z])|\\(?:hspace|vspace|hphantom|phantom|kern|label)\*?\s*\{[^{}]*\}"
)
_COLOURS = re.compile(r"\\(?:(?:text)?color|colorbox)\s*(?:\[[^\[\]]*\]\s*)?\{[^{}]*\}|\\bbox\s*\[[^\[\]]*\]")
_ROMAN = re.compile(r"\{\s*\\rm(?![a-zA-Z])\s*([^{}\\]*)\}")
_ENDS = ("\\checkmark", "\\blacksquare", "\\square", "\\Box", "\\qed", "\\", *"✓✔✅■□∎", " .", " \\")
_STARTS = ("\\therefore", "\\implies", "\\Rightarrow", "\\Longrightarrow", "\\rightarrow", "\\to ", *"∴⇒→✅")
_SPACES = re.compile(r"(?<!\\)\\[,;:!> \n]|~|&nbsp;")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\s?\\!|\\,)\s*(?=\d{3}(?!\d))")
_BOLD_LEAD = re.compile(r"\*\*((?:the )?(?:final )?(?:answer|solution|result)):?\*\*:?\s*", re.IGNORECASE)
_TEXT_LEAD = re.compile(r"\\(?:text|textbf|textit|mathrm)\s*\{([^{}\\]*)\}\s*")
_WORDS_AROUND = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{([^{}\\$]*(?:\d|,| and |=)[^{}\\$]*)\}")
_TIME = re.compile(r"(\d{1,2}:\d\d)\s*(?:\\text\s*\{\s*)?([ap])\.?\s?m\b\.?\s*\}?", re.IGNORECASE)
_CLOCK = re.compile(r"\b([ap])\.\s?m\.?(?![a-z])", re.IGNORECASE)
_WRAPS = (
    ("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("***", "***"), ("**", "**"), ("__", "__"),
    ("```", "```"), ("`", "`"), ('"', '"'), ("*", "*"), ("\\boxed{", "}"), ("\\fbox{", "}"), ("\\ensuremath{", "}"), ("\\mbox{", "}"),
)  # fmt: skip
_OPENERS = tuple(start for start, _ in _WRAPS)
_MOST_WRAPS = 8
_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore)\s*,?\s+)?(?:(?:the|my|our)\s+)?(?:final\s+|correct\s+)?"
    r"(?:(?:answer|ans|solution|result|value)\s*(?:is|are|=|:|is:)\s*:?\s*(?:equal to\s+)?"
    r"|value of (?=[a-z]\s*(?:is|=))|point (?=\()|it is (?!not)|a total of |both (?=.* and )|(?:exactly|equals|therefore),?\s+(?=[-\d\\$.]))",
    re.IGNORECASE,
)


def stripped(text: str) -> str:
    """Return a text without white space around it; where an escape of JSON ate a backslash it stays, for the grader to say so."""
    return text if _EATEN.search(text) else text.strip()


def closing_brace(text: str, start: int) -> int:
    """Return the position of the brace that closes the one at ``start``, or -1; escaped braces do not count."""
    depth = 0
    position = start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 2
            continue
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return -1


def _unicode(text: str) -> str:
    for pattern, table, mark in _RUNS:
        text = pattern.sub(lambda m, t=table, k=mark: f"{k}{{{''.join(t[c] for c in m[0])}}}", text)  # type: ignore[misc]
    text = _INVISIBLE.sub("", text).translate(_TABLE)
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKC", text).translate(_TABLE)
    return "".join(
        str(unicodedata.decimal(c)) if not c.isascii() and unicodedata.decimal(c, None) is not None else c
        for c in text
    )


def _unescaped(match: re.Match[str]) -> str:
    """Decode a sign of HTML: ``&lt;``, ``&pi;``, ``<sup>2</sup>``."""
    if match[1]:
        return f"{'^' if match[1] == 'p' else '_'}{{{match[2]}}}"
    from html import unescape  # a table of 2,000 names, which few answers need

    return unescape(match[0])


def _unwrap(text: str) -> str:
    """Take off what surrounds the whole: dollar signs, emphasis, a box, quotes."""
    for _ in range(_MOST_WRAPS if text.startswith(_OPENERS) else 0):
        changed = False
        for start, end in _WRAPS:
            if len(text) <= len(start) + len(end) - 1 or not (text.startswith(start) and text.endswith(end)):
                continue
            inside = text[len(start) : -len(end)]
            if end == "}":
                if closing_brace(text, len(start) - 1) != len(text) - 1:
                    continue
            elif start in inside or end in inside:
                continue
            text, changed = inside.strip(), True
        if not changed:
            break
    return text


def _dollars(text: str) -> str:
    """Take off dollar signs that open and close mathematics; a lone one is a currency sign."""
    bare = [m.start() for m in re.finditer(r"(?<!\\)\$", text)]
    if len(bare) == 1:
        return text[: bare[0]] + "\\$" + text[bare[0] + 1 :]
    return re.sub(r"(?<!\\)\$", " ", text).strip() if len(bare) % 2 == 0 else text


def _marks_off(text: str) -> str:
    """Take off arrows in front, and ticks, ends of proofs and line breaks at the end; never all of a text."""
    while text.endswith(_ENDS) or text.startswith(_STARTS):
        before = text
        for mark in _ENDS:
            if len(text) > len(mark) and text.endswith(mark):
                text = text[: -len(mark)].rstrip()
        for mark in _STARTS:
            if len(text) > len(mark) and text.startswith(mark):
                text = text[len(mark) :].lstrip()
        if text == before:
            break
    return text


def clean(text: str) -> str | None:
    """Return the text in one spelling, or None where it holds control characters or is struck out.

    Unicode signs become LaTeX, digits of any script become ASCII, spacing and size commands go, wrappers around the
    whole (``$``, ``\\boxed``, ``**``) go, one trailing full stop goes. Short texts are remembered.
    """
    return _cleaned(text) if len(text) <= 200 else _cleaned.__wrapped__(text)


@lru_cache(maxsize=16_384)
def _cleaned(text: str) -> str | None:
    if _EATEN.search(text):
        return None
    text = _marks_off(text.strip())
    if "&" in text or "<su" in text:
        text = _HTML.sub(_unescaped, text)
    if text[:1] == "[" and _QUOTED.fullmatch(text):
        text = ", ".join(one or other for one, other in re.findall(r"""'([^']*)'|"([^"]*)\"""", text))
    if text[:2] == "**":
        text = _BOLD_LEAD.sub("", text, count=1) or text
    if not text.isascii():
        text = _unicode(text).strip()
    if _CONTROL.search(text) or (text[:2] == text[-2:] == "~~"):
        return None
    if "\\" in text or "~" in text or "&" in text:
        if "\\\\" in text and "\\begin" not in text:
            text = _TWO_BACKSLASHES.sub(r"\\", text)
        if "\\dot" in text:
            text = _DOTTED.sub(lambda m: f"{m[1]}\\overline{{{m[2]}{m[3] or ''}{m[4] or ''}}}", text)
        text = _ORDINAL.sub(r"\1", text)
        if "rm" in text or "color" in text or "bbox" in text:
            text = _COLOURS.sub("", _ROMAN.sub(r"\\mathrm{\1}", text))
        text = _SPACES.sub(" ", _STYLES.sub(" ", _SIZES.sub("", _THOUSANDS.sub("", text))))
    elif "{,}" in text:
        text = _THOUSANDS.sub("", text)
    text = _unwrap(text.strip().rstrip(",;"))
    if text[:2] in ("\\t", "\\m") and (words := _WORDS_AROUND.fullmatch(text)):
        text = words[1].strip()
    if ":" in text:
        text = _TIME.sub(lambda m: f"{m[1]} {m[2].lower()}m", text)
    elif hour := _HOUR.fullmatch(text):
        text = f"{hour[1]}:00 {hour[2].lower()}m"
    if "$" in text:
        text = _dollars(text)
    if ".m" in text or ". m" in text:
        text = _CLOCK.sub(r"\1m", text)
    worded = _TEXT_LEAD.match(text) if text[:2] in ("\\t", "\\m") else None
    if worded and worded.end() < len(text) and _LEAD.fullmatch(worded[1].strip() + " "):
        text = text[worded.end() :]
    if text[:1].isalpha():
        lead = _LEAD.match(text)
        if lead and lead.end() < len(text):
            text = text[lead.end() :]
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1]
    return _unwrap(text.strip())


_SIZED_FRACTION = re.compile(r"\\[dtc]frac")
_NEEDED_SPACE = re.compile(r"(\\[a-zA-Z]+) +(?=[a-zA-Z])|\s+")


def _splits_digits(text: str, gap: re.Match[str]) -> bool:
    return text[gap.start() - 1 : gap.start()].isdigit() and text[gap.end() : gap.end() + 1].isdigit()


def tight(text: str) -> str:
    """Return cleaned text for comparing as strings: white space only where two digits or a command and a letter would meet."""
    if " " in text or "\n" in text:
        text = _NEEDED_SPACE.sub(lambda m: f"{m[1]} " if m[1] else " " * _splits_digits(text, m), text)
    return _SIZED_FRACTION.sub(r"\\frac", text) if "frac" in text else text


_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox|textrm)\s*\{([^{}\\]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z .-]*")


def letters_only(text: str) -> str:
    """Return the letters of a text that holds nothing else, after a dot where ``\\text`` says that they are words; else ""."""
    if not text[0].isalpha() and text[0] != "\\":
        return ""
    match = _TEXT.fullmatch(text)
    words = match[1].strip() if match else text
    if "-" in words and not re.search("[a-z]{3}", words):  # p - q
        return ""
    return ("." if match else "") + re.sub(r"[\s.-]+", "", words) if _WORDS.fullmatch(words) else ""
