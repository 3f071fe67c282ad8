"""The other process of ``isolated``: ``python -m algorist.rewards.isolated_worker FILE NAME``.

Reads length-prefixed pickled arguments from standard input, writes one JSON line each to standard output. What the
function prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import sys
import traceback
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Return a number, None, or a list of them for what a reward function returned.

    Raises:
        TypeError: It is something else.
    """
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, (str, bytes, dict)):
        raise TypeError(
            f"it returned {value!r:.80}; expected a number, or a list of one number per completion"
        )
    if getattr(value, "ndim", 0) or not hasattr(value, "__float__"):
        return [plain(v) for v in value]
    return float(value)


def main(file: str, name: str) -> None:
    """Answer until standard input ends. Ctrl-C is the run's business, which ends this process when it is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from algorist.rewards.user import import_file

    function = getattr(import_file(Path(file)), name)
    sink.write("{}\n")
    sink.flush()
    while header := source.read(8):
        args, kwargs = pickle.loads(source.read(struct.unpack("<Q", header)[0]))
        try:
            answer = json.dumps({"value": plain(function(*args, **kwargs))})
        except Exception as error:
            answer = json.dumps({"error": f"{error!r}\n{traceback.format_exc()}"})
        sink.write(answer + "\n")
        sink.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
