"""Token ids of texts that follow another text: parts of a completion, outputs of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SIGNS = ("\x1e", "\n")
"""Put before a text while it is encoded: a sign that no token joins with what follows, and one that every tokenizer has."""


def encode_after(tokenizer: Any, texts: Sequence[str], **options: Any) -> list[list[int]]:
    """Return the ids of texts that follow another one, without special tokens around them.

    SentencePiece's tokenizers (Llama 2, Phi-3) begin each text with a space that it does not have; within a text there is none.
    """
    plain = tokenizer(list(texts), add_special_tokens=False, **options)["input_ids"]
    first = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"])[:1]
    if not str(first[0] if first else "").startswith("▁"):
        return list(plain)
    for sign in reversed(_SIGNS):
        marked = [sign, "", *(sign + text for text in texts)]
        head, nothing, *longer = tokenizer(marked, add_special_tokens=False, **options)["input_ids"]
        if head != nothing:
            pairs = zip(longer, plain, strict=True)
            plain = [ids[len(head) :] if ids[: len(head)] == head else alone for ids, alone in pairs]
    return list(plain)
