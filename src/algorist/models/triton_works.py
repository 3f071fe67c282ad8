"""Whether Triton's kernels can be compiled and started on this machine; its wheel alone is not enough."""

from __future__ import annotations

from functools import cache

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
else:

    @triton.jit
    def _one_kernel(place):  # type: ignore[no-untyped-def]
        tl.store(place, 1)


@cache
def why_no_triton() -> str | None:
    """Return why not, in one line, or None: a kernel of one line is tried once, which asks for a C compiler and Python's headers."""
    if triton is None:
        return "the package triton is not installed"
    try:
        _one_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
    except Exception as error:  # of the compiler, the linker or the driver, as each likes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"{reason} (Triton builds its starter with a C compiler: apt install gcc python3-dev)"
    return None
