"""Logs of inspect_ai, ``.eval`` (a zip of JSON files) and ``.json``, read without that package."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow

from algorist.cli.imported import number
from algorist.data.files import FREE_BYTES, MAX_GROWTH, MAX_TABLE_BYTES
from algorist.errors import DataError
from algorist.evaluation.doors import Foreign

ZSTANDARD = 93
"""Compression of inspect_ai's files; zipfile knows it from Python 3.14 on."""


def read_log(path: Path) -> Foreign:
    """Return the scored samples of a log; what it holds of ``--export inspect`` comes back as it was.

    Raises:
        DataError: No log, damaged, larger than a file of its size may be, or without samples.
    """
    if path.suffix == ".eval":
        try:
            with zipfile.ZipFile(path) as archive:
                header, samples = _unpacked(path, archive)
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, pyarrow.ArrowException) as error:
            raise DataError(f"{path} is no log of inspect_ai, or it is damaged: {error}") from None
    else:
        _check_size(path, path.stat().st_size)
        header = json.loads(path.read_text(encoding="utf-8"))
        samples = {(str(s["id"]), s["epoch"]): s for s in header.get("samples") or ()}
    if not samples:
        raise DataError(
            f"{path} has no samples (status: {header.get('status')}); expected a log of a finished evaluation"
        )
    spec = header["eval"]
    own = spec["model"].startswith("algorist/")
    used = (header.get("plan") or {}).get("config") or {}
    names = {"max_tokens": "max_completion_tokens", "temperature": "temperature", "top_p": "top_p"}
    protocol = {ours: used[theirs] for theirs, ours in names.items() if used.get(theirs) is not None}
    return Foreign(
        task=str(spec["task"]),
        model=str(spec["model"]).removeprefix("algorist/"),
        rows=[_row(sample, own) for sample in samples.values()],
        protocol=spec.get("metadata") or {} if own else protocol,
    )


def _unpacked(path: Path, archive: zipfile.ZipFile) -> tuple[Any, dict[tuple[str, int], Any]]:
    files = {info.filename: info for info in archive.infolist()}
    _check_size(path, sum(info.file_size for info in files.values()))
    start = files.get("header.json") or files.get("_journal/start.json")
    if start is None:
        raise DataError(f"{path} is no log of inspect_ai: it holds no header.json")
    samples = (
        json.loads(_content(archive, info))
        for name, info in files.items()
        if name.startswith("samples/") and name.endswith(".json")
    )
    return json.loads(_content(archive, start)), {(str(s["id"]), s["epoch"]): s for s in samples}


def _check_size(path: Path, size: int) -> None:
    most = min(MAX_TABLE_BYTES, max(FREE_BYTES, MAX_GROWTH * path.stat().st_size))
    if size > most:
        raise DataError(f"{path} unpacks to {size} bytes; expected at most {most}")


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return a file of the archive, never more than the size that it states."""
    if info.compress_type != ZSTANDARD:
        return archive.read(info)
    info.compress_type = zipfile.ZIP_STORED
    stated, info.file_size, checksum = info.file_size, info.compress_size, info.CRC
    info.CRC = None  # type: ignore[assignment]  # that of what is packed; checked below
    packed = archive.read(info)
    content = bytes(pyarrow.decompress(packed, decompressed_size=stated, codec="zstd"))
    if zlib.crc32(content) != checksum:
        raise DataError(f"{info.filename} in {archive.filename} is damaged")
    return content


def _row(sample: dict[str, Any], own: bool) -> dict[str, Any]:
    question = sample["input"] if isinstance(sample["input"], str) else "\n".join(_inputs(sample["input"]))
    target = sample.get("target") or ""
    row = {
        "problem_id": str(sample["id"]),
        "sample": sample["epoch"] - 1,
        "question": question,
        "gold": target if isinstance(target, str) else ", ".join(map(str, target)),
        "completion": (sample.get("output") or {}).get("completion") or "",
        "scores": dict(_scores(sample.get("scores") or {})),
    }
    return row | ((sample.get("metadata") or {}) | {"lenient": row["scores"].get("lenient")} if own else {})


def _scores(scores: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield (name, number); a scorer with several values gives each as ``scorer,name``."""
    for name, score in scores.items():
        value = score["value"]
        if isinstance(value, dict):
            yield from ((f"{name},{key}", number(part)) for key, part in value.items())
        else:
            yield name, number(value)


def _inputs(messages: list[dict[str, Any]]) -> Iterator[str]:
    return (_text(message["content"]) for message in messages if message["role"] == "user")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part.get("type") == "text")
