"""Completions of a GGUF file through llama.cpp, chosen by our sampler: what an exported model answers where it will be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from algorist.errors import ConfigError
from algorist.extensions.llama_cpp.write import bindings
from algorist.rollouts.base import Completions, Prompts, SamplingParams, Turns
from algorist.rollouts.row_state import Rows, check_request


class LlamaCppEngine:
    """Samples from a GGUF file, one completion after the other.

    Args:
        file: The GGUF file.
        tokenizer: The tokenizer of the model that the file was made of; gives the end token, and stop strings need it.
        context: Longest sequence in tokens.

    Raises:
        MissingExtraError: llama-cpp-python is not installed.
        ConfigError: llama.cpp cannot load the file.
    """

    name = "llama_cpp"

    def __init__(self, file: Path, tokenizer: Any, *, context: int = 4096) -> None:
        llama_cpp = bindings()
        try:
            with _plain_buffers():
                self.llama: Any = llama_cpp.Llama(model_path=str(file), n_ctx=context, verbose=False)
        except (ValueError, RuntimeError, OSError) as error:
            raise ConfigError(
                f"llama.cpp cannot load {file} ({' '.join(str(error).split())[:200]}): it is damaged, or of an architecture that "
                "this llama.cpp does not know; write it again with algorist export MODEL --gguf TYPE"
            ) from None
        self._logits_of_last = llama_cpp.llama_get_logits_ith
        self.tokenizer, self.context = tokenizer, int(self.llama.n_ctx())

    def generate(
        self, prompts: Prompts, group_size: int, params: SamplingParams, turns: Turns | None = None
    ) -> Completions:
        vocabulary = int(self.llama.n_vocab())
        check_request(prompts, group_size, self.context, vocabulary)
        rows = Rows(
            prompts,
            group_size,
            params,
            stop_ids=[int(self.llama.token_eos()), int(self.tokenizer.eos_token_id), *params.stop_token_ids],
            vocabulary=vocabulary,
            context=self.context,
            device=torch.device("cpu"),
            decode=lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False),
            turns=turns,
        )
        one = torch.zeros(1, dtype=torch.int64)
        for row in range(len(prompts) * group_size):
            self.llama.reset()
            rows.keep(one[:0])
            rows.admit([row])
            following = list(prompts[row // group_size])
            while True:
                self.llama.eval(following)
                pointer = self._logits_of_last(self.llama.ctx, -1)
                logits_V = torch.from_numpy(np.ctypeslib.as_array(pointer, shape=(vocabulary,)).copy())
                token, done = rows.take(logits_V[None])
                if bool(done):
                    rows.finish(one)
                    break
                following = [int(token)]
        return rows.completions()


@contextmanager
def _plain_buffers() -> Iterator[None]:
    """Keep llama.cpp from repacking weights while a model loads: for AMX that ends the process on some processors (llama.cpp#20824).

    The bindings have no argument for it, only the field of the C parameters. Repacked weights are faster, not more exact.
    """
    from llama_cpp import llama_cpp as bindings

    default = bindings.llama_model_default_params

    def plain() -> Any:
        parameters = default()
        parameters.use_extra_bufts = False
        return parameters

    bindings.llama_model_default_params = plain
    try:
        yield
    finally:
        bindings.llama_model_default_params = default
