"""What all tests share: where the real data lies, one thread for torch, no network, and Ctrl-C that is heard."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # started in the background of a script; what we start must hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

_ABOVE = Path(__file__).resolve().parents
SHARED_DATA = next(
    (p / "shared/data" for p in _ABOVE if (p / "shared/data").is_dir()), _ABOVE[2] / "shared/data"
)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real datasets beside the checkout."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the real datasets are not at {SHARED_DATA}")
    return SHARED_DATA
