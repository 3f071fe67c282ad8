"""Commands as the reader can type them: ``algorist`` where the shell knows it as this program, else its path.

Messages everywhere say ``algorist VERB …``; the command line shows them through ``as_typed``.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

from algorist.cli.main import VERBS

COMMAND = re.compile(rf"(?<![\w/.-])algorist(?= (?:{'|'.join(VERBS)})\b)")


def program() -> str:
    """Return what starts this program from the folder that it was started in."""
    script = next(
        (p for p in (Path(sys.argv[0]), Path(sys.executable).with_name("algorist")) if _is_script(p)), None
    )
    if script is None:
        return f"{_short(Path(sys.executable))} -m algorist"
    known = shutil.which("algorist")
    return "algorist" if known and Path(known).samefile(script) else _short(script)


def as_typed(text: str) -> str:
    """Return a text with each ``algorist VERB`` as it can be typed."""
    return COMMAND.sub(lambda _: program(), text)


def _is_script(path: Path) -> bool:
    return path.name == "algorist" and path.is_file()


def _short(path: Path) -> str:
    place, here = path.absolute(), Path.cwd()
    text = str(place.relative_to(here)) if place.is_relative_to(here) else str(place)
    return shlex.quote(text if "/" in text else f"./{text}")
