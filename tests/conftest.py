"""What all tests share: where the real data lies, one thread for torch, no network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real datasets beside the checkout."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the real datasets are not at {SHARED_DATA}")
    return SHARED_DATA
