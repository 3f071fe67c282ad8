"""Keep tokens and keys out of configs, logs and reports."""

from __future__ import annotations

import logging
import os
import re

from algorist.store.safe_text import printable

HIDDEN = "[redacted]"
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"
    r"|\bapi_org_[A-Za-z0-9]{16,}"
    r"|\bsk-[A-Za-z0-9_-]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_[A-Za-z0-9_]{20,}"
    r"|\bglpat-[A-Za-z0-9_-]{16,}"
    r"|\bAKIA[A-Z0-9]{16}\b"
    r"|\bAIza[A-Za-z0-9_-]{30,}"
    r"|\bwandb_v\d_[A-Za-z0-9_]{16,}"
)
# A wandb key is 40 hex digits like a git commit: hidden only where the words around it say what it is.
_NAMED = re.compile(
    r"(?i)((?:api[_-]?key|wandb[_-]?key|(?:hf|hub|access|auth|api|github|bearer)[_-]?token|secret(?:[_-]?key)?"
    r"|password|passwd)[\"']?(?:\s*[=:]\s*|\s+)[\"']?|wandb\s+login\s+|bearer\s+)([^\s\"',}\]\[]{8,})"
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_VARIABLE = re.compile(r"(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(?:_|$)")


def redact(text: str) -> str:
    """Return ``text`` without secrets: known shapes, named values, and the values of secret environment variables."""
    for value in _secret_values():
        text = text.replace(value, HIDDEN)
    text = _SHAPES.sub(HIDDEN, text)
    text = _NAMED.sub(lambda found: found.group(1) + HIDDEN, text)
    return _IN_ADDRESS.sub(HIDDEN, text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, printable, without secrets, at most 200 characters."""
    lines = (line.strip() for line in str(error).splitlines())
    return redact(printable((next(filter(None, lines), "") or type(error).__name__)[:200]))


class RedactSecrets(logging.Filter):
    """A logging filter that redacts each record; add it to every handler that writes a file."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the message in place and let it pass."""
        record.msg, record.args = redact(record.getMessage()), ()
        return True


def _secret_values() -> list[str]:
    """Return values of variables named like secrets, longest first; short ones and paths are no secrets."""
    values = {
        value
        for name, value in os.environ.items()
        if _VARIABLE.search(name.upper()) and len(value) >= 8 and not value.startswith(("/", "~", "."))
    }
    return sorted(values, key=len, reverse=True)
