"""The acceptance table is whole: every item of the specification has an entry, every named test exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.acceptance import make_page as script

ROOT = Path(__file__).resolve().parents[2]
SPECIFICATION = ROOT.parent / "shared" / "spec" / "reference-systems.md"
ITEM = re.compile(r"\b(S[0-4]\.\d+) \[")


def test_every_named_test_exists_and_every_entry_shows_something() -> None:
    assert script.mistakes(script.read_table()) == []


def test_every_fault_found_by_use_has_an_entry_whose_tests_exist() -> None:
    faults = script.read_table(script.FOLDER / "faults.yaml")
    assert script.mistakes(faults) == []
    asked = [f"A{n}" for n in range(1, 12)] + [f"B{n}" for n in range(1, 11)] + [f"C{n}" for n in range(1, 6)]
    asked += [f"F{n}" for n in range(1, 20)]
    assert set(asked) <= set(faults) and not [name for name in faults if name[0] not in "ABCDFN"]


def test_every_item_of_the_specification_has_an_entry() -> None:
    if not SPECIFICATION.is_file():
        pytest.skip(f"the specification is not at {SPECIFICATION}")
    asked = ITEM.findall(SPECIFICATION.read_text(encoding="utf-8"))
    assert len(asked) == len(set(asked)) == 229
    table = script.read_table()
    assert sorted(table, key=script.order) == sorted(asked, key=script.order)


def test_the_page_is_up_to_date() -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(script.read_table()), (
        "run: python -m tests.acceptance.make_page"
    )


def test_items_that_test_files_name_exist() -> None:
    table = script.read_table()
    named = {
        (path.name, item)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for item in re.findall(r"\bS[0-4]\.\d+\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert {(name, item) for name, item in named if item not in table} == set()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"says": "a.", "tests": ["acceptance/test_table.py::test_nothing_of_this_name"]}, "no test"),
        ({"says": "a.", "tests": ["unit/nowhere.py::test_a"]}, "no test"),
        ({"says": "a.", "tests": ["acceptance/test_table.py"]}, "no test"),
        ({"says": "a."}, "neither tests nor reason nor missing"),
        ({"tests": ["acceptance/test_table.py::test_the_page_is_up_to_date"]}, "says is missing"),
        ({"says": "a behind", "reason": "b"}, "says is missing or is no sentence"),
        ({"says": "a.", "reason": "b", "shown": "c"}, "unknown shown"),
    ],
)
def test_mistakes_in_the_table_are_named(entry: dict[str, object], words: str) -> None:
    found = script.mistakes({"S0.1": entry})
    assert len(found) == 1 and found[0].startswith("S0.1: ") and words in found[0]


def test_an_item_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.yaml").write_text("S0.1: {says: a, reason: b}\nS0.1: {says: c, reason: d}\n")
    with pytest.raises(ValueError, match=r"S0\.1 more than once"):
        script.read_table(tmp_path / "twice.yaml")
