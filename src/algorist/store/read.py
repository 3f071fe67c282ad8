"""Reads a run's store through DuckDB: SQL over views, or a few named filters. Never writes.

Views: ``rollouts`` (columns of ``store.write.SCHEMA``), ``metrics`` (stage, step, time, name, value: one row per
number) and ``samples`` (all evaluations, their name in ``evaluation``). A reward is ``rewards['correct']``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import duckdb
import pyarrow

from algorist.errors import CheckpointError, ConfigError, check_known
from algorist.store.write import SCHEMA, part_paths, read_metrics, read_part

Sort = Literal[
    "step", "reward", "-reward", "advantage", "-advantage", "completion_tokens", "-completion_tokens", "-step"
]
SORTS: tuple[str, ...] = Sort.__args__  # type: ignore[attr-defined]
_METRICS = pyarrow.schema(
    [
        ("stage", pyarrow.string()),
        ("step", pyarrow.int64()),
        ("time", pyarrow.float64()),
        ("name", pyarrow.string()),
        ("value", pyarrow.float64()),
    ]
)


def query(run: Path, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Return the rows of one SELECT over the views of a run.

    The statement sees the run folder only: it cannot write, nor read other files or the network.

    Args:
        run: The run folder.
        sql: One SELECT (or WITH, DESCRIBE, SUMMARIZE) statement.
        parameters: Values of ``?`` in the statement.

    Raises:
        CheckpointError: There is no such run, or a part is damaged.
        ConfigError: The statement is not one SELECT, or it is wrong; the message is DuckDB's.
    """
    with _connect(Path(run)) as connection:
        _check_select(sql)
        return _fetch(connection, sql, parameters)


def rollouts(
    run: Path,
    *,
    stage: str | None = None,
    step: int | None = None,
    problem_id: str | None = None,
    reason: str | None = None,
    correct: bool | None = None,
    truncated: bool | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    contains: str | None = None,
    sort: Sort = "step",
    limit: int | None = 50,
) -> list[dict[str, Any]]:
    """Return rollouts that match all filters, at most ``limit`` of them (None: all).

    Args:
        run: The run folder.
        stage: Training stage.
        step: Optimizer steps done when it was sampled.
        problem_id: One problem across steps.
        reason: Grade reason.
        correct: Right or wrong ones only.
        truncated: Truncated ones only, or finished ones.
        min_reward: Smallest total reward.
        max_reward: Largest total reward.
        contains: Text in the completion, case ignored.
        sort: A column of ``SORTS``; a minus means descending.
        limit: Most rows returned.

    Raises:
        CheckpointError: There is no such run, or a part is damaged.
        ConfigError: ``sort`` or ``limit`` is not valid.
    """
    check_known(sort, SORTS, f"cannot sort by '{sort}'", "Known: {}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; expected at least 1")
    filters: list[tuple[str, Any]] = [
        ("stage = ?", stage),
        ("step = ?", step),
        ("problem_id = ?", problem_id),
        ("reason = ?", reason),
        ("correct = ?", correct),
        ("truncated = ?", truncated),
        ("reward >= ?", min_reward),
        ("reward <= ?", max_reward),
        ("contains(lower(completion), lower(?))", contains),
    ]
    used = [(text, value) for text, value in filters if value is not None]
    where = " AND ".join(text for text, _ in used) or "true"
    parameters = [value for _, value in used]
    column, order = sort.removeprefix("-"), "DESC" if sort.startswith("-") else "ASC"
    by = f"ORDER BY \"{column}\" {order} NULLS LAST, filename = '', filename, file_row_number"
    with _connect(Path(run)) as connection:
        if limit is None:
            return _fetch(connection, f"SELECT {_COLUMNS} FROM _rollouts WHERE {where} {by}", parameters)
        # First which rows, from the narrow columns; then the texts of these few rows.
        keys = _fetch(
            connection,
            f"SELECT filename, file_row_number FROM _rollouts WHERE {where} {by} LIMIT {int(limit)}",
            parameters,
        )
        return _rows_at(connection, [(k["filename"], k["file_row_number"]) for k in keys])


def metrics(run: Path, stage: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl``: stage, step, time and the numbers; null is NaN.

    Raises:
        CheckpointError: There is no such run.
    """
    _check_run(Path(run))
    lines = read_metrics(Path(run) / "metrics.jsonl")
    return [line for line in lines if stage is None or line.get("stage") == stage]


_COLUMNS = ", ".join(f'"{name}"' for name in SCHEMA.names)


_OPENED: ContextVar[tuple[Path, duckdb.DuckDBPyConnection] | None] = ContextVar("_OPENED", default=None)


@contextmanager
def opened(run: Path) -> Iterator[None]:
    """Open a run's store once for all queries inside, which see it as it is now: opening it takes longer than most queries.

    Raises:
        CheckpointError: There is no such run, or a part is damaged.
    """
    with _connect(Path(run)) as connection:
        token = _OPENED.set((Path(run).resolve(), connection))
        try:
            yield
        finally:
            _OPENED.reset(token)


@contextmanager
def _connect(run: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a database in memory with the views; afterwards no file outside the run can be reached."""
    if (before := _OPENED.get()) is not None and before[0] == run.resolve():
        yield before[1]
        return
    _check_run(run)
    with duckdb.connect(":memory:") as connection:
        try:
            # A notebook without ipywidgets has no bar, nor this setting.
            with suppress(duckdb.InvalidInputException):
                connection.execute("SET enable_progress_bar = false")
            connection.execute("SET memory_limit = '4GB'")
            connection.execute(
                "SET temp_directory = ''"
            )  # the default lies in the working directory, and could be read
            _make_rollouts(connection, run)
            _make_samples(connection, run)
            connection.register("_metrics", _metrics_table(run))
            connection.execute("CREATE TABLE metrics AS SELECT * FROM _metrics")
            connection.unregister("_metrics")
            connection.execute("SET python_enable_replacements = false")
            connection.execute(f"SET allowed_directories = [{_quoted(str(run.resolve()) + '/')}]")
            connection.execute("SET enable_external_access = false")
            connection.execute("SET lock_configuration = true")
        except duckdb.Error as error:
            raise CheckpointError(f"a part of the store of {run} is damaged: {error}") from None
        yield connection


def _make_rollouts(connection: duckdb.DuckDBPyConnection, run: Path) -> None:
    """Make the view over the full parts, which never change, and a copy of the last part, which may still grow."""
    parts = part_paths((run / "rollouts").resolve())
    outside = next((part for part in parts if not part.resolve().is_relative_to(run.resolve())), None)
    if outside is not None:
        raise CheckpointError(f"{outside} is a link that leads out of the run folder; it is not read")
    copied, viewed = parts[-1:], parts[:-1]
    tail = pyarrow.concat_tables([SCHEMA.empty_table(), *(read_part(part) for part in copied)])
    numbers = pyarrow.array(range(tail.num_rows), pyarrow.int64())
    connection.register("_arrow", tail.append_column("file_row_number", numbers))
    connection.execute(
        f"CREATE TABLE _tail AS SELECT {_COLUMNS}, '' AS filename, file_row_number FROM _arrow"
    )
    connection.unregister("_arrow")
    view = "CREATE VIEW _rollouts AS SELECT * FROM _tail"
    if viewed:
        listed = ", ".join(_quoted(str(p)) for p in viewed)
        source = f"read_parquet([{listed}], filename = true, file_row_number = true)"
        view = (
            f"CREATE VIEW _rollouts AS SELECT {_COLUMNS}, filename, file_row_number FROM {source} "
            "UNION ALL SELECT * FROM _tail"
        )
    connection.execute(view)
    connection.execute(f"CREATE VIEW rollouts AS SELECT {_COLUMNS} FROM _rollouts")


def _make_samples(connection: duckdb.DuckDBPyConnection, run: Path) -> None:
    files = [str(p.resolve()) for p in sorted((run / "eval").glob("*.parquet"))]
    if not files:
        connection.execute(
            "CREATE TABLE samples (evaluation VARCHAR, problem_id VARCHAR, greedy BOOLEAN, correct BOOLEAN)"
        )
        return
    source = f"read_parquet([{', '.join(map(_quoted, files))}], filename = true, union_by_name = true)"
    connection.execute(
        "CREATE VIEW samples AS SELECT parse_filename(filename, true) AS evaluation, * EXCLUDE (filename) "
        f"FROM {source}"
    )


def _metrics_table(run: Path) -> pyarrow.Table:
    rows = [
        {
            "stage": str(line.get("stage", "")),
            "step": line.get("step"),
            "time": line.get("time"),
            "name": name,
            "value": None if value is None or not math.isfinite(value) else float(value),
        }
        for line in read_metrics(run / "metrics.jsonl")
        for name, value in line.items()
        if name not in ("stage", "step", "time") and (value is None or isinstance(value, (int, float)))
    ]
    return pyarrow.Table.from_pylist(rows, schema=_METRICS)


def _rows_at(connection: duckdb.DuckDBPyConnection, keys: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the full rows at (file, row number), in the order of ``keys``, opening only these files."""
    numbers: dict[str, list[int]] = {}
    for name, number in keys:
        numbers.setdefault(name, []).append(number)
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for name, places in numbers.items():
        source = f"read_parquet({_quoted(name)}, file_row_number = true)" if name else "_tail"
        listed = ", ".join(str(int(n)) for n in places)
        sql = f"SELECT {_COLUMNS}, file_row_number FROM {source} WHERE file_row_number IN ({listed})"
        for row in _fetch(connection, sql):
            rows[name, row.pop("file_row_number")] = row
    return [rows[key] for key in keys]


def _check_select(sql: str) -> None:
    try:
        sql.encode()
        statements = duckdb.extract_statements(sql)
    except (duckdb.Error, UnicodeEncodeError) as error:
        raise ConfigError(f"cannot read the SQL: {error}") from None
    # EXPLAIN is left out: EXPLAIN ANALYZE COPY writes.
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise ConfigError(
            "expected one SELECT statement over the views rollouts, metrics and samples, such as: "
            "SELECT step, avg(reward) FROM rollouts GROUP BY step ORDER BY step"
        )


def _fetch(
    connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    try:
        cursor = connection.execute(sql, list(parameters))
        names = [column[0] for column in cursor.description or []]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    except duckdb.Error as error:
        if ".parquet" in str(error):
            raise CheckpointError(f"cannot read the store: {error}") from None
        if "pytz" in str(error):
            raise ConfigError(
                "the SQL makes a time with a time zone, which is not read; write …::VARCHAR after it"
            ) from None
        raise ConfigError(f"the SQL does not work: {error}") from None


def _check_run(run: Path) -> None:
    if run.is_file():
        raise CheckpointError(f"{run} is a file; give the folder of a run, such as runs/quickstart")
    if not run.is_dir():
        raise CheckpointError(f"{run} is not there; give the folder of a run, such as runs/quickstart")
    if not any((run / name).exists() for name in ("config.yaml", "metrics.jsonl", "rollouts", "eval")):
        raise CheckpointError(f"{run} is not a run folder (no config.yaml, metrics.jsonl, rollouts or eval)")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
