"""Tests of CUDA's host code on the stub; ``make test-cuda-host`` starts them, elsewhere they are not even collected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore_glob = [] if "STUB_CC" in os.environ else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # of all folders
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.cuda_host)


@pytest.fixture
def capability() -> int:
    """Of the card: 90, 89, 75 …"""
    return int(os.environ["STUB_CC"])


@pytest.fixture
def stub() -> Iterator[object]:
    """The card's counts, from 0."""
    from tests.cuda_host.stub import Stub

    counts = Stub()
    counts.reset()
    yield counts
