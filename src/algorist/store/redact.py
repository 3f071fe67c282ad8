"""Keep secrets out of text that leaves the program: logs, trackers, cards, pages, errors.

What is hidden is known: values of secret environment variables and of the hub's and wandb's own files, and the shapes of
tokens. Files that are read back are never rewritten; a setting that holds a secret is refused (``refuse_secrets``).
"""

from __future__ import annotations

import logging
import netrc
import os
import re
import traceback
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from algorist.errors import ConfigError
from algorist.store.safe_text import printable, with_texts

HIDDEN = "[redacted]"
LONGEST_RECORD = 20_000
"""A log record's message and its traceback keep so many characters each."""
_KINDS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{16,}|\bapi_org_[A-Za-z0-9]{16,}",
    "an API key": r"\bsk-(?:[a-z]{1,12}\d{0,4}-){0,4}[A-Za-z0-9_]{16,}|\bsk-(?=[\w-]{0,99}\d)(?=[\w-]{0,99}[A-Z])[\w-]{24,}"
    r"|\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}|\bgsk_[A-Za-z0-9]{20,}|\br8_[A-Za-z0-9]{20,}|\bnvapi-[\w-]{20,}",
    "a GitHub or GitLab token": r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}",
    "an AWS key": r"\bA(?:KIA|SIA)[A-Z0-9]{16}(?![A-Z0-9])",
    "a Slack token": r"\bxox[abeoprs]-[\w-]{10,}",
    "a wandb key": r"\bwandb_v\d_\w{16,}",
    "a package registry's token": r"\bnpm_[A-Za-z0-9]{30,}|\bpypi-[\w-]{40,}",
    "a JSON web token": r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----|[\s\S]*)",
    "a password in an address": r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)|(?<=://)[\w.~-]{16,}(?=@)",
    "a token in an address": r"(?i:(?<=[?&])(?:access_token|token|api_?key|key|sig|signature|password|auth)=[^&\s\"'#]{8,})",
}
# A token begins where a word begins, or after a line end that is written as an escape: "\\nhf_…" in JSON and YAML.
_BEGIN = r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt]))"
_SHAPES = {kind: re.compile(shape.replace(r"\b", _BEGIN)) for kind, shape in _KINDS.items()}
_SIGNS = {
    "a Hugging Face token": ("hf_", "api_org_"),
    "an API key": ("sk-", "AIza", "ya29.", "gsk_", "r8_", "nvapi-"),
    "a GitHub or GitLab token": ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
    "an AWS key": ("AKIA", "ASIA"),
    "a Slack token": ("xox",),
    "a wandb key": ("wandb_v",),
    "a package registry's token": ("npm_", "pypi-"),
    "a JSON web token": ("eyJ",),
    "a private key": ("PRIVATE KEY-----",),
    "a password in an address": ("://",),
    "a token in an address": ("=",),
}
"""What a text must hold for a shape to be looked for: completions are long, and most hold none of these."""
# A wandb key is 40 hex digits like a git commit, an AWS secret any 40 characters: hidden only after their name and a sign.
_NAMED = re.compile(
    r"(?i)((?:api[_-]?key|wandb[_-]?key|(?:hf|hub|access|auth|api|github|bearer|session)[_-]?token|secret[_-]?(?:access[_-]?)?key"
    r"|secret|password|passwd|\b\w{1,40}_(?:pass|pwd|secret))[\"']?\s*[=:]\s*[\"']?|wandb\s+login\s+|bearer\s+)"
    r"([^\s\"',}\]\[\\]{8,})"
)
_NAMES = ("key", "token", "secret", "passw", "_pass", "_pwd", "wandb", "bearer")
_VARIABLE = re.compile(r"(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASS|PWD|CREDENTIAL)S?(?:_|$)")
_SURE = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "GITHUB_TOKEN"}


def redact(text: str) -> str:
    """Return ``text`` without secrets: known values, the shapes of tokens, and values behind a name and a sign."""
    for value in _secret_values():
        text = text.replace(value, HIDDEN)
    for kind, signs in _SIGNS.items():
        if any(sign in text for sign in signs):
            text = _SHAPES[kind].sub(HIDDEN, text)
    lower = text.lower()
    if not any(name in lower for name in _NAMES):
        return text
    return _NAMED.sub(
        lambda found: found.group(1) + (HIDDEN if _looks_secret(found.group(2)) else found.group(2)), text
    )


def redact_tree(value: Any) -> Any:
    """Return lists, mappings and texts without secrets; other values, and what JSON needs around them, stay."""
    return with_texts(value, redact)


def refuse_secrets(value: Any, where: str, key: str = "") -> None:
    """Refuse settings that hold a secret: a recipe is stored, shown and uploaded.

    Raises:
        ConfigError: The setting's key, what it looks like, and where it belongs; never the secret.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            refuse_secrets(
                str(name), where, f"{key}.{name}" if key and not _kind(str(name)) else key or "a key"
            )
            refuse_secrets(item, where, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            refuse_secrets(item, where, f"{key}.{index}")
    elif isinstance(value, str) and (kind := _kind(value)):
        raise ConfigError(
            f"{where}: {redact(key)} holds {kind}. A recipe is stored in the run folder, shown and uploaded; leave it out and "
            "put it into the environment: export HF_TOKEN=… or WANDB_API_KEY=…, or once: hf auth login, wandb login"
        )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, printable, without secrets, at most 200 characters."""
    lines = (line.strip() for line in str(error)[:100_000].splitlines())
    return redact(printable((next(filter(None, lines), "") or type(error).__name__)[:2000]))[:200]


class RedactSecrets(logging.Filter):
    """A logging filter that redacts each record and bounds its length; add it to every handler that writes a file."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the message and the traceback in place and let the record pass."""
        record.msg, record.args = redact(_shortened(record.getMessage())), ()
        if record.exc_info and record.exc_info[1] is not None:
            told = "".join(traceback.format_exception(record.exc_info[1], limit=-30))
            record.exc_text, record.exc_info = redact(_shortened(told)), None
        return True


def _shortened(text: str) -> str:
    if len(text) <= LONGEST_RECORD:
        return text
    half = LONGEST_RECORD // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _kind(text: str) -> str:
    """Return what kind of secret a text holds, or an empty string."""
    if any(value in text for value in _secret_values()):
        return "the value of a secret environment variable, or of a stored login"
    return next((kind for kind, shape in _SHAPES.items() if shape.search(text)), "")


def _secret_values() -> list[str]:
    """Return secret values of this process's environment and of stored logins, longest first."""
    values = {
        value
        for name, value in os.environ.items()
        if len(value) >= 8
        and not value.startswith(("/", "~", "."))
        and (name in _SURE or (_VARIABLE.search(name.upper()) and _looks_secret(value)))
    }
    return sorted(values | _stored(str(Path.home())), key=len, reverse=True)


def _looks_secret(value: str) -> bool:
    """Tell a secret from a word: digits among letters, mixed case, signs, or great length."""
    if len(value) < 8 or value.replace(".", "").replace("-", "").isdigit():
        return False
    mixed = value.lower() != value and value[1:].lower() != value[1:]
    return mixed or any(not c.isalpha() for c in value) or len(value) >= 20


@lru_cache(maxsize=4)
def _stored(home: str) -> frozenset[str]:
    """Return the hub's token and wandb's key from the files of their logins."""
    found = set()
    with suppress(OSError, ValueError):
        folder = Path(os.environ.get("HF_HOME") or Path(home) / ".cache" / "huggingface")
        found.add((folder / "token").read_text(encoding="utf-8").strip())
    with suppress(OSError, ValueError, netrc.NetrcParseError):
        hosts = netrc.netrc(str(Path(home) / ".netrc")).hosts
        found |= {password for host, (_, _, password) in hosts.items() if "wandb" in host}
    return frozenset(value for value in found if len(value) >= 8)
