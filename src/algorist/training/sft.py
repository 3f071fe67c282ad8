"""Supervised fine-tuning on TRL's ``SFTTrainer``: demonstrations in the prompt format, loss on the completion only.

Demonstrations are tokenised here, with the same prompt rendering as rollouts and evaluation, so that what SFT teaches
is exactly what GRPO samples: prompt tokens, then completion tokens, then the end-of-turn token inside the loss.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PrinterCallback

from algorist.training.lm_head import altered_logits, completion_log_probs
from algorist.training.trl_seam import FusedCausalLMOutput

from algorist.training import trl_seam  # isort: skip  (sets TRL's telemetry switch before TRL is imported)
from trl import SFTConfig, SFTTrainer

from algorist.config.schema import SFTSection
from algorist.data import with_solutions
from algorist.errors import DataError
from algorist.models.attention import float32_attention
from algorist.models.precision import mixed_precision
from algorist.models.products import fast_linear
from algorist.models.sharding import unwrap
from algorist.prompts import PromptFormat
from algorist.prompts.chat import render_prompt
from algorist.training.checkpoint import ExactCheckpoints
from algorist.training.faults import FiniteSteps, until_it_fits
from algorist.training.log_probs import recomputes
from algorist.training.part_size import tokens_that_fit
from algorist.training.training_arguments import bare_optimizer, optim_arguments
from algorist.types import Problem

log = logging.getLogger("algorist.training.sft")


class AlgoristSFTTrainer(ExactCheckpoints, SFTTrainer):
    """TRL's trainer with checkpoints that continue exactly.

    An accumulation window that does not fit into memory is computed again in smaller parts.
    """

    def __init__(self, *args: Any, section: SFTSection | None = None, **kwargs: Any) -> None:
        self._window: list[Any] = []
        self._window_ended = False
        self._marked: Any = None
        super().__init__(*args, **kwargs)
        arguments = self.args
        self.section = section or SFTSection(
            batch_size=arguments.per_device_train_batch_size,
            gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        )
        score_labels_only(unwrap(self.model))
        trl_seam.keep_head_running(arguments.device)
        self.faults = FiniteSteps(lambda: list(self._window), lambda values: trl_seam.note(self, values))
        self.add_callback(self.faults)

    def extra_state(self) -> dict[str, Any]:
        """Return the tokens so far, beyond what every stage keeps."""
        return {**super().extra_state(), "total_train_tokens": trl_seam.tokens_seen(self)}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        trl_seam.set_tokens_seen(self, state["total_train_tokens"])

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One micro-batch; when memory runs out, the whole accumulation window again with smaller parts."""
        if self._window_ended or not self._window:
            self._window, self._window_ended, self._marked = [], False, trl_seam.mark(self)
        self._window.append(inputs)
        todo, step = [inputs], super().training_step

        def compute() -> torch.Tensor:
            for batch in todo:
                loss: torch.Tensor = step(model, batch, num_items_in_batch)
            return loss

        def smaller() -> bool:
            trl_seam.rewind(self, self._marked)
            todo[:] = self._window
            return self._halve()

        alone = self.accelerator.num_processes == 1
        loss = until_it_fits(self, model, compute, smaller, alone=alone)
        self._window_ended = self.accelerator.sync_gradients
        return loss

    @functools.cached_property
    def part_tokens(self) -> int | None:
        """Most tokens of one forward and backward, padding counted; None on a GPU until memory runs out."""
        fits = self.args.device.type == "cpu" and self.accelerator.num_processes == 1
        return tokens_that_fit(self.model, self.section, self.optimizer) if fits else None

    def _rows(self, inputs: Any) -> int:
        """Return the most rows of one part of a micro-batch."""
        size, width = inputs["input_ids"].shape
        return size if self.part_tokens is None else min(size, max(1, self.part_tokens // width))

    def _halve(self) -> bool:
        """Halve the rows of one forward and backward; the loss is a sum over the step's tokens, so parts add up."""
        largest = max(self._window, key=lambda inputs: self._rows(inputs) * inputs["input_ids"].shape[1])
        rows, width = self._rows(largest), largest["input_ids"].shape[1]
        if rows <= 1:
            return False
        self.part_tokens = (rows + 1) // 2 * width
        log.warning(
            "out of memory with %d rows at a time; continuing with %d, same mathematics",
            rows,
            (rows + 1) // 2,
        )
        return True

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss; in parts the backward of all but the last part is done here, so that its memory is free again."""
        size = inputs["input_ids"].shape[0]
        if return_outputs or not model.training or size <= (most := self._rows(inputs)):
            return self._loss(model, inputs, return_outputs, num_items_in_batch)
        done: Any = 0.0
        for start in range(0, size, most):
            part = {k: v[start : start + most] if len(v) == size else v for k, v in inputs.items()}
            loss = self._loss(model, part, False, num_items_in_batch)
            if start + most < size:
                self.accelerator.backward(loss)
                done = done + loss.detach()
        return loss + done

    def _loss(self, model: Any, inputs: Any, return_outputs: bool, num_items_in_batch: Any) -> Any:
        # Activation checkpointing runs the forward again in the backward, where neither would be in force.
        base = unwrap(model)
        if recomputes(base):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with fast_linear(), float32_attention(base):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


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
        prompt = render_prompt(prompt_format, tokenizer, p.question)
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
    return tuple(prompt_format.turns.replies(completion)) if prompt_format.turns else ()


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
    flat = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    end = tokenizer.eos_token_id
    rows = []
    for prompt, parts in zip(prompts, pieces, strict=True):
        ids, labels = list(prompt), [-100] * len(prompt)
        for _, own in parts:
            piece = next(flat)
            ids, labels = ids + piece, labels + (piece if own else [-100] * len(piece))
        if ids[-1] != end or len(ids) == len(prompt):
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
) -> SFTTrainer:
    """Return TRL's trainer, ready to train.

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
    args = SFTConfig(
        **optim_arguments(
            section, output_dir=output_dir, seed=seed, device=device, mixed=mixed_precision(model, device)
        ),
        per_device_train_batch_size=section.batch_size,
        gradient_accumulation_steps=section.gradient_accumulation_steps,
        max_length=section.max_length,
        # About 32 widths on a CPU, as oneDNN keeps kernels for each (``products.py``).
        pad_to_multiple_of=8 * max(1, (section.max_length or 2048) // 256) if device.type == "cpu" else None,
        completion_only_loss=False,  # the labels already leave the prompt out
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = AlgoristSFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        section=section,
    )
    trainer.optimizer_cls_and_kwargs = bare_optimizer(model, section)
    trainer.remove_callback(PrinterCallback)  # the display shows the lines
    return trainer


# ---- SFT's loss without the head's work at prompt and padding: on the CPU TRL scores every position of the batch


def score_labels_only(base: nn.Module) -> None:
    """Let TRL's fused forward of ``base`` score only positions that have a label, where this gives the same numbers.

    Covered: CPU, plain logits (no scale, no soft-capping), labels that are not shifted yet. Everything else, and every
    call without ``fused_lm_head``, goes to the forward that is there.
    """
    original = base.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if (
            not fused_lm_head
            or labels is None
            or labels.device.type != "cpu"
            or kwargs.get("shift_labels") is not None
            or kwargs.get("output_router_logits")
            or getattr(self.config.get_text_config(), "output_router_logits", False)
            or not bool((labels[:, 1:] != -100).any())
            or altered_logits(self.config.get_text_config()) is not None
        ):
            return original(*args, **kwargs, **({"fused_lm_head": True} if fused_lm_head else {}))
        kwargs.pop("num_items_in_batch", None)
        return _score(self, kwargs.pop("labels"), *args, **kwargs)

    base.forward = types.MethodType(forward, base)  # type: ignore[method-assign]


def _score(base: Any, labels_BT: Tensor, *args: Any, **kwargs: Any) -> FusedCausalLMOutput:
    hidden_BTH = base.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
    mask = labels_BT[:, 1:] != -100
    head = base.get_output_embeddings()
    scores = completion_log_probs(
        hidden_BTH[:, :-1][mask],
        head.weight,
        getattr(head, "bias", None),
        labels_BT[:, 1:][mask],
        compute_entropy=True,
        compute_top1=True,
    )

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(mask.shape).masked_scatter(mask, values)

    log_probs, entropy, is_top1 = (spread(value) for value in scores if value is not None)
    return FusedCausalLMOutput(
        loss=-log_probs.sum() / mask.sum(),
        log_probs=log_probs,
        entropy=entropy,
        log_sum_sq_probs=None,
        mean_logits=None,
        is_top1=is_top1,
        label_mask=mask,
        aux_loss=None,
    )
