"""Rows from files and from the hub: JSONL, JSON, CSV, TSV, Parquet, a folder of them, or a hub name."""

from __future__ import annotations

import csv
import functools
import itertools
import json
import logging
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from algorist.errors import DataError
from algorist.store.safe_text import first_line

log = logging.getLogger("algorist.data.files")
Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
SEPARATORS = {",": "a comma", ";": "a semicolon", "\t": "a tab"}
MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_TABLE_BYTES, MAX_ROWS = 8 * 1024**3, 20_000_000
"""Limits of a Parquet file once it is unpacked."""
MAX_GROWTH, FREE_BYTES = 300, 128 * 1024**2
"""Beyond ``FREE_BYTES`` it may unpack to ``MAX_GROWTH`` times its own size."""
_SHARD = re.compile(r"-(\d+)-of-(\d+)(?:-[0-9a-f]+)?$")
_SPLITS = ("train", "test", "val", "dev", "eval")
"""Begin of a file's name that names a split; a folder without any is one training set."""
MAX_ENTRIES = 20_000
"""Most entries in a dataset's folder: a disk is not searched."""


def read_rows(path: str | Path, *, split: str = "train") -> list[Row]:
    """Read all rows of a file, or of the file of ``split`` in a folder, which may be in shards.

    Raises:
        DataError: Missing path, unknown suffix, several files for a split, damaged content (with its line), or no rows.
    """
    files = _pick(Path(path).expanduser(), split)
    rows = [row for file in files for row in _read(file)]
    if not rows:
        raise DataError(f"{files[0]} has no rows; expected at least one problem")
    return rows


def _read(file: Path) -> list[Row]:
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}
    try:
        if file.suffix.lower() != ".parquet":
            _check_encoding(file)
        return list(readers[file.suffix.lower()](file))
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from None


class HubAwayError(DataError):
    """The hub is not reached, and what ``lacking`` names (``key=KIND (now NAME)``) is not in its cache."""

    def __init__(self, why: str, *lacking: str) -> None:
        super().__init__(why, *lacking)
        self.why, self.lacking = why, lacking

    def __str__(self) -> str:
        return f"the hub is not reached ({self.why}). Connect this machine, or give local copies: {', '.join(self.lacking)}"


@functools.cache
def hub_is_away() -> str:
    """Try to reach the hub, once, where its library waits a minute for each name; return the error, or an empty string.

    Where the hub is away, its library reads its cache alone from now on.
    """
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or not hub.hostname or getproxies():
        return ""
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname, port), timeout=5).close()
    except OSError as error:
        constants.HF_HUB_OFFLINE = True
        return f"{hub.hostname}: {error.strerror or error}"
    return ""


def read_hub(name: str, *, subset: str | None, split: str) -> list[Row]:
    """Read a split of a hub dataset through the ``datasets`` library.

    Raises:
        DataError: The hub cannot be reached or has no such dataset; the message names the local-path option.
    """
    away = hub_is_away()
    import datasets

    datasets.config.HF_HUB_OFFLINE |= bool(away)
    try:
        table = datasets.load_dataset(name, subset, split=split).with_format("arrow")
        return [row for batch in table.iter(1000) for row in _rows(batch)]
    except Exception as error:
        if away:
            raise HubAwayError(away, f"data.….path=FILE (now {name}, split {split})") from None
        raise DataError(
            f"cannot load the dataset '{name}' (split {split}) from the hub: {first_line(error)}. If this machine has no network, "
            "give a local copy: data.….path=/path/to/file.jsonl"
        ) from None


def _pick(path: Path, split: str) -> list[Path]:
    if not path.exists():
        here = path.parent if path.parent.is_dir() else None
        near = [p.name for p in sorted(here.iterdir()) if p.suffix in SUFFIXES] if here else []
        beside = f" In {here} there are: {', '.join(near[:8])}." if near else ""
        whole = " The files of a folder are read together: give the folder." if "*" in path.name else ""
        raise DataError(
            f"no file or folder at {path}.{beside}{whole} Give the path of a data file or a folder with one per split"
        )
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path} ends in '{path.suffix}'; expected one of {', '.join(SUFFIXES)}")
        return [path]
    entries = list(itertools.islice(path.rglob("*"), MAX_ENTRIES + 1))
    if len(entries) > MAX_ENTRIES:
        raise DataError(
            f"{path} holds more than {MAX_ENTRIES} files; give the data file or the dataset's own folder"
        )
    files = [p for p in sorted(entries) if p.suffix.lower() in SUFFIXES]
    begins = [p for p in files if p.stem == split or p.stem.startswith(f"{split}-")]
    matches = [p for p in begins if p.stem == split or _SHARD.search(p.stem)] or begins
    if not matches and split == "train" and len({p.suffix for p in files}) == 1:
        named = [p for p in files if p.parent != path or p.stem.lower().startswith(_SPLITS)]
        if not named:
            if files[1:]:
                read = ", ".join(p.name for p in files[:8])
                log.warning("%s: no file is called after a split, so all are read: %s", path, read)
            return files
    if not matches:
        names = ", ".join(p.name for p in files[:8]) or "no data files"
        raise DataError(
            f"{path} has no file for the split '{split}' (looked for {split}.jsonl and the like); it has {names}. "
            "Give one file's path, or a split's name"
        )
    top = min(len(p.parts) for p in matches)
    return _whole_set(path, split, [p for p in matches if len(p.parts) == top])


def _whole_set(path: Path, split: str, files: list[Path]) -> list[Path]:
    """Return the one file of a split, or all of its shards; refuse several sets, and one with gaps."""
    numbers, sets = [], set()
    for file in files:
        shard = _SHARD.search(file.stem)
        total = int(shard[2]) if shard else 1
        numbers.append(int(shard[1]) if shard else 0)
        sets.add(
            (file.parent, file.suffix, file.stem[: shard.start()], total) if shard else (file, "", "", 1)
        )
    if len(sets) > 1:
        names = ", ".join(str(p.relative_to(path)) for p in files[:8])
        first = files[0].parent if _SHARD.search(files[0].stem) and files[0].parent != path else files[0]
        raise DataError(
            f"{path} has several files for the split '{split}': {names}. Name one: data.….path={first}"
        )
    if sorted(numbers) != [*range(total)]:
        raise DataError(
            f"{path} has {len(files)} of the {total} files of the split '{split}': some are missing"
        )
    return files


def _check_encoding(file: Path) -> None:
    """Refuse a text file that is not UTF-8, with the command that makes it so.

    Raises:
        DataError: It has another encoding.
    """
    number = 0
    with file.open("rb") as lines:
        start = lines.read(4)
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise DataError(_other_encoding(file, "UTF-16", "its first bytes"))
        lines.seek(0)
        while line := lines.readline(MAX_LINE_BYTES + 1):
            number += 1
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                if len(line) > MAX_LINE_BYTES:  # cut within a character
                    continue
                tail = line[error.start : error.start + 40]
                chinese = len(tail) > 3 and sum(byte > 127 for byte in tail[:8]) > 3
                guess = "GB18030" if chinese else "CP1252"
                raise DataError(_other_encoding(file, guess, f"line {number}: {error.reason}")) from None


def _other_encoding(file: Path, guess: str, where: str) -> str:
    return (
        f"{file} is not UTF-8 ({where}); it may be {guess}. Write it anew: "
        f"iconv -f {guess} -t UTF-8 {shlex.quote(str(file))} > utf8{file.suffix}"
    )


def _delimiter(file: Path, head: str) -> str:
    """Return the cell separator of a table: a tab in .tsv, else a comma, or the sign that its head has in place of one."""
    if file.suffix.lower() == ".tsv":
        return "\t"
    return next((sign for sign in SEPARATORS if sign in head), ",")


def _jsonl(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{file}:{number}: the line is longer than {MAX_LINE_BYTES} bytes")
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=_once)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{file}:{number}: not JSON ({error}); expected one object per line"
                ) from None
            if not isinstance(row, dict):
                raise DataError(f"{file}:{number}: expected an object, found {type(row).__name__}")
            yield row


def _json(file: Path) -> Iterator[Row]:
    try:
        content = json.loads(file.read_bytes(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file}: not JSON ({error}); for one object per line use the suffix .jsonl"
        ) from None
    if isinstance(content, dict):
        lists = [v for v in content.values() if isinstance(v, list)]
        content = lists[0] if len(lists) == 1 else content
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise DataError(f"{file}: expected a list of objects, or an object with one such list")
    yield from content


def _once(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"'{twice}' appears twice in one row; keep one")
    return row


def _csv(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        sign = _delimiter(file, lines.readline())
        lines.seek(0)
        reader = csv.DictReader(lines, delimiter=sign, strict=True)
        try:
            _once([(name, None) for name in reader.fieldnames or ()])
            rows = [(reader.line_num, row) for row in reader]
        except csv.Error as error:
            raise DataError(
                f"{file}:{reader.line_num + 1}: {error}; a cell that begins with a quote ends with one, and a quote within it is doubled: "
                '"He said ""two"""'
            ) from None
        for number, row in rows:
            if None in row or None in row.values():
                columns = reader.fieldnames or ()
                cells = sum(v is not None for k, v in row.items() if k is not None) + len(row.get(None) or ())
                raise DataError(
                    f"{file}:{number}: {cells} cells, expected {len(columns)} ({', '.join(columns)}): "
                    f"{str(list(row.values()))[:120]}; quote a text that has {SEPARATORS[sign]}"
                )
            yield dict(row)


def _parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        most = min(MAX_TABLE_BYTES, max(FREE_BYTES, MAX_GROWTH * file.stat().st_size))
        with pyarrow.parquet.ParquetFile(file) as table:
            _once([(name, None) for name in table.schema_arrow.names])
            about, columns = table.metadata, [table.schema.column(i) for i in range(len(table.schema))]
            groups = [about.row_group(i) for i in range(about.num_row_groups)]
            size = sum(group.total_byte_size for group in groups) + sum(
                group.column(i).num_values * max(8, column.length or 0)
                for group in groups
                for i, column in enumerate(columns)
            )
        # Repeated texts are stored once, and the file does not say how large they become: they are read as they are stored.
        texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        with pyarrow.parquet.ParquetFile(file, read_dictionary=texts) as table:
            if size <= most and about.num_rows <= MAX_ROWS:
                size, each = 0, range(about.num_row_groups)  # one by one: each has its own dictionary
                for batch in (batch for i in each for batch in table.iter_batches(256, row_groups=[i])):
                    size += sum(map(_unpacked, batch.columns))
                    if size > most:
                        break
                    yield from _rows(batch)
        if size > most or about.num_rows > MAX_ROWS:
            raise DataError(
                f"{file}: {about.num_rows} rows that unpack to more than {most} bytes; expected at most "
                f"{MAX_ROWS} rows and {most} bytes. Cut the file, or write it as .jsonl"
            )
    except (pyarrow.ArrowException, OverflowError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file}: not a readable Parquet file ({str(error)[:300]})") from None


def _rows(batch: Any) -> list[Row]:
    """Return the rows of an Arrow table or batch."""
    columns = [*map(_as_written, batch.columns)]
    return list(type(batch).from_arrays(columns, batch.schema.names).to_pylist())


def _as_written(array: Any) -> Any:
    """Return numbers of 32 bits as the shortest decimals that name them: 0.1, where the same value in 64 bits is 0.10000000149."""
    import pyarrow

    exact = _with_floats(array.type, pyarrow.float64())
    if exact == array.type:
        return array
    return array.cast(_with_floats(array.type, pyarrow.string())).cast(exact)


def _with_floats(kind: Any, other: Any) -> Any:
    """Return an Arrow type with ``other`` in place of floats of 32 bits, at any depth."""
    import pyarrow

    if kind == pyarrow.float32():
        return other
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([field.with_type(_with_floats(field.type, other)) for field in kind])
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        make = pyarrow.list_ if pyarrow.types.is_list(kind) else pyarrow.large_list
        return make(kind.value_field.with_type(_with_floats(kind.value_type, other)))
    return kind


def _unpacked(array: Any) -> int:
    """Return about how many bytes the values of an Arrow array take, of which equal texts are stored once."""
    import pyarrow
    import pyarrow.compute

    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        lengths = pyarrow.compute.binary_length(array.dictionary).take(array.indices)
        return 8 * len(array) + (pyarrow.compute.sum(lengths).as_py() or 0)
    if pyarrow.types.is_struct(kind):
        return 8 * len(array) + sum(map(_unpacked, array.flatten()))
    if pyarrow.types.is_map(kind):
        return _unpacked(array.keys) + _unpacked(array.items)
    if pyarrow.types.is_nested(kind):
        return 8 * len(array) + _unpacked(array.flatten())
    return 8 * len(array) + array.nbytes
