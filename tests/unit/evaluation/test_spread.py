"""An evaluation of several processes: each takes its turns, the rows are those of one process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

from algorist.evaluation.run import Alone, EvaluationSetting, Progress, evaluate
from algorist.rollouts.base import Completion
from algorist.rollouts.native.engine import NativeEngine
from tests.tiny import PROBLEMS, TOKENIZER, make_model, raw_format

SETTING = EvaluationSetting(2, 1.0, 1.0, 4, 2, "numeric", 5)  # three batches of two problems


class Thread:
    """One of two processes, imitated by threads that exchange values."""

    count = 2
    values: ClassVar[list[Any]] = [None, None]
    barrier: ClassVar = threading.Barrier(2)

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gather(self, value: Any) -> list[Any]:
        """Exchange values."""
        self.values[self.rank] = value
        self.barrier.wait(60)
        found = list(self.values)
        self.barrier.wait(60)
        return found

    def from_main(self, action: Any) -> Any:
        """Return the main thread's value."""
        return self.gather(action() if self.rank == 0 else None)[0]


class Counting(NativeEngine):
    """Counts its calls."""

    calls = 0

    def generate(self, *given: Any, **named: Any) -> list[list[Completion]]:
        """Sample as the engine does."""
        self.calls += 1
        return super().generate(*given, **named)


def rows(model: Any, peers: Any = Alone(), progress: Progress | None = None) -> tuple[Any, int]:  # noqa: B008
    engine = Counting(model, TOKENIZER)
    found = evaluate(engine, TOKENIZER, PROBLEMS, raw_format(), SETTING, peers=peers, progress=progress)
    return [{k: v for k, v in row.items() if k != "seconds"} for row in found], engine.calls


def test_two_processes_take_turns_and_find_what_one_finds(tmp_path: Path) -> None:
    models = [make_model(), make_model()]
    expected, calls = rows(models[0])
    assert calls == 6  # greedy and sampled, three batches
    found: list[Any] = [None, None]

    def work(rank: int, progress: Progress | None = None) -> None:
        found[rank] = rows(models[rank], Thread(rank), progress)

    def both(progress: Progress) -> list[int]:
        threads = [
            threading.Thread(target=work, args=(0, progress)),
            threading.Thread(target=work, args=(1,)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert found[0][0] == expected
        return [calls for _, calls in found]

    path = tmp_path / "eval.progress.jsonl"
    assert both(Progress(path, "same")) == [4, 2]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))  # killed after the first batch: two are left
    assert both(Progress(path, "same")) == [2, 2]
