"""Whose a run folder is: one that was made here may name code to run, one from elsewhere only with ``--trust``.

``config.yaml`` is signed with a key of this user on this machine; the signature lies beside it in ``.origin``.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from algorist.errors import ConfigError

TRUST = "ALGORIST_TRUST"
"""Environment variable of ``--trust``: 1 runs code that a foreign run folder names."""


def sign(run: Path) -> None:
    """Mark a run's ``config.yaml`` as made here; where no key can be kept, nothing is marked."""
    with suppress(OSError):
        (run / ".origin").write_text(_signature(run, _key(make=True)), encoding="ascii")


def is_ours(run: Path) -> bool:
    """Return whether ``config.yaml`` is as this user wrote it on this machine."""
    try:
        origin = (run / ".origin").read_text(encoding="ascii")
        return hmac.compare_digest(origin, _signature(run, _key(make=False)))
    except (OSError, ValueError, TypeError):
        return False


def refuse_foreign_code(run: Path, code: list[str]) -> None:
    """Refuse code that the recipe of a foreign run names, unless ``--trust`` was given.

    Raises:
        ConfigError: The settings that name code.
    """
    if code and os.environ.get(TRUST) != "1" and not is_ours(run):
        raise ConfigError(
            f"{run} was not made by this user on this machine, or its config.yaml was changed since, and its recipe names code to "
            f"run: {', '.join(code)[:400]}. Read that code; to run it, add --trust to the command"
        )


def _signature(run: Path, key: bytes) -> str:
    return hmac.new(key, (run / "config.yaml").read_bytes(), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes:
    """Return the key of this user on this machine."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(base) / "algorist" / "run-key"
    try:
        return file.read_bytes()
    except FileNotFoundError:
        if not make:
            raise
    file.parent.mkdir(parents=True, exist_ok=True)
    key = secrets.token_bytes(32)
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
            handle.write(key)
    except FileExistsError:
        return file.read_bytes()
    return key
