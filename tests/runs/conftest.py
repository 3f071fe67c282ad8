"""What tests of whole runs share: a model that was taught once."""

from __future__ import annotations

import pytest

from tests.runs.sums import Runs


@pytest.fixture(scope="session", params=["recorded", pytest.param("live", marks=pytest.mark.long)])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The trainer of runs, with a model that knows the format and about half of the sums."""
    return Runs(tmp_path_factory.mktemp("sums"), live=request.param == "live")
