"""What the stub counted, models of real shapes on its card, and rollouts whose rows end without numbers."""

from __future__ import annotations

import ctypes
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as hf

from algorist.rollouts import row_state
from algorist.rollouts.native import engine, graph_tier

SHAPES = {
    "0.5B": (24, 896, 4864, 14, 2, 151936, True),
    "1.5B": (28, 1536, 8960, 12, 2, 151936, True),
    "3B": (36, 2048, 11008, 16, 2, 151936, True),
    "7B": (28, 3584, 18944, 28, 4, 152064, False),
}
"""Qwen2.5: layers, width, width of the MLP, heads, key-value heads, vocabulary, tied."""
_KEYS = (
    "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size "
    "tie_word_embeddings".split()
)


class Stub:
    """The counts of the card in this process, since the last ``reset``."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.stub_get.restype = ctypes.c_long

    def reset(self) -> None:
        """Forget all counts; the peak begins at what is taken."""
        self._library.stub_reset()

    def get(self, name: str) -> int:
        """Return launches, captured (launches), replays, syncs, h2d, d2h, mallocs, violations, used or peak (bytes)."""
        return int(self._library.stub_get(name.encode()))

    def names(self, where: str) -> Counter[str]:
        """Return counts by name of what was ``captured``, launched ``outside``, or is a ``violation``."""
        with tempfile.NamedTemporaryFile("r") as file:
            self._library.stub_dump(file.name.encode())
            lines = [line.rstrip("\n").split("\t") for line in Path(file.name).read_text().splitlines()]
        return Counter({name: int(count) for place, count, name in lines if place == where})


def model(shape: str, dtype: torch.dtype = torch.bfloat16, layers: int | None = None) -> Any:
    """Return a model in the shape of Qwen2.5 on the card."""
    settings = dict(zip(_KEYS, SHAPES[shape], strict=True))
    settings["num_hidden_layers"] = layers or settings["num_hidden_layers"]
    config = hf.Qwen2Config(max_position_embeddings=32768, eos_token_id=None, bos_token_id=None, **settings)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            return hf.Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


@contextmanager
def rows_end_at_their_length() -> Iterator[None]:
    """Let rows of the graph tier end when they have no steps left: no kernel writes that they did."""
    read, completions = graph_tier._GraphSchedule._read, row_state.Rows.completions

    def ended(self: Any, look: Any) -> None:
        _, ends, *tokens = look.read()
        alive = [0] * len(look.rows)
        for slot, row in enumerate(look.rows):
            if row in self.left:
                alive[slot], ends[slot] = int(self.left[row] > 0), self.rows.span(row)[1] - self.left[row]
        read(self, graph_tier._Look(torch.tensor([alive, ends, *tokens]), None, look.rows))

    def without_numbers(self: Any) -> Any:
        self._token, self._log_prob = (
            torch.zeros(self._behind + 1, dtype=t) for t in (torch.int64, torch.float32)
        )
        self._is_stop_V = torch.zeros(self._is_stop_V.shape[0], dtype=torch.bool)
        return completions(self)

    with (
        patch.object(graph_tier._GraphSchedule, "_read", ended),
        patch.object(graph_tier._GraphSchedule, "_cut", lambda *_: None),  # at a stop string
        patch.object(row_state.Rows, "completions", without_numbers),
        patch.object(engine, "disagreement", lambda *_: None),  # its rows would never end
    ):
        yield
