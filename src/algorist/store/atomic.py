"""Files that appear whole or not at all: temporary file in the same folder, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from algorist.errors import CheckpointError
from algorist.system import sync_folder

PARTIAL = ".partial"


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write(temporary)`` make a file and put it in the place of ``path``.

    A crash at any moment leaves the old file or the new one. When ``write`` fails, the old file stays and the
    temporary one is removed.

    Raises:
        CheckpointError: The disk is full or the folder cannot be written to.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        write(partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; free space or permit writing there, then repeat the command "
            "(a run with --resume)"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # on a read-only disk that fails too, and must not hide why
            partial.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` (UTF-8, lone surrogates escaped) whole or not at all."""
    data = text.encode("utf-8", errors="backslashreplace")
    replace_file(path, lambda partial: partial.write_bytes(data))
