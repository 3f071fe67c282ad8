"""The writers: atomic parts, the same parts however a run was cut, nothing lost or doubled, real faults."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from algorist.errors import CheckpointError, DataError
from algorist.store.write import SCHEMA, MetricsWriter, RolloutWriter, read_metrics


def row(step: int, index: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "problem_id": f"p{index % 7}",
        "group": index // 4,
        "prompt": f"Question {index}?",
        "completion": f"answer {step} {index} ✓",
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "sampler_log_prob_sum": -1.5,
        "rewards": {"correct": float(index % 2), "format": math.nan},
        "reward": float(index % 2),
        "advantage": 0.5,
        "truncated": False,
        "seconds": 0.1,
    } | more


def rows(step: int, count: int = 10) -> list[dict[str, Any]]:
    return [row(step, i) for i in range(count)]


def stored(folder: Path) -> list[dict[str, Any]]:
    return [
        r
        for p in sorted(folder.glob("part-*.parquet"))
        for r in pyarrow.parquet.ParquetFile(p).read().to_pylist()
    ]


def contents(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {p.name: pyarrow.parquet.ParquetFile(p).read().to_pylist() for p in sorted(folder.iterdir())}


def test_rows_come_back_with_the_schema(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, rows_per_part=4) as writer:
        writer.write(rows(0, 10))
    parts = sorted(tmp_path.glob("*"))
    assert [p.name for p in parts] == [f"part-00000{i}.parquet" for i in range(3)]
    assert [pyarrow.parquet.read_metadata(p).num_rows for p in parts] == [4, 4, 2]
    schema = pyarrow.parquet.read_schema(parts[0])
    assert schema.names == SCHEMA.names and schema.metadata[b"algorist.rollouts"] == b"2"
    first = stored(tmp_path)[1]
    assert first["stage"] == "grpo" and first["completion"] == "answer 0 1 ✓"
    assert dict(first["rewards"]) == {"correct": 1.0, "format": None}
    assert first["reason"] is None


def test_memory_is_bounded_by_the_part_size(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, rows_per_part=8)
    for step in range(20):
        writer.write(rows(step, 5))
        assert len(writer._rows) < 8
    assert len(stored(tmp_path)) == 96
    writer.close()
    assert len(stored(tmp_path)) == 100


def test_very_long_completions_make_smaller_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("algorist.store.write._PART_CHARACTERS", 1000)
    with RolloutWriter(tmp_path) as writer:
        writer.write([row(0, i, completion="x" * 400) for i in range(7)])
    assert [pyarrow.parquet.read_metadata(p).num_rows for p in sorted(tmp_path.iterdir())] == [3, 3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [3, 4, 9])
@pytest.mark.parametrize("rows_per_part", [4, 7, 1000])
def test_resume_gives_the_same_parts(tmp_path: Path, checkpoint: int, rows_per_part: int) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with RolloutWriter(whole, rows_per_part=rows_per_part) as writer:
        for step in range(12):
            writer.write(rows(step))
    # killed after step 9 with a checkpoint at `checkpoint`: the writer is abandoned without close
    lost = RolloutWriter(cut, rows_per_part=rows_per_part)
    for step in range(10):
        if step == checkpoint:
            lost.flush()
        lost.write(rows(step))
    with RolloutWriter(cut, rows_per_part=rows_per_part) as writer:
        writer.truncate_after(checkpoint)
        for step in range(checkpoint, 12):
            writer.write(rows(step))
    assert contents(cut) == contents(whole)


def test_truncate_leaves_other_stages_and_may_be_repeated(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, stage="first", rows_per_part=8) as writer:
        writer.write([r for step in range(5) for r in rows(step, 3)])
    with RolloutWriter(tmp_path, stage="second", rows_per_part=8) as writer:
        writer.write([r for step in range(5) for r in rows(step, 3)])
        for _ in range(2):
            writer.truncate_after(2)
    kept = [(r["stage"], r["step"]) for r in stored(tmp_path)]
    assert kept == [("first", s) for s in range(5) for _ in range(3)] + [
        ("second", s) for s in range(2) for _ in range(3)
    ]


def test_truncate_to_the_start_empties_the_folder(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, rows_per_part=4)
    writer.write(rows(0))
    writer.truncate_after(0)
    assert list(tmp_path.iterdir()) == []
    writer.write(rows(0, 2))
    writer.close()
    assert len(stored(tmp_path)) == 2


def test_unknown_columns_and_types_are_refused(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    with pytest.raises(DataError, match=r"unknown columns \['advantge'\]"):
        writer.write([row(0), row(0, advantge=1.0)])
    assert writer._rows == []
    writer.write([row(0, group="many")])
    with pytest.raises(DataError, match="does not fit the schema"):
        writer.flush()


def test_lone_surrogates_and_null_characters_are_stored(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.write([row(0, completion="a\ud800b\x00c")])
    assert stored(tmp_path)[0]["completion"] == "a\\ud800b\x00c"


def test_damaged_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "part-000000.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(CheckpointError, match=r"part-000000.parquet is damaged"):
        RolloutWriter(tmp_path)


@pytest.mark.slow
def test_disk_full_keeps_the_rows(tmp_path: Path) -> None:
    """A file-size limit of the process provokes the real OSError of a full disk."""
    code = textwrap.dedent("""
        import resource, signal, sys
        from pathlib import Path
        from algorist.errors import CheckpointError
        from algorist.store.write import RolloutWriter
        import os
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        writer = RolloutWriter(Path(sys.argv[1]))
        writer.write([{"step": 0, "completion": os.urandom(50_000).hex()}])
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            writer.flush()
        except CheckpointError as error:
            print(error)
        else:
            raise SystemExit("no error")
        assert list(Path(sys.argv[1]).iterdir()) == [], "a torn file was left"
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        writer.close()
    """)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "then repeat the command (a run with --resume)" in done.stdout
    assert len(stored(tmp_path)) == 1


@pytest.mark.slow
def test_killed_at_any_moment_leaves_whole_parts(tmp_path: Path) -> None:
    """SIGKILL in the middle of writing; every part can be read and the rows are a prefix of what was written."""
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from algorist.store.write import RolloutWriter
        writer = RolloutWriter(Path(sys.argv[1]), rows_per_part=50)
        print("ready", flush=True)
        for step in range(1_000_000):
            writer.write([{"step": step, "completion": f"{step} {i}" * 50} for i in range(20)])
            if step % 3 == 0:
                writer.flush()
    """)
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.05 + 0.13 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        found = stored(folder)
        assert [r["step"] for r in found] == [i // 20 for i in range(len(found))]
        with RolloutWriter(folder, rows_per_part=50) as writer:
            writer.truncate_after(2)
        assert [r["step"] for r in stored(folder)] == [i // 20 for i in range(min(len(found), 40))]
        assert not list(folder.glob("*.partial"))


@pytest.mark.slow
def test_a_reader_never_sees_half_a_part(tmp_path: Path) -> None:
    """The unfinished part is written again and again while another thread reads it."""
    writer = RolloutWriter(tmp_path)
    writer.write([row(0, i, completion="x" * 2000) for i in range(200)])
    writer.flush()
    stop, counts = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            counts.append(len(stored(tmp_path)))

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for step in range(1, 80):
            writer.write(rows(step, 5))
            writer.flush()
        stop.set()
        reading.result()
    assert len(counts) > 10 and counts == sorted(counts) and counts[0] >= 200


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; run as a plain user")
def test_unwritable_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="cannot use the rollout folder"):
        RolloutWriter(tmp_path / "rollouts")


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("x")
    with pytest.raises(CheckpointError, match="cannot use the rollout folder"):
        RolloutWriter(tmp_path / "rollouts")


def test_metrics_survive_nan_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write("grpo", 1, {"loss": math.nan, "reward": 0.5, "kl": math.inf})
        writer.write("grpo", 2, {"loss": 0.1})
    json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)
    with path.open("a") as file:
        file.write('{"stage": "grpo", "step": true, "loss": 1}\n{"stage": "grpo", "step": 3, "lo')
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    with MetricsWriter(path) as writer:
        writer.write("grpo", 3, {"loss": 0.3})
    found = read_metrics(path)
    assert [r["step"] for r in found] == [1, 2, 3] and found[0]["loss"] is None and found[0]["reward"] == 0.5
    assert path.read_text().count("\n") == 4


def test_metrics_truncate_one_stage(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for stage in ("sft", "grpo"):
        for step in range(1, 6):
            writer.write(stage, step, {"loss": 1.0})
    writer.truncate_after("grpo", 2)
    writer.write("grpo", 3, {"loss": 2.0})
    writer.close()
    writer.close()
    found = [(r["stage"], r["step"]) for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert found == [("sft", s) for s in range(1, 6)] + [("grpo", 1), ("grpo", 2), ("grpo", 3)]


def test_metrics_in_a_missing_folder(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    with pytest.raises(CheckpointError, match="cannot write"):
        MetricsWriter(tmp_path / "none" / "metrics.jsonl")
