"""What must be read, and the core, only become less."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from tests import sizes


def test_only_code_is_counted() -> None:
    text = '"""Head."""\n\n# why\nx = """two\nlines"""\n\n\nclass A:\n    y: int = 1\n    """About y."""\n'
    assert sizes.code_lines(text) == 4


@pytest.mark.slow
def test_what_must_be_read_and_the_core_stay_within_their_limits() -> None:
    over = {
        name: (now, sizes.MOST_LINES[name])
        for name, now in sizes.sizes().items()
        if now > sizes.MOST_LINES[name]
    }
    assert not over, (
        "take as many lines out as you put in, or cut an import (python -m tests.sizes shows the rooms)"
    )


def test_a_closure_is_all_that_a_file_imports_when_it_is_loaded(tmp_path: Path) -> None:
    assert sizes.closure("errors") == {"errors"}
    within = sizes.closure("training.step")
    assert {"training.step", "training", "training.batch", "objectives", "types"} <= within
    assert "training.grpo" not in within and within <= sizes.closure("training.grpo")
    file = tmp_path / "one.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport torch\nif TYPE_CHECKING:\n    from algorist.config import load\n"
        "try:\n    from algorist import errors\nexcept ImportError:\n    import algorist.types\n"
        "def later():\n    from algorist.store import read\n"
    )
    assert sizes.imports(file) == {"errors", "types"}


def test_a_limit_is_only_ever_lowered() -> None:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=sizes.ROOT, capture_output=True, text=True, check=True
        ).stdout

    place = "tests/sizes.py"
    try:
        commits = git("log", "--format=%H", "--reverse", "--first-parent", "--", place).split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no history here")
    texts = [
        *(git("show", f"{commit}:{place}") for commit in commits[-30:]),
        (sizes.ROOT / place).read_text(),
    ]
    written = [limits for limits in map(sizes.limits_in, texts) if limits]
    for before, after in itertools.pairwise(written):
        raised = {
            name: (lines, after.get(name)) for name, lines in before.items() if after.get(name, 10**9) > lines
        }
        assert raised == {}, "a limit went up or away; lower the code instead"


def test_limits_are_read_from_an_earlier_text() -> None:
    assert sizes.limits_in('A = 1\nMOST_LINES = {"core": 5_000}\n') == {"core": 5000}
    assert sizes.limits_in("HELD = {}") == {}


def test_an_extension_stays_small() -> None:
    now = {room: n for room, n in sizes.rooms().items() if room.startswith("extensions/")}
    assert now
    assert {room: n for room, n in now.items() if n > sizes.extension_limit(room)} == {}


@pytest.mark.long
@pytest.mark.slow
def test_the_table_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    sizes.main()
    printed = capsys.readouterr().out
    for said in ("limit 3,300", "extensions/", "words of the documents", "forbidden names"):
        assert said in printed
