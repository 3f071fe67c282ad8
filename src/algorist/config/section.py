"""The base of every section of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

MOST = 10**12
"""No setting is a larger number: neither tensors nor float32 hold what follows from one."""


@dataclass(frozen=True)
class OwnFile:
    """Marks the type of a text that names a file of the user's: a ``text``, ``code`` (``FILE.py:NAME``), or ``data``, also a folder.

    A run copies texts and code, and works with the copies; data is compared only.
    """

    kind: Literal["text", "code", "data"]


TextPath = Annotated[str, OwnFile("text")]
OwnCode = Annotated[str, OwnFile("code")]
DataPath = Annotated[str, OwnFile("data")]


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, attribute docstrings become descriptions."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    @field_validator("*")
    @classmethod
    def _usable(cls, value: Any) -> Any:
        for part in _parts(value):
            if isinstance(part, str) and "\0" in part:
                raise PydanticCustomError(
                    "unusable", "holds a NUL character, which no name of a file may have; take it out"
                )
            if isinstance(part, int | float) and not abs(part) <= MOST:
                raise PydanticCustomError("unusable", f"expected a number of at most {MOST:.0e}")
        return value


def _parts(value: Any) -> Iterator[Any]:
    """Yield the texts and numbers in lists and mappings."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


# ---- the ``model`` section: which model, in which type, from scratch or with an adapter


class TinySection(Section):
    """The shape of a model that is made from scratch."""

    vocab_size: int = Field(420, ge=300, le=10**6)
    """Entries of the byte-level BPE tokenizer trained on the training problems."""
    hidden_size: int = Field(128, ge=16, le=2**16)
    """Width of the decoder; a multiple of twice the number of heads."""
    layers: int = Field(3, ge=1, le=1000)
    """Decoder layers."""
    heads: int = Field(4, ge=1, le=2**10)
    """Attention heads."""
    kv_heads: int = Field(2, ge=1, le=2**10)
    """Key and value heads; divides ``heads``."""
    intermediate_size: int | None = Field(None, ge=16, le=2**18)
    """Width of the feed-forward layer; 3 × ``hidden_size`` when left out."""
    max_position_embeddings: int = Field(512, ge=64, le=2**24)
    """Longest sequence in tokens."""

    @model_validator(mode="after")
    def _check(self) -> TinySection:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"model.tiny.hidden_size ({self.hidden_size}) is not a multiple of twice model.tiny.heads "
                f"({self.heads}); take hidden_size {2 * self.heads * max(1, self.hidden_size // (2 * self.heads))}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.tiny.kv_heads ({self.kv_heads}) does not divide model.tiny.heads ({self.heads}); take 1"
            )
        return self


class LoraSection(Section):
    """A PEFT LoRA adapter."""

    rank: int = Field(16, ge=1)
    """Rank r of the update matrices."""
    alpha: float = Field(32, gt=0)
    """The update is scaled by alpha / rank (alpha / sqrt(rank) with rslora)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapter's input. Rollouts are sampled without it."""
    target_modules: list[str] | Literal["all-linear", "attention", "attention+mlp"] = "attention+mlp"
    """Modules that get an adapter; the default is q, k, v, o, gate, up, down."""
    rslora: bool = False
    """Rank-stabilised scaling."""
    dora: bool = False
    """Weight-decomposed adapters."""
    in_several_processes: Literal["keep", "off"] = "keep"
    """``off`` trains all weights, with a warning, when the run starts in more than one process."""

    @field_validator("in_several_processes", mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
        """Take YAML's ``off``, which is false, for the word."""
        return "off" if value is False else value


class ModelSection(Section):
    """The policy."""

    name: str = "tiny"
    """``tiny`` (made from scratch), a local folder in the hub's layout, a ``.gguf`` file or a folder with one (extra ``gguf``),
    ``smollm2`` (SmolLM2-135M-Instruct, of the extra ``smollm2`` or from the hub), ``qwen-coder-0.5b``, ``qwen-coder-1.5b``,
    ``gemma-3-270m`` (a file in the cache, of the package index, or from the hub), or a hub name ``owner/model``."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights. ``auto`` is float32 for weights that are trained, the products' type for an adapter's base; bfloat16
    trains bare 16-bit weights, stochastically rounded."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the matrix products. ``auto`` is bfloat16 on GPUs with tensor cores for it, float16 on older ones; on a CPU bfloat16
    where it has units for it (AVX512-BF16, AMX, Arm's BF16) and the model is at least 256 wide; else the weights' type."""
    attn_implementation: str | None = None
    """Attention kernel (``sdpa``, ``flash_attention_2``, ``eager``) of passes through the model's module. Left out:
    ``flash_attention_2`` where flash_attn is installed (CUDA, 16-bit products), else transformers chooses."""
    trust_remote_code: bool = False
    """Run the model's own Python code; only for authors whom you trust."""
    chat_template: TextPath | None = None
    """A Jinja2 chat template, or its file's path; the tokenizer's own when left out."""
    lora: LoraSection | None = None
    """Train an adapter instead of all weights."""
    tiny: TinySection = Field(default_factory=TinySection)
    """Shape of the model when ``model.name`` is ``tiny``."""


def merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Return settings with those of ``top`` in place of their own, sections in sections."""
    nested = [k for k in base.keys() & top.keys() if isinstance(base[k], dict) and isinstance(top[k], dict)]
    return {**base, **top, **{key: merged(base[key], top[key]) for key in nested}}
