"""Tiny models: digits stay single, tags stay whole, save and load give the same logits, LoRA too."""

from __future__ import annotations

from pathlib import Path

import torch

from algorist.config.section import LoraSection, ModelSection
from algorist.models.load import load_policy, make_policy
from algorist.prompts import get_format
from algorist.prompts.chat import encode_prompt, render_prompt

CPU = torch.device("cpu")
TAGS = get_format("reasoning_answer").tags.all()
SECTION = ModelSection.model_validate(
    {"name": "tiny", "tiny": {"hidden_size": 32, "layers": 2, "vocab_size": 400}}
)
TEXTS = ["Tom has 14 apples.", "Mia gives 3 bags of 6 to Ben."] * 20


def test_tokenizer_round_trip_single_digits_and_whole_tags() -> None:
    tokenizer = make_policy(SECTION, device=CPU, seed=0, texts=TEXTS, tags=TAGS).tokenizer
    text = "<reasoning>\n14 + 306 = 320 naïve ☃\n</reasoning>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    pieces = [tokenizer.decode([i]) for i in ids]
    assert "<reasoning>" in pieces and "</reasoning>" in pieces
    assert not any(len([c for c in piece if c.isdigit()]) > 1 for piece in pieces)
    prompt = encode_prompt(get_format("reasoning_answer"), tokenizer, "Tom has 14 apples.")
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")


def test_save_and_load_give_the_same_logits(tmp_path: Path) -> None:
    policy = make_policy(SECTION, device=CPU, seed=3, texts=TEXTS, tags=TAGS)
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    again = load_policy(tmp_path, device=CPU)
    ids = torch.tensor([policy.tokenizer("Tom has 14 apples.")["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(policy.model(ids).logits, again.model(ids).logits)
    form = get_format("reasoning_answer")
    assert render_prompt(form, again.tokenizer, "q") == render_prompt(form, policy.tokenizer, "q")


def test_the_seed_decides_the_weights_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = make_policy(SECTION, device=CPU, seed=1, texts=TEXTS, tags=TAGS).model
    assert torch.equal(torch.rand(3), expected)
    second = make_policy(SECTION, device=CPU, seed=1, texts=TEXTS, tags=TAGS).model
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_lora_trains_the_adapter_only() -> None:
    section = SECTION.model_copy(update={"lora": LoraSection(rank=4, alpha=8)})
    model = make_policy(section, device=CPU, seed=0, texts=TEXTS, tags=TAGS).model
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
