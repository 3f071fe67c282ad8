"""docs/security.md: each sentence names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_sentence_of_the_page_has_a_test() -> None:
    text = (ROOT / "docs" / "security.md").read_text("utf-8")
    there = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)
    }
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| what")]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.rpartition("| ")[2] or row.split("|")[-2])
        named = named or re.findall(r"`(test_\w+)`", row.split("|")[-2])
        assert named and set(named) <= there, row
