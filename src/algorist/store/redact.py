"""Keep secrets out of text that leaves the program: terminal, logs, trackers, cards, pages, errors.

What is hidden is known: values of secret environment variables and of stored logins, and the shapes of tokens. Whatever is shown
passes ``safe_text.printable``, which calls ``redact``; what else leaves passes ``redact`` or ``redact_tree``. Files that are read
back are never rewritten; a setting that holds a secret is refused (``refuse_secrets``).
"""

from __future__ import annotations

import base64
import logging
import netrc
import os
import re
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from algorist.errors import ConfigError

HIDDEN = "[redacted]"
LONGEST_RECORD = 20_000
"""Longest message, and longest traceback, of a log record in characters."""
LEAST = 16
# How services say that their tokens begin; GitHub's "Supported secret scanning patterns" lists most. The last: base64 of a token.
_PREFIXES = """
hf_ api_org_ wandb_v1_ AIza ya29. GOCSPX- gsk_ r8_ nvapi- xai- pplx- csk- tgp_v1_ lsv2_pt_ lsv2_sk_ pcsk_ jina_
ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- gldt- glrt- glptt- glsoat- glft- glcbt- ATATT3 ATCTT3 ATBB bkua_ CCIPAT_
LTAI npm_ pypi- rubygems_ dckr_pat_ dckr_oat_ AKCp cmVmd dapi dop_v1_ doo_v1_ dor_v1_ shpat_ shpca_ shppa_ shpss_ SG.
sk_live_ sk_test_ rk_live_ rk_test_ whsec_ sq0atp- sq0csp- tskey- figd_ figo_ lin_api_ lin_oauth_ hvs. hvb. hvr. ntn_
dp.pt. dp.st. dp.ct. dp.sa. glc_ glsa_ NRAK- NRII- sntrys_ sntryu_ pscale_tkn_ pscale_oauth_ pscale_pw_ pul- PMAK- pnu_
sbp_ sb_secret_ nfp_ HRKU- fo1_ fm2_ CFPAT- dt0c01. dt0s01. rdme_ sgp_ xapp- ops_ AGE-SECRET-KEY- p8e- sha256~
aGZf c2st Z2hw
""".split()
# What follows: up to four short parts, then sixteen letters and digits that are no word (of lower case alone, twenty).
_RANDOM = (
    r"(?:[A-Za-z0-9]{1,20}[-_.]){0,4}(?=[a-z]*[A-Z0-9]|[A-Z]+[a-z0-9]|[a-z]{20})[A-Za-z0-9]{16,}[\w.~+/=-]*"
)
# A token begins where a word begins, or after a line end that is written as an escape: "\\nhf_…" in JSON and YAML.
_BEGIN = r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt]))"
_EDGE, _BODY = r"-{{4,5}} ?{} [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)? ?-{{4,5}}", r"(?:[\w+/=:,.\s-]|\\+[nr])"
_KINDS: dict[str, tuple[str | list[str], str]] = {
    "an access token": (_PREFIXES, rf"\b(?:{'|'.join(map(re.escape, _PREFIXES))}){_RANDOM}"),
    "an API key": (
        "sk-",
        r"\bsk-(?:[a-z]{1,12}\d{0,4}-){0,4}[A-Za-z0-9_]{16,}|\bsk-(?=[\w-]{0,99}\d)(?=[\w-]{0,99}[A-Z])[\w-]{24,}",
    ),
    "an AWS key": (["AKIA", "ASIA", "ABIA", "ACCA"], r"\bA(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}(?![A-Z0-9])"),
    "a Slack token": ("xox", r"\bxox[abeoprs][-.][\w-]{10,}"),
    "a Telegram token": (":AA", r"\b\d{8,10}:AA[\w-]{33}"),
    "a JSON web token": ("eyJ", r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"),
    "a bearer token": ("earer ", r"(?<=earer )(?=[\w.~+/=-]*\d)[\w.~+/=-]{20,}"),
    "an Azure key": (["ccountKey=", "ccessKey="], r"(?<=cc)(?:ount|ess)Key=[A-Za-z0-9+/]{40,}=*"),
    "a private key": ("PRIVATE KEY", rf"{_EDGE.format('BEGIN')}(?:{_BODY}*?{_EDGE.format('END')}|{_BODY}*)"),
    "a password in an address": ("://", r"(?<=://)[^/\s:@\"']*:[^/\s@\"']+(?=@)|(?<=://)[\w.~-]{16,}(?=@)"),
    "a token in an address": (
        "=",
        r"(?i:(?<=[?&])(?:access_token|token|api_?key|key|sig|signature|password|auth)=[^&\s\"'#]{8,})",
    ),
}
"""Kind → (what a text, or a word of ``LEAST`` characters, must hold for it to be looked for; its shape): most texts hold none."""
_SHAPES = {kind: (signs, re.compile(shape.replace(r"\b", _BEGIN))) for kind, (signs, shape) in _KINDS.items()}
# A wandb key is 40 hex digits like a git commit, an AWS secret any 40 characters: hidden only after their name and a sign.
_NAMED = re.compile(
    r"(?i)((?:api[_-]?key|wandb[_-]?key|(?:hf|hub|access|auth|api|github|bearer|session)[_-]?token|secret[_-]?(?:access[_-]?)?key"
    r"|secret|password|passwd|\b\w{1,40}_(?:pass|pwd|secret))[\"']?\s*[=:]\s*[\"']?|wandb\s+login\s+|bearer\s+)"
    r"([^\s\"',}\]\[\\]{8,})"
)
_Values = list[tuple[str, re.Pattern[str]]]
_NAMES = ("key", "token", "secret", "passw", "_pass", "_pwd", "wandb", "bearer")
_VARIABLE = re.compile(r"(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASS|PWD|CREDENTIAL)S?(?:_|$)")
_SURE = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "GITHUB_TOKEN"}


def redact(text: str) -> str:
    """Return ``text`` without secrets: known values, the shapes of tokens, and values after a name and a sign."""
    text = _without_values(text, _known_values())
    long_words = " ".join(word for word in text.split() if len(word) >= LEAST)
    for signs, shape in _SHAPES.values():
        if signs in text if isinstance(signs, str) else long_words and any(s in long_words for s in signs):
            text = shape.sub(HIDDEN, text)
    lower = text.lower()
    named = any(name in lower for name in _NAMES)
    return _NAMED.sub(lambda m: m[1] + (HIDDEN if _looks_secret(m[2]) else m[2]), text) if named else text


def redact_tree(value: Any) -> Any:
    """Return lists, mappings and texts without secrets; other values, and what JSON needs around them, stay."""
    return with_texts(value, redact)


def refuse_secrets(value: Any, where: str, key: str = "") -> None:
    """Refuse settings that hold a secret: a recipe is stored, shown and uploaded.

    Raises:
        ConfigError: The setting's key, what it looks like, and where it belongs; never the secret.
    """
    _refuse(value, where, key, _known_values())


def _refuse(value: Any, where: str, key: str, known: _Values) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            named = key and not _kind(str(name), known)
            _refuse(str(name), where, f"{key}.{name}" if named else key or "a key", known)
            _refuse(item, where, f"{key}.{name}" if key else str(name), known)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse(item, where, f"{key}.{index}", known)
    elif isinstance(value, str) and (kind := _kind(value, known)):
        raise ConfigError(
            f"{where}: {redact(key)} holds {kind}. A recipe is stored in the run folder, shown and uploaded; leave it out and "
            "put it into the environment: export HF_TOKEN=… or WANDB_API_KEY=…, or once: hf auth login, wandb login"
        )


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return lists, mappings and texts with every text changed, keys too; other values stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {with_texts(key, change): with_texts(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        make = getattr(value, "_make", type(value))  # a named tuple has its own way
        return make(with_texts(item, change) for item in value)
    return value


class RedactSecrets(logging.Filter):
    """A logging filter that redacts each record and bounds its length; add it to every handler that writes a file."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the message and the traceback in place and let the record pass."""
        record.msg, record.args = redact(_shortened(record.getMessage())), ()
        if record.exc_info and record.exc_info[1] is not None:
            trace = "".join(traceback.format_exception(record.exc_info[1], limit=-30))
            record.exc_text, record.exc_info = redact(_shortened(trace)), None
        return True


def secret_variables() -> set[str]:
    """Return the names of the variables of the environment that hold secrets, by their names."""
    return {name for name in os.environ if _is_secret(name)}


def _is_secret(name: str) -> bool:
    return name in _SURE or _VARIABLE.search(name.upper()) is not None


def _shortened(text: str) -> str:
    if len(text) <= LONGEST_RECORD:
        return text
    half = LONGEST_RECORD // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _kind(text: str, known: _Values) -> str:
    """Name the kind of secret that a text holds, or return an empty string."""
    if _without_values(text, known) != text:
        return "the value of a secret environment variable, or of a stored login"
    return next((kind for kind, (_, shape) in _SHAPES.items() if shape.search(text)), "")


def _known_values() -> _Values:
    """Return the values of now. Reading all variables takes longer than looking for them in a text; comparing their bytes does not."""
    global _now
    if (data := vars(os.environ)["_data"]) != _now[0]:
        _now = dict(data), _values(str(Path.home()))
    return _now[1]


_now: tuple[dict[Any, Any], _Values] = {}, []


def _without_values(text: str, known: _Values) -> str:
    for sign, shape in known:
        if sign in text:
            text = shape.sub(rf"\1{HIDDEN}", text)
    return text


def _values(home: str) -> _Values:
    """Return (what a text must hold, what is hidden after group 1) for stored logins and secret variables.

    A value that looks secret is hidden anywhere, a short one where it is a word of its own, any other after its name.
    """
    hidden, words, shapes = _stored(home), set(), []
    for name, value in os.environ.items():
        if not value or not _is_secret(name) or value[0] in "/~.":
            continue
        after_its_name = rf"({re.escape(name)}[\"'\\]*\s*[=:,]\s*[\"'\\]*){_as_written(value)}(?![A-Za-z0-9])"
        shapes.append((name, re.compile(after_its_name)))
        if len(value) >= 8 and (name in _SURE or _looks_secret(value)):
            coded = base64.b64encode(value.encode("utf-8", "surrogateescape")).decode()
            lines = (line for line in value.splitlines() if len(line) >= 16)
            hidden |= {value, coded.rstrip("=")[:-1], *lines}
        elif len(value) >= 4 and re.search(r"[A-Za-z]", value) and re.search(r"\d", value):
            words.add(value)
    for value in sorted(hidden | words, key=len, reverse=True):
        shape, plain = f"(){_as_written(value)}", max(re.split(r"[\"'\\\s]+", value), key=len)
        if value in words:
            shape = f"(?<![A-Za-z0-9]){shape}(?![A-Za-z0-9])"
        shapes.append((plain, re.compile(shape)))
    return shapes


def _as_written(value: str) -> str:
    """Return a pattern for a value, also where ``repr`` or JSON has put backslashes into it."""
    return "".join(
        (r"\\*" if c in "\"'\\" else "") + (r"(?:\n|\\+n)" if c == "\n" else re.escape(c)) for c in value
    )


def _looks_secret(value: str) -> bool:
    """Tell a secret from a word: digits among letters, mixed case, signs, or great length."""
    if len(value) < 8 or value.replace(".", "").replace("-", "").isdigit():
        return False
    mixed = value.lower() != value and value[1:].lower() != value[1:]
    return mixed or any(not c.isalpha() for c in value) or len(value) >= 20


def _stored(home: str) -> set[str]:
    """Return the hub's token and the passwords of ``.netrc``, from the files of their logins."""
    stored = set()
    with suppress(OSError, ValueError):
        folder = Path(os.environ.get("HF_HOME") or Path(home) / ".cache" / "huggingface")
        stored.add((folder / "token").read_text(encoding="utf-8").strip())
    with suppress(OSError, ValueError, netrc.NetrcParseError):
        hosts = netrc.netrc(str(Path(home) / ".netrc")).hosts
        stored |= {password for _, _, password in hosts.values() if _looks_secret(password or "")}
    return {value for value in stored if len(value) >= 8}
