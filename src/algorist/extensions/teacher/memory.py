"""The memory that a teacher takes, from its configuration. A file of its own: it needs preflight's shapes, training does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from torch import nn
from transformers import AutoConfig

from algorist.extensions.teacher import BASE, TeacherSection
from algorist.extensions.teacher.model import PART_TOKENS, place_of
from algorist.extensions.teacher.remote import remote_of
from algorist.models.load import pick_device
from algorist.models.precision import pick_precision
from algorist.preflight.memory_advice import model_of_shapes
from algorist.training.lm_head import CACHE_BYTES, CHUNK_ELEMENTS

BYTES = {"8bit": 1.0, "4bit": 0.52}
"""Of a weight that is quantised; in 4 bit with its scales, which are quantised too."""
WIDE, NARROW, HEAD, COPIES = 8, 22, 3, 4
"""Tensors that are there at once: wide and narrow ones of a forward pass without gradients, with what the allocator keeps between them
(set by nine runs of 1.11 to 1.22 GB on an AMD Zen 4; 1.14 are planned with these); of the head's logits in it; of a chunk's
logits in the update: log-probs of both, their difference, the slope."""


def taken(recipe: Any, step: Any) -> tuple[int, int]:
    """Return the bytes of a ``preflight.memory.PlannedStep`` in an update, and between sampling and update, on the student's device."""
    section: TeacherSection = recipe.grpo.teacher
    student, tokens, device = step.model, step.tokens, pick_device(recipe.device)
    hidden = student.config.get_text_config().hidden_size
    size = pick_precision(recipe.model, device, trained=False, width=hidden).compute.itemsize
    config, weights, remote = student.config, 0, remote_of(section) is not None
    if section.model != BASE and not remote:
        place = place_of(section.model)
        if (Path(place) / "adapter_config.json").is_file():
            place = PeftConfig.from_pretrained(str(place)).base_model_name_or_path or ""
        config = AutoConfig.from_pretrained(str(place), trust_remote_code=recipe.model.trust_remote_code)
        weights = _weights(config, section.quantization, size)
    text = config.get_text_config()
    part = tokens if section.model == BASE else min(tokens, max(PART_TOKENS, step.width))
    forward = size * part * (WIDE * text.intermediate_size + NARROW * text.hidden_size)
    forward += 4 * HEAD * min(CHUNK_ELEMENTS, part * text.vocab_size)
    if remote or (device.type != "cpu" and section.device == "cpu"):
        weights = forward = 0
    numbers = logits = 0
    if section.loss != "sampled":
        of_token = text.hidden_size * size if section.loss == "full" else 8 + 8 * section.top_k
        numbers, every = step.rows * step.width * of_token, tokens * text.vocab_size
        logits = COPIES * 4 * min(CHUNK_ELEMENTS, every) + (4 * every if 4 * every <= CACHE_BYTES else 0)
        head = student.get_output_embeddings().weight
        # Its gradient from this loss alone, in float32, and the products' copy of it.
        logits += (4 + size) * head.numel() if head.requires_grad and size < 4 else 0
    stays = 0 if step.loaded or section.device == "swap" else weights
    comes = weights if section.device == "swap" else 0
    return stays + numbers + logits, stays + comes + numbers + forward


def _weights(config: Any, quantization: str | None, size: int) -> int:
    """Return the bytes of the weights; head and embeddings are not quantised."""
    model = model_of_shapes(config, torch.bfloat16)
    linear = {m for m in model.modules() if isinstance(m, nn.Linear)} - {model.get_output_embeddings()}
    total, small = model.num_parameters(), sum(m.weight.numel() for m in linear) if quantization else 0
    return int((total - small) * size + small * BYTES.get(quantization or "", 0))
