"""A stock TRL script whose reward is the grader: TRL's trainer, a model of 20,000 weights that is made here, no hub, a minute on a CPU.

    python packages/grader/examples/trl_grader.py

``correct`` is all that your own script needs; it takes completions as text or as messages, and the gold answers by the name of
their column. It needs trl and algorist-grader (``packages/grader``), nothing else of this repository.
"""

from __future__ import annotations

import tempfile
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from algorist_grader import grade_completion


def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Pay 1 for a right answer."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(grade_completion(text, gold).correct) for text, gold in zip(texts, answer, strict=True)]


def main() -> None:
    """Train and print how many answers were right."""
    words = ["<pad>", "<eos>", *"0123456789", "\\boxed{", "}", "+", "="]
    splits = pre_tokenizers.Split("\\boxed{", "isolated")
    core = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Sequence([splits, pre_tokenizers.Digits(individual_digits=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    rows = [{"prompt": f"{a}+{b}=\\boxed{{", "answer": str(a + b)} for a in range(3) for b in range(3)]

    def in_the_box(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        """Grade what the prompt's open box gets."""
        return correct([f"\\boxed{{{text}}}" for text in completions], answer)

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            folder, max_steps=60, per_device_train_batch_size=64, num_generations=8, max_completion_length=1, learning_rate=1e-2,
            logging_steps=10, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            LlamaForCausalLM(config),
            in_the_box,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.train()
    for row in trainer.state.log_history:
        if "reward" in row:
            print(f"step {row['step']}: {row['reward']:.3f} right")


if __name__ == "__main__":
    main()
