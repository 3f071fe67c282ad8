"""The house may only shrink until it is within its budgets."""

from __future__ import annotations

import pytest

from tests import sizes


def test_only_code_is_counted() -> None:
    text = '"""Head."""\n\n# why\nx = """two\nlines"""\n\n\nclass A:\n    y: int = 1\n    """About y."""\n'
    assert sizes.code_lines(text) == 4


def test_the_house_does_not_grow_beyond_its_budget() -> None:
    now = sizes.totals(sizes.rooms())
    for name, lines in now.items():
        most = max(sizes.BUDGET[name], sizes.HELD[name])
        assert lines <= most, (
            f"{name}: {lines:,} code lines, {most:,} are held (budget {sizes.BUDGET[name]:,}); take as many out as you put in "
            "(python -m tests.sizes shows the rooms)"
        )


def test_an_extension_stays_small() -> None:
    now = {room: n for room, n in sizes.rooms().items() if room.startswith("extensions/")}
    assert now
    large = {
        room: n
        for room, n in now.items()
        if n > sizes.HELD_EXTENSIONS.get(room, sizes.extension_budget(room))
    }
    assert large == {}


def test_the_table_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    sizes.main()
    printed = capsys.readouterr().out
    for said in ("budget 17,500", "extensions/", "words of the documents", "forbidden names"):
        assert said in printed
