"""Weights accounted for: what a folder lacks, has too much, has in another shape, or holds only in part is refused by name."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from algorist.errors import CheckpointError

SHOWN = 3
"""Most names written out in a message."""


_MOST = {"num_hidden_layers": 1000, "hidden_size": 10**6, "intermediate_size": 10**7, "vocab_size": 10**7}
_MOST |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "r"), 10**5)


def check_sizes(config: Mapping[str, Any]) -> None:
    """Refuse sizes of a model or an adapter that would build modules for ever or fill the memory, before anything is built.

    Raises:
        ValueError: One of the sizes of ``config`` (``r`` is an adapter's rank), or of its ``text_config``, is out of range.
    """
    for part in (config, config.get("text_config")):
        for key, most in _MOST.items():
            value = part.get(key, 1) if isinstance(part, Mapping) else 1
            sizes = value if isinstance(value, list) else [value]
            if not all(size is None or (isinstance(size, int) and 0 < size <= most) for size in sizes):
                raise ValueError(f"{key} is {str(value)[:40]}; expected a number from 1 to {most}")


def check_weights(
    where: str | Path,
    *,
    missing: Collection[str] = (),
    unexpected: Collection[str] = (),
    mismatched: Collection[Any] = (),
    tensors: Iterable[tuple[str, torch.Tensor]] = (),
    whole: bool = True,
    integers: Collection[str] = (),
) -> None:
    """Refuse weights that are not exactly those of the model.

    Args:
        where: The folder or hub name, for the message.
        missing: Names that the model has and the folder lacks; heads tied to the embedding are not among them.
        unexpected: Names that the folder has and the model lacks.
        mismatched: Names of another shape; or tuples of name, shape in the folder, shape in the model.
        tensors: Loaded tensors by name; those that are not finite are refused.
        integers: Names that the folder has as integers, and the model not.
        whole: Refuse matrices of zeros too, which a half-copied file has (a new adapter has them rightly).

    Raises:
        CheckpointError: One sentence with the names.
    """
    wrong, empty = [], []
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.is_meta or tensor.numel() == 0 or tensor.itemsize < 2:
            continue
        low, high = torch.aminmax(tensor.detach())
        if not torch.isfinite(torch.stack([low, high])).all():
            wrong.append(name)
        elif whole and tensor.ndim > 1 and len(tensor) > 1 and not low and not high:  # one row is a bias
            empty.append(name)
    other = [name if isinstance(name, str) else _shapes(*name) for name in mismatched]
    parts = [
        f"{text} {_listed(names)}"
        for text, names in (
            ("lacks", missing),
            ("has what the model does not know:", unexpected),
            ("has another shape of", other),
            ("holds values that are not finite in", wrong),
            ("holds nothing but zeros in", empty),
            ("holds integers in", integers),
        )
        if names
    ]
    if parts:
        raise CheckpointError(
            f"the weights in {where} are not those of its model: it {'; '.join(parts)}. Copy or save it again; a half-copied "
            "folder and a config.json of another model look like this"
        )


def check_loaded(
    where: str | Path, info: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]] = ()
) -> None:
    """Refuse weights by what ``from_pretrained(…, output_loading_info=True)`` says of them; see ``check_weights``."""
    keys = {key: info[f"{key}_keys"] for key in ("missing", "unexpected", "mismatched")}
    loaded = dict(tensors)
    check_weights(where, **keys, tensors=loaded.items(), integers=_integers(Path(where), loaded))


def _integers(folder: Path, loaded: Mapping[str, torch.Tensor]) -> list[str]:
    """List the weights that are integers in a folder's files and not in the model.

    Raises:
        CheckpointError: Its index names a file outside the folder.
    """
    for index in folder.glob("*.safetensors.index.json"):
        files = map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if outside := next((file for file in files if Path(file).name != file), None):
            raise CheckpointError(
                f"{index} names {outside}, which lies outside its folder; copy the model again"
            )
    integers: list[str] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            names = [name for name in weights.keys() if name in loaded and loaded[name].is_floating_point()]  # noqa: SIM118
            integers += [name for name in names if weights.get_slice(name).get_dtype()[0] in "IU"]
    return integers


def check_adapter(where: Path, model: Any) -> None:
    """Refuse an adapter whose file is not exactly what the loaded ``PeftModel`` has.

    Raises:
        CheckpointError: One sentence with the names.
    """
    from peft import get_peft_model_state_dict
    from peft.utils import load_peft_weights

    tensors = load_peft_weights(str(where), device="cpu")
    known = get_peft_model_state_dict(model, save_embedding_layers=False)
    base = set(model.get_base_model().state_dict())
    unexpected = [n for n in tensors if n not in known and n.removeprefix("base_model.model.") not in base]
    shapes = {
        name: (tuple(tensors[name].shape), tuple(known[name].shape)) for name in tensors if name in known
    }
    check_weights(
        where,
        missing=[name for name in known if name not in tensors],
        unexpected=unexpected,
        mismatched=[(name, *pair) for name, pair in shapes.items() if pair[0] != pair[1]],
        tensors=tensors.items(),
        whole=False,
    )


def _shapes(name: str, folder: Any, model: Any) -> str:
    return f"{name} ({_by(folder)} in the folder, {_by(model)} in the model)"


def _by(shape: Any) -> str:
    return "×".join(map(str, shape)) or "a number"


def _listed(names: Collection[str]) -> str:
    shown = sorted(map(str, names))
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more
