"""Datasets made of datasets: ``mixture`` joins several, ``holdout`` cuts one into a training and a held-out part."""

from __future__ import annotations

import logging
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from algorist.config.schema import DatasetSection
from algorist.data.base import DATASETS, Source, dataset, refuse_unknown
from algorist.data.load import load_problems
from algorist.diagnosis.leakage import overlap
from algorist.errors import DataError, nearest
from algorist.types import Problem

log = logging.getLogger(__name__)


@dataset("mixture")
def load_mixture(source: Source) -> list[Problem]:
    """Several datasets in one; params: ``parts`` (list of data sections, each with ``weight`` or none), ``seed`` (0).

    Without weights each part comes in whole (its own ``limit`` counts). With weights, which all parts must have, the
    parts are in proportion to them: as many problems as possible without repeating one, drawn by ``seed``. The order
    is shuffled by ``seed``; null keeps the parts one after the other. ``subject`` stays, ``extra.dataset`` names the part:
    its dataset, with the file's name, and at last the part's number, where another part would have the same name.
    """
    refuse_unknown(source.params, ("parts", "seed"), "mixture")
    if source.path is not None or source.hub is not None:
        raise DataError(
            "mixture: data.….path or hub is set, but a mixture reads its parts only; put it into params.parts"
        )
    parts = source.params.get("parts")
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise DataError(
            f"mixture: data.….params.parts is {parts!r}; expected a list of data sections such as "
            "[{name: gsm8k, split: train, limit: 1000}, {name: math, path: math/train.parquet}]"
        )
    seed = source.params.get("seed", 0)
    sections = [_section(part, number) for number, part in enumerate(parts)]
    loaded = [
        [
            replace(p, id=f"{number}/{p.id}", extra={**p.extra, "dataset": name})
            for p in load_problems(section)
        ]
        for number, (section, name) in enumerate(zip(sections, _names(sections), strict=True))
    ]
    weights = _weights(parts)
    if weights is not None:
        loaded = _in_proportion(loaded, weights, random.Random(f"{seed}/draw"))
    problems = [problem for part in loaded for problem in part]
    if seed is not None:
        random.Random(seed).shuffle(problems)
    return problems


@dataset("holdout")
def load_holdout(source: Source) -> list[Problem]:
    """A part of a dataset without a test split; params: ``of``, ``part`` (train, held_out), ``share`` (0.9), ``seed``.

    ``of`` names the adapter, which gets path, hub, subset, split, columns and all other params. The rows are shuffled by
    ``seed`` (3407); the first ``int(rows × share)`` are ``train``, the rest ``held_out``, without the questions that also
    are in ``train`` (up to case and spacing).
    """
    params = dict(source.params)
    name, part = params.pop("of", None), params.pop("part", "train")
    share, seed = params.pop("share", 0.9), params.pop("seed", 3407)
    if not isinstance(name, str):
        raise DataError(
            f"holdout: data.….params.of is {'missing' if name is None else repr(name)}; expected the name of the dataset to cut, such as of: local, with path, "
            "columns and split beside name, as for that dataset itself"
        )
    if part not in ("train", "held_out"):
        raise DataError(f"holdout: data.….params.part is '{part}'; expected train or held_out")
    if not isinstance(share, (int, float)) or not 0 < share < 1:
        raise DataError(f"holdout: data.….params.share is {share!r}; expected a share between 0 and 1")
    problems = list(DATASETS.get(name)(replace(source, params=params)))
    random.Random(seed).shuffle(problems)
    cut = int(len(problems) * share)
    if part == "train":
        return problems[:cut]
    repeated = {p.id for p in overlap(problems[:cut], problems[cut:])}
    if repeated:
        log.warning(
            "dataset '%s': %d of %d held-out problems are also in the training part and are left out; %d remain",
            name,
            len(repeated),
            len(problems) - cut,
            len(problems) - cut - len(repeated),
        )
    return [p for p in problems[cut:] if p.id not in repeated]


def _section(part: dict[str, Any], number: int) -> DatasetSection:
    values = {key: value for key, value in part.items() if key != "weight"}
    if "name" not in values:
        raise DataError(f"mixture: part {number} has no name; expected one of {', '.join(DATASETS.names())}")
    try:
        section = DatasetSection.model_validate(values)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(map(str, wrong["loc"]))
        near = nearest(key, [*DatasetSection.model_fields, "weight"])
        raise DataError(f"mixture: part {number}, key {key}: {wrong['msg']}.{near}") from None
    for key in ("max_prompt_percentile", "max_prompt_tokens"):
        if getattr(section, key) is not None:
            raise DataError(
                f"mixture: part {number} has {key}, which needs the tokenizer; set it at the mixture itself"
            )
    if ".py:" in (section.checker or ""):
        raise DataError(
            f"mixture: part {number} has a checker of its own file, {section.checker}; parts take registered ones: register it in a file "
            "of plugins (docs/extending.md)"
        )
    return section


def _names(sections: list[DatasetSection]) -> list[str]:
    """Return a name for each part: the dataset's, with the file's or the part's number where two would be the same."""
    names = [section.name for section in sections]
    for more in (
        [f"/{Path(s.path).name}" if s.path else "" for s in sections],
        [f"/{n}" for n in range(len(sections))],
    ):
        often = Counter(names)
        names = [name + (add if often[name] > 1 else "") for name, add in zip(names, more, strict=True)]
    return names


def _weights(parts: list[dict[str, Any]]) -> list[float] | None:
    weights = [part.get("weight") for part in parts]
    if all(weight is None for weight in weights):
        return None
    for number, weight in enumerate(weights):
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or weight <= 0:
            raise DataError(
                f"mixture: part {number} has the weight {weight!r}; with one weight all parts need a positive number"
            )
    return [float(weight) for weight in weights if weight is not None]


def _in_proportion(
    loaded: list[list[Problem]], weights: list[float], rng: random.Random
) -> list[list[Problem]]:
    scale = min(len(part) / weight for part, weight in zip(loaded, weights, strict=True))
    counts = [max(1, round(scale * weight)) for weight in weights]
    return [
        part if count >= len(part) else rng.sample(part, count)
        for part, count in zip(loaded, counts, strict=True)
    ]
