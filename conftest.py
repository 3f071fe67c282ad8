"""What the tests of algorist and of the grader share: real data."""

from __future__ import annotations

from pathlib import Path

import pytest

_ABOVE = Path(__file__).resolve().parents
SHARED_DATA = next(
    (p / "shared/data" for p in _ABOVE if (p / "shared/data").is_dir()), _ABOVE[2] / "shared/data"
)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Real rows of GSM8K and SVAMP that every clone has (``tests/data/README.md``)."""
    return Path(__file__).parent / "tests/data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of whole real datasets beside the checkout."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the real datasets are not at {SHARED_DATA}")
    return SHARED_DATA
