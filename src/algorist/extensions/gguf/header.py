"""The header of a GGUF file in one pass, and the file without its vocabulary: what transformers reads in a moment."""

from __future__ import annotations

import functools
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_WORDS = "tokenizer.ggml.tokens"
_BYTES = 1 << 16
"""At least so much is dequantised at a time."""
_ROWS = 64
"""So many rows of embedding and head are compared."""
_SAME = 0.3
"""Two quantisations of one matrix differ by less than this share of its size, two matrices by about 1.4."""


class Header(GGUFReader):
    """A reader that takes arrays at once; the library's walks through a vocabulary of 150,000 words for 12 seconds."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order == "S":
            return super()._get_field_parts(orig_offs, raw_type)
        content: Any = memoryview(self.data)  # type: ignore[arg-type]
        kind, count = struct.unpack_from("<IQ", content, orig_offs)
        start = place = orig_offs + 12
        parts: list[Any] = []
        if kind == GGUFValueType.STRING:
            length = struct.Struct("<Q").unpack_from
            for _ in range(count):
                end = place + 8 + length(content, place)[0]
                parts.append(bytes(content[place + 8 : end]))
                place = end
        else:
            values = np.frombuffer(content, self.gguf_scalar_to_np[GGUFValueType(kind)], count, start)
            parts, place = list(values.reshape(-1, 1)), start + values.nbytes
        return place - orig_offs, parts, list(range(count)), [int(raw_type), kind]


@contextmanager
def read_once() -> Iterator[None]:
    """Let transformers, which asks anew for each question and each module, have one ``Header`` per file, one map of names.

    Its progress bar is shown on a terminal only.
    """
    from transformers import modeling_gguf_pytorch_utils as reading

    library: Any = gguf
    bar = reading.tqdm
    reading.tqdm = functools.partial(bar, disable=None)
    was = library.GGUFReader, library.get_tensor_name_map, library.dequantize
    library.GGUFReader, library.get_tensor_name_map = functools.cache(Header), functools.cache(was[1])
    library.dequantize = functools.partial(_dequantize, was[2])
    try:
        yield
    finally:
        library.GGUFReader, library.get_tensor_name_map, library.dequantize = was
        reading.tqdm = bar


def _dequantize(library: Any, data: np.ndarray, kind: Any) -> Any:
    """Dequantise several rows of a matrix as one: the library takes 16 at a time, too few for its own overhead."""
    if data.ndim != 2:
        return library(data, kind)
    rows, together = len(data), 1
    while rows % (2 * together) == 0 and 16 * together * data.shape[1] < _BYTES:
        together *= 2
    return library(data.reshape(rows // together, -1), kind).reshape(rows, -1)


def coarser_of_tied(header: GGUFReader) -> str:
    """Return which of embedding and head is the coarser quantisation of one matrix; empty where there is one, or they differ."""
    both = {tensor.name: tensor for tensor in header.tensors if tensor.name in (EMBEDDING, HEAD)}
    if len(both) < 2 or len({tuple(tensor.shape) for tensor in both.values()}) > 1:
        return ""
    rows = np.linspace(0, int(both[HEAD].shape[-1]) - 1, _ROWS, dtype=int)
    embedding, head = (
        gguf.dequantize(both[name].data[rows], both[name].tensor_type) for name in (EMBEDDING, HEAD)
    )
    if not np.linalg.norm(embedding - head) < _SAME * np.linalg.norm(head):
        return ""
    return min(EMBEDDING, HEAD, key=lambda name: both[name].n_bytes)


def without_vocabulary(header: GGUFReader, source: Path, target: Path, *, drop: str) -> None:
    """Write the GGUF file ``source`` with empty words and the same weights; of a tied matrix without the tensor ``drop``.

    Raises:
        ValueError: The file holds no weights.
    """
    if not header.tensors:
        raise ValueError("it holds no weights")
    fields = [field for name, field in header.fields.items() if not name.startswith("GGUF.")]
    infos = [tensor.field for tensor in header.tensors]
    ends = [field.offset for field in fields[1:]] + [infos[0].offset]
    pairs = [
        _empty(len(field.data)) if field.name == _WORDS else header.data[field.offset : end].tobytes()
        for field, end in zip(fields, ends, strict=True)
        if field.name == _WORDS or not (field.name.startswith("tokenizer.") and len(field.types) > 1)
    ]
    tensors = []
    for info in infos:
        if info.name != drop:
            raw = b"".join(part.tobytes() for part in info.parts)
            tied = EMBEDDING if drop and info.name == HEAD else info.name
            tensors.append(_string(tied) + raw[len(_string(info.name)) :])
    head = header.data[:8].tobytes() + struct.pack("<QQ", len(tensors), len(pairs))
    content = head + b"".join([*pairs, *tensors])
    with target.open("wb") as file, source.open("rb") as whole:
        file.write(content + bytes(-len(content) % int(header.alignment)))
        whole.seek(
            int(header.data_offset)
        )  # not through the mapping: its pages would count as this process's memory
        shutil.copyfileobj(whole, file, 1 << 24)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _empty(count: int) -> bytes:
    kinds = struct.pack("<II", GGUFValueType.ARRAY, GGUFValueType.STRING)
    return _string(_WORDS) + kinds + struct.pack("<Q", count) + bytes(8 * count)
