"""What one sees: the verbs on a pseudo-terminal of 80 and 140 columns, read as a terminal would."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pyte
import pytest

from algorist.cli.main import main
from algorist.config import load_recipe
from algorist.runs.pipeline import run_recipe
from algorist.store.run_log import Quiet
from tests.marks import first

SMALL = ["threads=1", "data.eval.limit=6", "eval.samples=2"]
COMMAND = "algorist "


class Terminal:
    """A terminal: its screen, and every line that ever was on it, as it would be without an edge."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.screen, self.endless = pyte.Screen(columns, 600), pyte.Screen(1000, 600)
        self.streams = [pyte.ByteStream(screen) for screen in (self.screen, self.endless)]
        self.lines: set[str] = set()
        self.data = b""
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 600, columns, 0, 0))
        self.file = os.fdopen(theirs, "w", buffering=1, encoding="utf-8")
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        while True:
            try:
                self.data += os.read(self.ours, 4096)
            except OSError:  # the other end is closed
                return

    def _line(self, y: int) -> str:
        row = self.endless.buffer[y]
        return "".join(row[x].data for x in range(max(row, default=-1) + 1)).rstrip()

    def end(self) -> None:
        self.file.close()
        self.reader.join(10)
        os.close(self.ours)
        for piece in re.split(rb"(?<=[\r\n])", self.data):
            for stream in self.streams:
                stream.feed(piece)
            self.lines |= {self._line(y) for y in self.endless.dirty}
            self.endless.dirty.clear()

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()


See = Callable[..., Terminal]


@pytest.fixture(params=first(1, [80, 140]))
def see(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> See:
    """Run a verb with standard output and standard error on a terminal, which must stay whole."""

    def see(
        *arguments: str, stdin: str = "", code: int = 0, escapes: bool = False, data: bool = False
    ) -> Terminal:
        terminal = Terminal(request.param)
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setenv("COLUMNS", str(request.param))
            patch.setenv("TERM", "xterm-256color")
            patch.setattr(sys, "argv", ["algorist", *arguments])
            for name, stream in (("stdout", terminal.file), ("stderr", terminal.file)):
                patch.setattr(sys, name, stream)
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            with pytest.raises(SystemExit) as stop:
                main()
        terminal.end()
        assert int(stop.value.code or 0) == code, terminal.text
        assert escapes or not any("\\x1b[" in line for line in terminal.lines), terminal.text
        broken = [x for x in terminal.lines if len(x) > terminal.columns and COMMAND not in x]
        assert data or not broken, broken
        return terminal

    return see


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose model knows the answer of most problems."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [{"question": f"pear {n}?", "answer": "34"[n % 3 == 0], "solution": "pear."} for n in range(38)]
    for name, part in (("rows", rows[:32]), ("held_out", rows[32:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    settings = [
        *SMALL, *data_of(folder), "sft.max_steps=80", "sft.learning_rate=5e-3", "sft.save_steps=100",
        f"output_dir={folder}", "run_name=r",
    ]  # fmt: skip
    run_recipe(load_recipe("smoke-cpu", settings).recipe, display=Quiet())
    return folder / "r"


def data_of(folder: Path) -> list[str]:
    files = {"train": "rows", "sft": "rows", "eval": "held_out"}
    return [f"data.{part}={{name: local, path: '{folder}/{file}.jsonl'}}" for part, file in files.items()]


@pytest.mark.slow
def test_a_run_on_a_terminal(see: See) -> None:
    seen = see("run", "smoke-cpu", *SMALL, "sft.max_steps=40", "sft.logging_steps=20", "sft.save_steps=100")
    bars = {line for line in seen.lines if re.match(r"sft .*━.*/40", line)}
    assert len({re.search(r"(\d+)/40", bar)[1] for bar in bars}) > 1, bars  # type: ignore[index]
    assert any(re.match(r"eval sft .*━.*/6 ", line) for line in seen.lines)
    assert "━" not in seen.text  # bars go when they are over
    table = seen.text.partition("held-out problems")[2].partition("\n\n")[0].splitlines()
    assert "SFT" in table[1] and "GRPO" in table[1] and "paired difference" in table[1]
    assert [re.split(r"  +", row.strip())[0] for row in table[2:]] == [
        "greedy accuracy", "lenient accuracy", "pass@1", "format", "truncated", "mean tokens"
    ]  # fmt: skip
    assert all(re.search(r"\[[+-].*, [+-].*\]$", row) for row in table[2:]), table


def test_what_is_printed_while_a_bar_moves_stands_above_it_and_is_safe(see: See, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "import sys\n"
        "def loud(rewards):\n"
        "    print('said \\x1b[31mred\\x1b[2K \\x9b5n')\n"
        "    print('half a ', end='', file=sys.stderr)\n"
        "    print('line', file=sys.stderr)\n"
        "    return rewards - rewards.mean()\n"
    )
    settings = ["sft.enabled=false", "eval.enabled=false", "grpo.max_steps=6", "grpo.advantage=loud.py:loud"]
    seen = see("run", "smoke-cpu", *SMALL, *settings, escapes=True)
    lines = seen.text.splitlines()
    assert lines.count("said \\x1b[31mred\\x1b[2K \\x9b5n") == lines.count("half a line") >= 6
    assert any(re.match(r"grpo .*━", line) for line in seen.lines)
    assert {line.split(" ·")[0] for line in lines if line.startswith("grpo ")} >= {
        f"grpo {n}/6" for n in range(1, 7)
    }


ARITHMETIC = "arithmetic,params={count: 6, seed: 3}"
VERBS: dict[str, tuple[str, ...]] = {
    "watch": ("watch", "RUN", "--every", "0.1"),
    "watch --once": ("watch", "RUN", "--once"),
    "report": ("report", "RUN"),
    "inspect": ("inspect", "RUN", "--limit", "3"),
    "inspect --sql": ("inspect", "RUN", "--sql", "select step, problem_id, question, completion, reward from rollouts"),
    "diagnose": ("diagnose", "RUN"),
    "compare": ("compare", "RUN/eval/sft.json", "RUN/eval/grpo.json"),
    "regrade": ("regrade", "RUN"),
    "eval": ("eval", "RUN", "--data", ARITHMETIC, "--by", "level", "--out", "e"),
    "eval --probe": ("eval", "RUN", "--data", ARITHMETIC, "--probe", "memory", "--out", "e"),
    "solve": ("solve", "What is 1 + 1?", "--model", "RUN"),
    "solve, a conversation": ("solve", "--model", "RUN"),
    "preflight": ("preflight", "smoke-cpu", "--problems", "4", "--samples", "2"),
    "data list": ("data", "list"),
    "data check": ("data", "check", "arithmetic"),
    "data show": ("data", "show", "arithmetic"),
    "data overlap": ("data", "overlap", "arithmetic", "arithmetic"),
    "data rate": ("data", "rate", "smoke-cpu", "data.train.params.count=8", "--samples", "2", "--model", "RUN"),
    "data sample": (
        "data", "sample", "smoke-cpu", *data_of(Path("RUN/..")), "--model", "RUN/sft/final", "--samples", "2", "grpo.temperature=0.01",
    ),
    "tour": ("tour",),
    "recipes": ("recipes",),
    "recipes show": ("recipes", "show", "quickstart", "--resolved", "--describe"),
    "rewards list": ("rewards", "list"),
    "rewards explain": ("rewards", "explain", "--completion", "<answer>7</answer>", "--answer", "7"),
    "doctor": ("doctor", "--no-hub"),
    "export": ("export", "RUN", "--to", "model"),
    "grade": ("grade", "--answer", "0.5", "--gold", "1/2"),
    "run --only sft": ("run", "smoke-cpu", "--only", "sft", "eval.enabled=false"),
    "run --only grpo": ("run", "smoke-cpu", "--only", "grpo", "eval.enabled=false"),
    "iterate": (
        "iterate", "smoke-cpu", *data_of(Path("RUN/..")), "model.name=RUN/sft/final", "grpo.enabled=false", "--rounds", "1",
        "--questions", "4", "--samples", "2", "grpo.temperature=0.01",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("see", "words"),
    [
        pytest.param(
            columns, words, id=f"{columns}-{name}",
            marks=[pytest.mark.long] if columns == 140 or name == "watch" else [],
        )
        for columns in (80, 140)
        for name, words in VERBS.items()
    ],
    indirect=["see"],
)  # fmt: skip
def test_a_verb_fits_the_terminal(see: See, run: Path, words: tuple[str, ...]) -> None:
    data = (
        words[:2] in (("data", "show"), ("recipes", "show")) or words[0] == "grade"
    )  # JSON and YAML stay whole
    seen = see(*(word.replace("RUN", str(run)) for word in words), stdin="What is 2 + 2?\n", data=data)
    assert seen.text
