"""Supervised fine-tuning as a source of batches: a demonstration is a completion of advantage 1 under the loss ``nll``.

Demonstrations are tokenised here, with the same prompt rendering as rollouts and evaluation, so that what SFT teaches
is exactly what GRPO samples: prompt tokens, then completion tokens, then the end-of-turn token inside the loss. ``step.py`` has
the update, ``trainer.py`` the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from algorist.config.schema import SFTSection
from algorist.data import with_solutions
from algorist.errors import DataError
from algorist.objectives import Objective, loss_named
from algorist.prompts import PromptFormat
from algorist.prompts.chat import render_prompt
from algorist.prompts.pieces import encode_after
from algorist.training.batch import Batch
from algorist.training.log_probs import LogProbs
from algorist.training.metrics import Metrics
from algorist.training.order import step_loader
from algorist.training.step import update
from algorist.training.trainer import AlgoristTrainer
from algorist.types import Problem

log = logging.getLogger("algorist.training.sft")

Row = Mapping[str, list[int]]
"""``input_ids`` and ``labels`` of a demonstration, -100 where nothing is learned."""


class AlgoristSFTTrainer(AlgoristTrainer):
    """Trains a policy on demonstrations.

    Args, beside those of ``AlgoristTrainer``:
        rows: The demonstrations as tokens.
    """

    def __init__(self, *, rows: Sequence[Row], **loop: Any) -> None:
        self.rows = rows
        objective = Objective(loss=loss_named("nll"), advantage=torch.ones_like, skip=False)
        super().__init__(objective=objective, log_probs=LogProbs(compute_top1=True), **loop)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader whose items are the demonstrations of a step, of all processes."""
        size = self.section.batch_size * self.section.gradient_accumulation_steps * self.processes
        return step_loader(self.rows, RowOrder(len(self.rows), size, self.args.seed))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Learn from this process's share of the demonstrations of a step."""
        model.train()
        self.state.num_input_tokens_seen += sum(len(row["input_ids"]) for row in inputs)
        first, stop = (len(inputs) * at // self.processes for at in (self.rank, self.rank + 1))
        share = inputs[first:stop]
        self.batch = batch_of(share or inputs[:1], self.args.device)
        if not share:  # fewer rows than processes: a pass that learns nothing
            self.batch.mask = torch.zeros_like(self.batch.mask)
        labels = sum(label != -100 for row in inputs for label in row["labels"][1:])
        self.tokens_per_step = max(1, labels) / self.processes
        return update(self, model, self.batch)

    def count(self, metrics: Metrics, log_probs: Tensor, batch: Batch) -> None:
        """Count the tokens that the policy finds the likeliest."""
        metrics.add("mean_token_accuracy", batch.extra["is_top1"].float(), batch.mask)


class RowOrder(Sampler[list[int]]):
    """The demonstrations of each step: a permutation for each epoch, as accelerate and so TRL draw it; the last step takes the rest.

    Args:
        count: Demonstrations in all.
        size: Demonstrations of a step.
        seed: Seed of the permutations.
    """

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.count, self.size, self.seed, self.epoch = count, size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.count, generator=generator).tolist()
        for start in range(0, self.count, self.size):
            yield order[start : start + self.size]

    def __len__(self) -> int:
        return -(-self.count // self.size)


def batch_of(rows: Sequence[Row], device: torch.device) -> Batch:
    """Return demonstrations as completions of advantage 1; those of the same prompt share it."""
    prompts: dict[tuple[int, ...], int] = {}
    completions, prompt_of, learned = [], [], []
    for row in rows:
        ids, labels = row["input_ids"], row["labels"]
        # Nothing predicts the first token of all.
        start = next((at for at, label in enumerate(labels) if at and label != -100), len(ids) - 1)
        prompt_of.append(prompts.setdefault(tuple(ids[:start]), len(prompts)))
        completions.append(ids[start:])
        learned.append([label != -100 for label in labels[start:]])
    mask = torch.zeros(len(rows), max(map(len, completions)), dtype=torch.bool)
    for row_mask, counts in zip(mask, learned, strict=True):
        row_mask[: len(counts)] = torch.tensor(counts)
    advantages = torch.ones(len(rows), device=device)
    return Batch([list(prompt) for prompt in prompts], completions, prompt_of, advantages, mask.to(device))


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt text and the completion that the model is to imitate, but for the spans ``replies`` (characters): context only."""

    prompt: str
    completion: str
    replies: tuple[tuple[int, int], ...] = ()

    @property
    def pieces(self) -> list[tuple[str, bool]]:
        """The completion in pieces as rollouts have them: what the model writes (True), and what is appended."""
        pieces, at = [], 0
        for begin, end in self.replies:
            pieces += [(self.completion[at:begin], True), (self.completion[begin:end], False)]
            at = end
        return [(text, own) for text, own in [*pieces, (self.completion[at:], True)] if text]


def demonstrations(
    problems: Sequence[Problem],
    prompt_format: PromptFormat,
    tokenizer: Any,
    source: Literal["problems", "prompt_response"] = "problems",
) -> list[Demonstration]:
    """Render problems with worked solutions as demonstrations; ``prompt_response`` takes the data's own texts as they are.

    Raises:
        DataError: No problem has a solution, or one has no prompt and response of its own.
    """
    if source == "prompt_response":
        return [as_written(problem, prompt_format) for problem in problems]
    result = []
    for p in with_solutions(list(problems)):
        completion = prompt_format.demonstrate(p.solution, p.extra.get("demonstrated_answer", p.answer))
        prompt = render_prompt(prompt_format.of(p), tokenizer, p.question)
        result.append(Demonstration(prompt, completion, _replies(completion, prompt_format)))
    return result


def as_written(problem: Problem, prompt_format: PromptFormat) -> Demonstration:
    """Return the prompt and response of a row, unchanged; what a tool replied in it is context.

    Raises:
        DataError: The row has none.
    """
    prompt, response = problem.extra.get("prompt"), problem.extra.get("response")
    if not isinstance(prompt, str) or not isinstance(response, str):
        raise DataError(
            f"sft.source is prompt_response, but problem {problem.id} has no text columns prompt and response; give data that "
            "has them (data.sft.name=sft_jsonl or local), or render the problems: sft.source=problems"
        )
    return Demonstration(prompt, response, _replies(response, prompt_format))


def _replies(completion: str, prompt_format: PromptFormat) -> tuple[tuple[int, int], ...]:
    return tuple(prompt_format.turns.replies(completion) or ()) if prompt_format.turns else ()


def tokenize_demonstrations(
    demos: Sequence[Demonstration], tokenizer: Any, *, max_length: int | None
) -> tuple[list[dict[str, list[int]]], int]:
    """Return rows of ``input_ids`` and ``labels`` (-100 on the prompt and on replies), and how many were longer than ``max_length``."""
    prompts = tokenizer([d.prompt for d in demos])["input_ids"]
    pieces = [d.pieces or [("", True)] for d in demos]  # encoded one by one, as a rollout's are
    texts = [text for d in pieces for text, _ in d]
    texts = [
        t.rstrip() if t.rstrip().endswith(tokenizer.eos_token) else t for t in texts
    ]  # it is the end, and has none after it
    flat = iter(encode_after(tokenizer, texts))
    end = tokenizer.eos_token_id
    rows = []
    for prompt, parts in zip(prompts, pieces, strict=True):
        ids, labels = list(prompt), [-100] * len(prompt)
        for _, own in parts:
            piece = next(flat)
            ids, labels = ids + piece, labels + (piece if own else [-100] * len(piece))
        if not ids or ids[-1] != end or len(ids) == len(prompt):
            ids, labels = [*ids, end], [*labels, end]
        rows.append({"input_ids": ids, "labels": labels})
    fitting = [row for row in rows if max_length is None or len(row["input_ids"]) <= max_length]
    return fitting, len(rows) - len(fitting)


def make_sft_trainer(
    *,
    model: Any,
    tokenizer: Any,
    demos: Sequence[Demonstration],
    section: SFTSection,
    output_dir: Path,
    seed: int,
    device: torch.device,
    callbacks: Sequence[Any] = (),
) -> AlgoristSFTTrainer:
    """Return the SFT trainer of a recipe.

    Raises:
        DataError: No demonstration fits into ``sft.max_length``.
    """
    rows, too_long = tokenize_demonstrations(demos, tokenizer, max_length=section.max_length)
    if not rows:
        raise DataError(
            f"all {too_long} demonstrations are longer than sft.max_length={section.max_length} tokens; raise it"
        )
    if too_long:
        log.warning(
            "%d of %d demonstrations are longer than sft.max_length=%s and are left out",
            too_long,
            len(demos),
            section.max_length,
        )
    return AlgoristSFTTrainer(
        model=model,
        tokenizer=tokenizer,
        rows=[row for row in rows if len(row["input_ids"]) > 1],
        section=section,
        output_dir=output_dir,
        seed=seed,
        device=device,
        callbacks=callbacks,
    )
