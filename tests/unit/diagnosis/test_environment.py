"""doctor: versions that do not fit."""

from __future__ import annotations

import pytest

from algorist.diagnosis.environment import unfit


@pytest.mark.parametrize(
    ("vllm", "fits"),
    [("0.21.9", False), ("0.22.0", True), ("0.24.0+cu129", True), ("0.32.0", True), ("0.33.0", False), ("dev", False)],
)  # fmt: skip
def test_a_vllm_that_does_not_fit_is_named_with_those_that_do(vllm: str, fits: bool) -> None:
    line = unfit(vllm)
    assert (line == "") == fits
    assert fits or (vllm in line and ">=0.22,<0.33" in line)
