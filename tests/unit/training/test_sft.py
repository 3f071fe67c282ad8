"""SFT: what is learned from, what is left out, how many steps an epoch has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from algorist.config.load import load_recipe
from algorist.config.section import ModelSection
from algorist.models.load import make_policy
from algorist.training import sft
from algorist.training.batch import Batch
from algorist.training.sft import Demonstration, make_sft_trainer, tokenize_demonstrations
from tests.tiny import CPU, TOKENIZER, smoke_recipe, tiny_policy


def test_a_step_learns_the_output_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    demos = [Demonstration(f"{n} + {n}?", f"it is {2 * n}" + " or so" * n) for n in range(6)]
    seen: list[Batch] = []
    made = sft.batch_of
    monkeypatch.setattr(sft, "batch_of", lambda *rows: seen.append(made(*rows)) or seen[-1])
    changes = ["sft.batch_size=3", "sft.gradient_accumulation_steps=1", "sft.epochs=1"]
    trainer = make_sft_trainer(
        model=policy.model,
        tokenizer=policy.tokenizer,
        demos=demos,
        section=smoke_recipe(tmp_path, *changes, "sft.max_steps=null").sft,
        output_dir=tmp_path,
        seed=0,
        device=CPU,
    )
    trainer.train()
    assert [len(batch) for batch in seen] == [3, 3]
    encode = policy.tokenizer
    expected = set()
    for demo in demos:
        output = encode(demo.completion, add_special_tokens=False)["input_ids"] + [encode.eos_token_id]
        expected.add((tuple(encode(demo.prompt)["input_ids"]), tuple(output)))
    learned = {
        (tuple(batch.prompts[prompt]), tuple(torch.tensor(ids)[mask[: len(ids)]].tolist()))
        for batch in seen
        for prompt, ids, mask in zip(batch.prompt_of, batch.completions, batch.mask, strict=True)
    }
    assert learned == expected


def test_an_empty_prompt_teaches_all_but_the_first_token(tmp_path: Path) -> None:
    policy = tiny_policy()
    rows, _ = tokenize_demonstrations(
        [Demonstration("", "7"), Demonstration("", "")], policy.tokenizer, max_length=9
    )
    seven = policy.tokenizer("7")["input_ids"]
    batch = sft.batch_of(rows[:1], CPU)
    assert batch.prompts == [seven[:1]] and batch.completions[0][-1] == policy.tokenizer.eos_token_id
    trainer = make_sft_trainer(
        model=policy.model, tokenizer=policy.tokenizer, demos=[Demonstration("", "7"), Demonstration("", "")],
        section=smoke_recipe(tmp_path).sft, output_dir=tmp_path, seed=0, device=CPU,
    )  # fmt: skip
    assert len(trainer.rows) == 1  # a lone end token is predicted from nothing


TINY = ModelSection.model_validate(
    {"name": "tiny", "tiny": {"hidden_size": 32, "layers": 2, "vocab_size": 400}}
)


TEXTS = ["Tom has 14 apples. Tom buys 3 more. How many apples does Tom have?"] * 20


def test_demonstrations_that_are_too_long_are_left_out_and_counted() -> None:
    tokenizer = make_policy(TINY, device=CPU, seed=0, texts=TEXTS).tokenizer
    demos = [Demonstration("1 + 1?", "2"), Demonstration("1 + 1?", "2 " * 50)]
    rows, left_out = tokenize_demonstrations(demos, tokenizer, max_length=20)
    assert (len(rows), left_out) == (1, 1) and rows[0]["input_ids"][-1] == tokenizer.eos_token_id


def test_the_rest_of_an_epoch_still_makes_a_step(tmp_path: Path) -> None:
    policy = make_policy(TINY, device=CPU, seed=0, texts=TEXTS)
    section = load_recipe(
        "oneshot-gsm8k",
        [
            "sft.batch_size=2",
            "sft.gradient_accumulation_steps=2",
            "sft.epochs=1",
            "sft.logging_steps=1",
            "sft.learning_rate=1e-12",
        ],
    ).recipe.sft
    demos = [Demonstration("2 + 1?", "3")] * 5
    place: dict[str, Any] = {"output_dir": tmp_path, "seed": 0, "device": CPU}
    trainer = make_sft_trainer(**vars(policy), demos=demos, section=section, **place)
    trainer.train()
    assert trainer.state.global_step == 2  # two micro-batches, then the one that is left
    # Equal rows and next to no learning rate: the original divides what is left by the full accumulation, halving its gradient.
    whole, rest = (row for row in trainer.state.log_history if "grad_norm" in row)
    assert rest["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-3) and whole["grad_norm"] > 0.01


@pytest.mark.parametrize("after", ["", "\n", " \n"])
def test_a_response_that_ends_itself_gets_no_second_end(after: str) -> None:
    end = TOKENIZER.eos_token
    (row,), _ = tokenize_demonstrations(
        [Demonstration("1+1", f"is 2{end}{after}")], TOKENIZER, max_length=None
    )
    assert row["labels"].count(TOKENIZER.eos_token_id) == 1
    assert row["labels"][-1] == TOKENIZER.eos_token_id
