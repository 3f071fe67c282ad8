"""The tool ``full_python``: CPython with fractions and sympy in a process that the system itself confines (Linux, x86-64).

Each call is a fork of a process that has imported what mathematics needs. Before it runs the code it gives up all but memory, time and one
pipe (seccomp), so it can open, connect to, start and signal nothing. Variables are shared by running the earlier calls of the rollout again.
"""

from __future__ import annotations

import json
import os
import textwrap
from functools import lru_cache

from algorist.errors import MissingExtraError
from algorist.extensions.toolbox.base import Output, ToolLimits, clipped, tool
from algorist_grader.child_process import START_S, Child

MOST_CODE = 20_000
"""Longest code of a rollout's calls together (characters)."""


@lru_cache(maxsize=8)
def _child(process: int) -> Child:
    # Nothing of this process's environment: code that reads its own memory finds no key there. Sets have the same order in each process.
    fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PATH": os.defpath}
    return Child("algorist.extensions.full_python.worker:prepare", environment=fixed, without=set(os.environ))


@tool("full_python")
class FullPython:
    """Runs code in CPython; the output is what it prints, and the value of its last expression."""

    description = "Python code; its output is what it prints and the value of its last line (with sympy)"
    inline = False
    called = "python"

    def __init__(self, limits: ToolLimits) -> None:
        self.limits = limits

    def check(self) -> None:
        """Start the process and try what it must not do.

        Raises:
            MissingExtraError: The system cannot confine a process so, or sympy is missing.
        """
        ready = _child(os.getpid()).start(START_S)
        if ready.error:
            raise MissingExtraError(
                f"the tool 'full_python' does not run here: {ready.detail.partition(chr(10))[0] or ready.error}; take tools: [python]"
            )

    def call(self, request: str, session: tuple[str, ...] | None) -> Output:
        """Run code after the earlier calls of the rollout."""
        code = textwrap.dedent(request).strip()
        codes = (*(session or ()), code)
        if sum(map(len, codes)) > MOST_CODE:
            return Output(f"Error: more than {MOST_CODE} characters of code", "TooLong", session)
        settings = {"seconds": self.limits.seconds, "memory_mb": self.limits.memory_mb, "codes": codes}
        # The worker ends a call that is late; the child's own limit is for a worker that does not answer.
        answer = _child(os.getpid()).ask(json.dumps(settings).encode(), 2 * self.limits.seconds + 5)
        if answer.error:
            return Output("Crashed", "Crashed", session)
        text, error = answer.value
        return Output(clipped(text, self.limits.output_characters), error, session if error else codes)
