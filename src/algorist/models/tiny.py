"""Tiny models from scratch: a byte-level BPE tokenizer trained on the data at hand and a small Qwen3 decoder.

They make the whole job run in minutes on a laptop, without downloads, on the same code path as a real model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from algorist.config.section import TinySection

PAD, BOS, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Words with their leading space, runs of punctuation, white space; every digit is a token of its own.
SPLIT = r"\d| ?\p{L}+| ?[^\s\p{L}\d]|\s+(?!\S)|\s"


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int = 420, tags: Iterable[str] = ()
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with single-digit tokens, the given tags as tokens and a ChatML template.

    Args:
        texts: Training texts.
        vocab_size: Upper bound of the vocabulary, at least 300 (256 bytes, the special tokens, some merges).
        tags: Texts that must be one token each.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tuple(tags := list(tags))),
        special_tokens=[PAD, BOS, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHATML,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, **shape: Any) -> Qwen3ForCausalLM:
    """Return a randomly initialised Qwen3 decoder for ``tokenizer``.

    Args:
        tokenizer: Gives the vocabulary size and the special tokens.
        seed: Seed of the initialisation; the global generator is left as it was.
        **shape: Keys of ``model.tiny``, its defaults for the others.
    """
    size = TinySection(**shape)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size or 3 * size.hidden_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.hidden_size // size.heads,
        max_position_embeddings=size.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        # Tied embeddings of a small model want a larger scale than the default 0.02 to train quickly.
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.05)
    return model
