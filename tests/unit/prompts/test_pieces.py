"""Texts that follow another one get no space of their own, whatever a tokenizer puts before a text."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from algorist.prompts.pieces import encode_after
from algorist.training.sft import Demonstration, tokenize_demonstrations
from tests.tiny import tiny_policy

TEXTS = ["<reasoning>\n2 + 3 = ", "5", "\n5 - 1 = ", "4", "\n</reasoning>"]


def sentencepiece(scheme: Any) -> Any:
    """Return a tokenizer that puts a space before a text, as those of Llama 2 and Phi-3 do."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"])
    made.train_from_iterator([" ".join(TEXTS), "a question?\nuser assistant"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_demonstration_is_the_text_that_it_is(scheme: str) -> None:
    tokenizer = sentencepiece(scheme)
    prompt, completion = "a question?", "".join(TEXTS)
    begin = len(TEXTS[0])
    demo = Demonstration(prompt, completion, ((begin, begin + 1),))
    ((row,), _) = tokenize_demonstrations([demo], tokenizer, max_length=None)
    assert tokenizer.decode(row["input_ids"][:-1]) == prompt + completion
    own = [label for label in row["labels"] if label != -100]
    assert tokenizer.decode(own[:-1]).strip() == (TEXTS[0] + "".join(TEXTS[2:])).strip()


def test_other_tokenizers_are_asked_as_before() -> None:
    tokenizer = tiny_policy("r1_zero").tokenizer
    assert encode_after(tokenizer, TEXTS) == tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    assert encode_after(tokenizer, [""]) == [[]]
