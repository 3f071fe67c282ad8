"""How far the weights moved in a stage: its start and its end compared tensor by tensor, without torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from algorist.diagnosis.settings import Settings
from algorist.errors import DAMAGED, CheckpointError
from algorist.store.stages import checkpoints

MOVED_SHARE = 0.01
"""A tensor counts as trained when one element in a hundred changed: bfloat16 weights that swallow small updates still
change where they happen to be close to zero, and rows of an embedding change only for tokens that occur."""
HALF_MOVED = 0.5
"""Weights with room for Adam's steps nearly all change within a few of them; 16-bit ones round the steps away."""
SELDOM = ("embed", "lm_head", "expert", "lora_")
"""Parts of the names of tensors that may stay as they are in a run that trains all weights."""
FIRST_BYTES = 4096
"""Of each tensor, which show whether it moves; a multiple of every type's size."""
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class WeightChange:
    """The comparison of two sets of weights.

    ``share`` is the largest share of changed elements of any tensor (a lower bound once it is above ``HALF_MOVED``),
    ``relative`` the largest |end - start| / |start| seen, ``empty_adapter`` whether every LoRA B matrix is zero, ``half``
    whether the end is stored in 16 bit, ``still`` the share of the weights, but those of ``SELDOM``, in tensors that begin as they did.
    """

    start: str
    end: str
    tensors: int
    share: float
    relative: float
    empty_adapter: bool = False
    half: bool = False
    still: float = 0.0


def stage_change(run: Path, stage: str, settings: Settings) -> WeightChange | None:
    """Compare the weights that a stage started from with its newest ones; None where one of them is not there."""
    saved = checkpoints(run / stage)
    end = next((p for p in (run / stage / "final", *saved) if _files(p)), None)
    if end is None:
        return None
    starts = [run / "sft" / "final"] if stage == "grpo" else []
    starts.append(Path(str(settings.get("model.name", ""))))
    starts += saved[-1:] if len(saved) > 1 else []
    for start in starts:
        if start != end and _files(start) and (change := compare(start, end)) is not None:
            return change
    return WeightChange("", end.name, 0, 0.0, 0.0, True) if _empty_adapter(end) else None


def compare(start: Path, end: Path) -> WeightChange | None:
    """Compare two folders of safetensors; None when they share no tensor. Stops at the first tensor that moved.

    Raises:
        CheckpointError: A file is not readable as safetensors.
    """
    before, after = _tensors(start), _tensors(end)
    common = [name for name in after if name in before and before[name][2] == after[name][2]]
    if not common:
        return None
    share = relative = 0.0
    # Embeddings last: most of their rows never change.
    for name in sorted(common, key=lambda n: ("embed" in n or "lm_head" in n, n)):
        new = _values(after[name])
        old = _stored_as(_values(before[name]), after[name][1])
        if old.size == 0:
            continue
        difference = new - old
        share = max(share, float(numpy.count_nonzero(difference)) / difference.size)
        size = float(numpy.linalg.norm(old))
        relative = max(relative, float(numpy.linalg.norm(difference)) / size if size else 0.0)
        if share > HALF_MOVED and relative > 1e-4:
            break
    half = all(after[name][1] in ("BF16", "F16") for name in common)
    label = f"{start.parent.name}/{start.name}"
    inner = [name for name in common if not any(part in name for part in SELDOM)]
    sizes = {name: math.prod(after[name][2]) for name in inner}
    still = sum(sizes[name] for name in inner if _begins_alike(before[name], after[name]))
    part = still / max(1, sum(sizes.values()))
    return WeightChange(label, end.name, len(common), share, relative, _empty_adapter(end), half, part)


def _begins_alike(before: Tensor, after: Tensor) -> bool:
    """Return whether the first elements of two tensors of one type are the same, bit for bit."""
    if before[1] != after[1]:
        return False
    one, other = ((*t[:4], min(t[4], t[3] + FIRST_BYTES)) for t in (before, after))
    return bool(numpy.array_equal(_values(one), _values(other)))


Tensor = tuple[Path, str, tuple[int, ...], int, int]


def _files(folder: Path) -> list[Path]:
    adapter = folder / "adapter_model.safetensors"
    if adapter.is_file():
        return [adapter]
    return sorted(folder.glob("model*.safetensors"))


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return (file, dtype, shape, first byte, end byte) of the floating-point tensors."""
    tensors: dict[str, Tensor] = {}
    for path in _files(folder):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(size))
            data = 8 + size
            for name, entry in header.items():
                if name != "__metadata__" and entry["dtype"] in _TYPES:
                    low, high = entry["data_offsets"]
                    tensors[name] = (path, entry["dtype"], tuple(entry["shape"]), data + low, data + high)
        except (*DAMAGED, MemoryError, OverflowError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    return tensors


def _values(tensor: Tensor) -> numpy.ndarray[Any, Any]:
    path, dtype, _, low, high = tensor
    try:
        read = numpy.fromfile(path, dtype="u1", count=high - low, offset=low)
        if read.size < high - low:
            raise ValueError(f"{read.size} of {high - low} bytes are there")
        raw = read.view(_TYPES[dtype])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if dtype == "BF16":
        return (raw.astype("<u4") << 16).view("<f4")
    return raw.astype("<f4") if dtype == "F16" else raw


def _stored_as(values: numpy.ndarray[Any, Any], dtype: str) -> numpy.ndarray[Any, Any]:
    """Round values as loading them in ``dtype`` does, so that a change of type does not look like training."""
    if dtype == "F16":
        return values.astype("<f2").astype("<f4")
    if dtype == "BF16":
        bits = values.astype("<f4").view("<u4")
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & numpy.uint32(0xFFFF0000)).view("<f4")
    return values


def _empty_adapter(folder: Path) -> bool:
    if not (folder / "adapter_model.safetensors").is_file():
        return False
    second = [t for name, t in _tensors(folder).items() if "lora_B" in name]
    return bool(second) and not any(numpy.any(_values(t)) for t in second)
