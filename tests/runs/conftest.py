"""What tests of whole runs share: a model that was taught once."""

from __future__ import annotations

import pytest

from tests.runs.sums import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The trainer of runs, with a model that knows the format and about half of the sums."""
    return Runs(tmp_path_factory.mktemp("sums"))
