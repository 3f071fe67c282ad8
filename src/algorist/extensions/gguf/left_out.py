"""Scaled positions, biases and whole words of a GGUF file: what llama.cpp reads and transformers' own reading leaves out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from algorist.errors import ConfigError

_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_ORIGINALS = (8192, 4096, 2048, 16384, 32768)
"""Contexts that Llama 3's scaling may begin with; its own is the first."""
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
_IGNORED = {"type", "factor", "original_context_length", "finetuned", "attn_factor", "yarn_ext_factor"}
_WHOLE_WORDS = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("tekken", "youtu", "minicpm5"),
}
"""Pre-tokenizers with which llama.cpp takes a text that is a word of the vocabulary whole, without merges.

Source: ``ignore_merges`` in llama.cpp's src/llama-vocab.cpp.
"""


def carry_over(header: GGUFReader, config: Any, file: Path) -> None:
    """Add to a configuration what the file says of positions and biases.

    Raises:
        ConfigError: Its positions are scaled in a way that has no name in transformers.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # the layers with a window are not scaled
    if base := _value(header, "rope.freq_base"):
        rope["rope_theta"] = float(base)
    rope.update(_scaling(header, config, rope, file))
    if hasattr(config, "attention_bias") and any(t.name == "blk.0.attn_q.bias" for t in header.tensors):
        config.attention_bias = True


def take_words_whole(header: GGUFReader, tokenizer: Any) -> None:
    """Let the tokenizer take a word of its vocabulary whole where llama.cpp does."""
    if _value(header, "pre", of="tokenizer.ggml") in _WHOLE_WORDS:
        tokenizer.backend_tokenizer.model.ignore_merges = True


def check_nothing_left(header: GGUFReader, model: Any, drop: str, file: Path) -> None:
    """Refuse a file with weights for which the model has no place.

    Raises:
        ConfigError: It has more weights than the model.
    """
    sizes = {t.name: int(t.n_elements) for t in header.tensors if t.name != drop and "rope_f" not in t.name}
    has = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}  # tied ones once
    if (more := sum(sizes.values()) - sum(has.values())) > 0:
        biases = ", ".join([name for name in sizes if name.endswith(".bias")][:3])
        perhaps = f", perhaps its biases ({biases})" if biases else ""
        raise ConfigError(
            f"{file} has {more} weights more than the model that transformers makes of it{perhaps}; it would be another model. "
            "Take the model's folder"
        )


def _value(header: GGUFReader, name: str, of: str = "") -> Any:
    field = header.fields.get(f"{of or _value(header, 'architecture', 'general')}.{name}")
    return None if field is None else field.contents()


def _scaling(header: GGUFReader, config: Any, rope: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the rotary parameters of a file's scaling, as transformers names them; empty without one."""
    tensors = {t.name: [float(v) for v in t.data] for t in header.tensors if "rope_f" in t.name}
    kind, factor = (_value(header, f"rope.scaling.{name}") for name in ("type", "factor"))
    original = _value(header, "rope.scaling.original_context_length") or _value(header, "context_length")
    attention = _value(header, "rope.scaling.attn_factor")
    if _LONG in tensors:
        config.original_max_position_embeddings = original
        factors = {"long_factor": tensors[_LONG], "short_factor": tensors[_SHORT]}
        more = {} if attention is None else {"attention_factor": float(attention)}
        return {"rope_type": "longrope", "original_max_position_embeddings": original, **factors, **more}
    if _FREQUENCIES in tensors:
        return _llama3(tensors[_FREQUENCIES], rope, file)
    if kind in (None, "none") or not factor:
        return {}
    prefix = f"{_value(header, 'architecture', 'general')}.rope.scaling."
    unknown = (
        {key.removeprefix(prefix) for key in header.fields if key.startswith(prefix)} - _IGNORED - {*_YARN}
    )
    if kind not in ("linear", "yarn") or unknown:
        names = ", ".join((f"type {kind}", *sorted(unknown)))
        raise ConfigError(
            f"{file} scales its positions in a way that cannot be carried over ({names}); take the model's folder"
        )
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    more = {ours: float(v) for name, ours in _YARN.items() if (v := _value(header, f"rope.scaling.{name}"))}
    if attention not in (None, 1.0):
        more["attention_factor"] = float(attention) * (1 + 0.1 * math.log(factor))
    return {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": original,
        **more,
    }


def _llama3(given: list[float], rope: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return Llama 3's parameters that give the factors of a file, one for each frequency.

    The bounds of its frequencies, 1 and 4, are those of all models that were published.
    """
    factor, count = max(given), len(given)
    waves = [2 * math.pi * rope["rope_theta"] ** (place / count) for place in range(count)]

    def of(wave: float, original: int) -> float:
        smooth = min(1.0, max(0.0, (original / wave - 1) / 3))
        return 1 / ((1 - smooth) / factor + smooth)

    for original in _ORIGINALS:
        if all(math.isclose(of(w, original), g, rel_tol=1e-3) for w, g in zip(waves, given, strict=True)):
            names = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return {"rope_type": "llama3", "original_max_position_embeddings": original, **names}
    raise ConfigError(
        f"{file} scales its positions by factors of its own ({_FREQUENCIES}), which have no name in transformers; take the model's folder"
    )
