"""doctor: versions that do not fit."""

from __future__ import annotations

import pytest

from algorist.diagnosis.environment import bad_pair


@pytest.mark.parametrize(
    ("vllm", "trl", "fits"),
    [
        ("0.21.9", "1.16.0", False),
        ("0.22.0", "1.16.0", True),
        ("0.24.0+cu129", "1.16.3", True),
        ("0.32.0", "1.16.0", True),
        ("0.33.0", "1.16.0", False),
        ("dev", "1.16.0", False),
        ("0.5.0", "2.0.0", True),  # of another TRL nothing is known; it is a problem of its own
    ],
)
def test_a_vllm_that_does_not_fit_trl_is_a_bad_pair(vllm: str, trl: str, fits: bool) -> None:
    told = bad_pair(vllm, trl)
    assert (told == "") == fits
    assert fits or (vllm in told and ">=0.22,<0.33" in told)
