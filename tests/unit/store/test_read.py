"""Reading a run: filters, SQL, and what SQL may not do."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from algorist.errors import CheckpointError, ConfigError
from algorist.evaluation.artifact import write_artifact
from algorist.store.read import SORTS, metrics, query, rollouts
from algorist.store.run_folder import RunFolder
from algorist.store.write import MetricsWriter, RolloutWriter


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10 steps with 12 rollouts each, in parts of 25 rows; its folder has a quote in its name."""
    folder = RunFolder.create(tmp_path_factory.mktemp("it's a run"))
    with RolloutWriter(folder.rollouts, rows_per_part=25) as writer:
        for step in range(10):
            writer.write([row(step, i) for i in range(12)])
    with MetricsWriter(folder.metrics) as writer:
        for step in range(1, 11):
            writer.write("grpo", step, {"loss": 1 / step, "kl": float("nan")})
    samples: list[dict[str, Any]] = [
        {"problem_id": "a", "greedy": True, "correct": True, "completion_tokens": 5}
    ]
    for name in ("sft", "grpo"):
        write_artifact(
            folder.evaluations, name, samples=samples, metrics={}, protocol={}, model="tiny", dataset="d"
        )
    return folder.path


def row(step: int, index: int) -> dict[str, Any]:
    return {
        "step": step,
        "problem_id": f"p{index % 5}",
        "completion": f"Answer {index} 100%_x" if index else "It's ZERO",
        "completion_tokens": 100 - index,
        "rewards": {"correct": float(index % 2), "format": 0.1 * index},
        "reward": index / 10,
        "advantage": index - 6.0,
        "correct": index % 2 == 1,
        "reason": "equal_number" if index % 2 else "different",
        "truncated": index == 11,
    }


def test_all_rows_in_the_order_of_writing(run: Path) -> None:
    found = rollouts(run, limit=None)
    assert [(r["step"], r["completion_tokens"]) for r in found] == [
        (s, 100 - i) for s in range(10) for i in range(12)
    ]
    assert found[1]["rewards"] == {"correct": 1.0, "format": pytest.approx(0.1)}
    assert found[0]["stage"] == "grpo" and "filename" not in found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({"step": 3}, 12),
        ({"problem_id": "p1"}, 30),
        ({"reason": "different", "step": 4}, 6),
        ({"correct": True}, 60),
        ({"truncated": True}, 10),
        ({"min_reward": 0.9, "max_reward": 1.0}, 20),
        ({"contains": "100%_"}, 110),
        ({"contains": "it's zero"}, 10),
        ({"stage": "sft"}, 0),
        ({"problem_id": "p1' OR true --"}, 0),
    ],
)
def test_filters(run: Path, filters: dict[str, Any], count: int) -> None:
    found = rollouts(run, limit=None, **filters)
    assert len(found) == count
    assert rollouts(run, limit=7, **filters) == found[:7]


@pytest.mark.slow
@pytest.mark.parametrize("sort", SORTS)
def test_sorting_with_and_without_a_limit(run: Path, sort: Any) -> None:
    column = sort.removeprefix("-")
    whole, few = rollouts(run, sort=sort, limit=None), rollouts(run, sort=sort, limit=30)
    values = [r[column] for r in whole]
    assert values == sorted(values, reverse=sort.startswith("-"))
    assert few == whole[:30]


def test_bad_arguments_are_told(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot sort by 'rewards'. Did you mean 'reward'\?"):
        rollouts(run, sort="rewards")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="limit is 0"):
        rollouts(run, limit=0)
    with pytest.raises(CheckpointError, match="is not there"):
        rollouts(run / "nothing")


@pytest.mark.slow
def test_sql_over_the_views(run: Path) -> None:
    found = query(
        run,
        "SELECT step, avg(rewards['correct']) AS share FROM rollouts WHERE step < ? GROUP BY step ORDER BY step",
        [3],
    )
    assert found == [{"step": s, "share": 0.5} for s in range(3)]
    assert query(run, "SELECT value FROM metrics WHERE name = 'loss' AND step = 4") == [{"value": 0.25}]
    assert query(run, "SELECT count(*) AS n FROM metrics WHERE name = 'kl' AND value IS NULL") == [{"n": 10}]
    names = query(run, "SELECT evaluation, correct FROM samples ORDER BY 1")
    assert names == [{"evaluation": "grpo", "correct": True}, {"evaluation": "sft", "correct": True}]
    assert query(run, "DESCRIBE rollouts")[0]["column_name"] == "stage"


@pytest.mark.parametrize(
    "sql",
    [
        "COPY rollouts TO '{run}/copy.csv'",
        "CREATE TABLE x AS SELECT 1",
        "DROP VIEW rollouts",
        "SELECT 1; SELECT 2",
        "SET enable_external_access = true",
        "PRAGMA database_list",
        "ATTACH '{run}/x.db'",
        "INSTALL httpfs",
        "DELETE FROM metrics",
        "EXPLAIN ANALYZE COPY rollouts TO '{run}/copy.csv'",
        "",
    ],
)
def test_sql_cannot_change_anything(run: Path, sql: str) -> None:
    before = sorted(p.name for p in run.rglob("*"))
    with pytest.raises(ConfigError):
        query(run, sql.format(run=str(run).replace("'", "''")))
    assert sorted(p.name for p in run.rglob("*")) == before


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/hosts'",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM read_text('{run}/../secret.txt')",
        "SELECT * FROM secret_of_python",
        "SELECT size FROM read_text('.tmp/secret.txt')",
    ],
)
def test_sql_reads_nothing_else(run: Path, sql: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB's own temporary folder in the working directory neither."""
    monkeypatch.chdir(tmp_path)
    for folder in (run.parent, tmp_path / ".tmp"):
        folder.mkdir(exist_ok=True)
        (folder / "secret.txt").write_text("secret")
    secret_of_python = [{"x": 1}]  # noqa: F841 - DuckDB must not find it
    with pytest.raises(ConfigError):
        query(run, sql.format(run=str(run).replace("'", "''")))


@pytest.mark.parametrize(
    "sql",
    [
        *("SELECT nothing FROM rollouts", "SELEC 1", "SELECT 'a'::INT", "SELECT ?"),
        *("SELECT '\ud800'", "SELECT to_timestamp(time) FROM metrics"),
    ],
)
def test_wrong_sql_is_a_users_mistake(run: Path, sql: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytz", None)  # not a package of ours; DuckDB asks for it
    with pytest.raises(ConfigError) as refused:
        query(run, sql)
    assert "Traceback" not in str(refused.value)
    assert query(run, "SELECT to_timestamp(time)::VARCHAR AS t FROM metrics LIMIT 1")


def test_an_empty_run_has_the_same_columns(tmp_path: Path, run: Path) -> None:
    RunFolder.create(tmp_path)
    assert rollouts(tmp_path) == [] and metrics(tmp_path) == []
    columns = "SELECT column_name, column_type FROM (DESCRIBE rollouts)"
    assert query(tmp_path, columns) == query(run, columns)
    assert query(tmp_path, "SELECT count(*) AS n FROM samples") == [{"n": 0}]


def test_a_part_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    with RolloutWriter(folder.rollouts, rows_per_part=25) as writer:
        writer.write([row(0, i) for i in range(12)])
    (part,) = folder.rollouts.glob("part-*.parquet")
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(part).drop_columns(["truncated"]), part)
    with pytest.raises(
        CheckpointError, match=r"not written by this version .*columns that differ: truncated"
    ):
        rollouts(folder.path)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    RunFolder.create(tmp_path)
    (tmp_path / "rollouts" / "part-000000.parquet").write_bytes(b"PAR1 torn in the middle PAR1")
    with pytest.raises(CheckpointError, match=r"part-000000.parquet"):
        rollouts(tmp_path)


@pytest.mark.slow
def test_reading_while_the_run_goes_on(tmp_path: Path) -> None:
    """Every query sees a whole prefix of what was written, though parts are rewritten and added meanwhile."""
    folder = RunFolder.create(tmp_path)
    stop, counts = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            found = rollouts(tmp_path, limit=None)
            assert [r["step"] for r in found] == [i // 10 for i in range(len(found))]
            counts.append(len(found))

    with RolloutWriter(folder.rollouts, rows_per_part=100) as writer, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for step in range(1000):
            writer.write([row(step, i) for i in range(10)])
            writer.flush()
            if step >= 100 and len(counts) > 5:  # a busy machine reads more slowly
                break
        stop.set()
        reading.result()
    assert len(counts) > 5 and counts == sorted(counts)


def test_metrics_by_stage(run: Path) -> None:
    assert len(metrics(run)) == 10 and metrics(run, "sft") == []
    assert metrics(run)[0]["loss"] == 1.0 and metrics(run)[0]["kl"] is None
