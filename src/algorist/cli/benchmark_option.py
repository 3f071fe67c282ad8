"""Benchmarks of one ``algorist eval``: ``gsm8k``, ``test.jsonl``, ``math500,path=FILE,limit=100``."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from algorist.config.schema import DatasetSection
from algorist.config.yaml_text import read_yaml
from algorist.data import DATASETS
from algorist.data.files import SUFFIXES
from algorist.errors import ConfigError, DataError, nearest
from algorist.evaluation.protocols import Benchmark


def read_benchmarks(
    texts: list[str], *, split: str = "test", path: str | None = None, limit: int | None = None
) -> list[Benchmark]:
    """Return the benchmarks of the command line, each label once.

    Each of ``given`` is an adapter's name or a data file, after it ``,key=value`` for any key of a data section;
    ``split`` and ``limit`` hold where a benchmark says nothing of its own, ``path`` for a single benchmark only.

    Raises:
        ConfigError: An unknown adapter or key, a value that does not fit, or one path for several benchmarks.
    """
    if path is not None and len(texts) > 1:
        raise ConfigError(
            f"--path gives one file for {len(texts)} benchmarks; give each its own: --data {texts[0].partition(',')[0]},path=FILE"
        )
    shared = {"split": split, "path": path, "limit": limit}
    benchmarks: list[Benchmark] = []
    for text in texts:
        label, values = _read(text)
        values = {key: value for key, value in shared.items() if value is not None} | values
        try:
            section = DatasetSection.model_validate(values)
        except ValidationError as error:
            wrong = error.errors()[0]
            key = ".".join(map(str, wrong["loc"]))
            near = nearest(key, DatasetSection.model_fields)
            raise ConfigError(f"--data {text}: {key}: {wrong['msg']}.{near}") from None
        name = label or f"{section.name}-{section.split}"
        same = sum(b.label == name or b.label.startswith(f"{name}-") for b in benchmarks)
        benchmarks.append(
            Benchmark(f"{name}-{same + 1}" if any(b.label == name for b in benchmarks) else name, section)
        )
    return benchmarks


def after_the_name(error: DataError, text: str) -> DataError:
    """Rewrite a dataset's error with its keys as they are written after its name, ``local,params.decimal=…``; the last in a whole command."""
    name = text.partition(",")[0]
    said = re.sub(r"\bdata\.(?:…|train)\.(?=\w)", f"{name},", str(error))
    keys = re.findall(rf"{re.escape(name)},(\S+=\S+)", said)
    words = [f"{text},{keys[-1]}" if word == text else word for word in sys.argv[1:]] if keys else []
    return DataError(f"{said}, as in: {shlex.join(['algorist', *words])}" if words else said)


def _read(text: str) -> tuple[str | None, dict[str, Any]]:
    """Return (label of a file, values); a comma that no ``key=`` follows belongs to the value before it."""
    first, *rest = text.split(",")
    pairs: list[str] = []
    for part in rest:
        if "=" in part and all(key.isidentifier() for key in part.partition("=")[0].strip().split(".")):
            pairs.append(part)
        elif pairs:
            pairs[-1] += f",{part}"
        else:
            first += f",{part}"
    values: dict[str, Any] = {}
    for key, _, value in (pair.partition("=") for pair in pairs):
        *sections, last = key.strip().split(".")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = _value(value)
    if first in DATASETS.names():
        return None, {"name": first, **values}
    if Path(first).suffix.lower() in SUFFIXES or "/" in first:
        return Path(first).stem, {"name": "local", "path": first, **values}
    raise ConfigError(
        f"--data {text}: no dataset '{first}'.{nearest(first, DATASETS.names())} Expected an adapter "
        f"({', '.join(DATASETS.names())}) or a file such as test.jsonl"
    )


def _value(text: str) -> Any:
    try:
        return read_yaml(text, "the value")
    except ConfigError:
        return text
