"""Conversion and quantisation by llama.cpp, in a process of their own: ``python -m algorist.extensions.llama_cpp.child convert|quantize …``.

llama.cpp's converter knows a tokenizer's way of splitting text by a hash; one that it does not know is compared with the splits
below, and what llama.cpp then makes of texts is compared with the tokenizer, token by token (``write.py``).
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from algorist.models.tiny import SPLIT

SPLITS = {SPLIT: "smollm"}
"""Regular expression of ``tokenizer.json`` → llama.cpp's name of the split that gives the same tokens."""


def split_of(folder: Path) -> str | None:
    """Return llama.cpp's name for the split of a tokenizer that its converter does not know, or None."""
    split = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("pre_tokenizer") or {}
    parts = split.get("pretokenizers", [split])
    pattern = next((p["pattern"].get("Regex") for p in parts if p.get("type") == "Split"), None)
    if pattern is not None:
        return SPLITS.get(pattern)
    digits = any(p.get("type") == "Digits" and p.get("individual_digits") for p in parts)
    plain = any(p.get("type") == "ByteLevel" and p.get("use_regex", True) for p in parts)
    return ("smollm" if digits else "gpt-2") if plain else None


def convert(source: Path, folder: Path, target: Path, kind: str) -> None:
    """Run llama.cpp's ``convert_hf_to_gguf.py`` of ``source`` on a model folder."""
    sys.path.insert(0, str(source))
    sys.path.insert(1, str(source / "gguf-py"))
    base: Any = __import__("conversion.base", fromlist=["TextModel"]).TextModel
    known = base.get_vocab_base_pre

    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            if name := split_of(folder):
                return name
            raise

    base.get_vocab_base_pre = get_vocab_base_pre
    script = str(source / "convert_hf_to_gguf.py")
    sys.argv = [script, str(folder), "--outfile", str(target), "--outtype", kind]
    runpy.run_path(script, run_name="__main__")


def quantize(source: Path, target: Path, kind: str) -> None:
    """Quantise a GGUF file with ``llama_model_quantize``."""
    import ctypes

    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    parameters.nthread = os.cpu_count() or 1
    if code := llama_cpp.llama_model_quantize(
        os.fsencode(source), os.fsencode(target), ctypes.byref(parameters)
    ):
        raise RuntimeError(f"llama_model_quantize ended with {code}")


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    if verb == "convert":
        convert(Path(words[0]), Path(words[1]), Path(words[2]), words[3])
    else:
        quantize(Path(words[0]), Path(words[1]), words[2])
