"""The model that scores: loaded once, frozen, its vocabulary cut to the rows that token ids use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from algorist.config.section import ModelSection
from algorist.errors import ConfigError
from algorist.extensions.teacher import BASE, NUMBERS, WORDS, TeacherSection
from algorist.extensions.teacher.divergence import Head, mass_beyond, top_of
from algorist.models.load import load_policy, make_policy
from algorist.store.stages import LAST_FIRST
from algorist.training.batch import Batch
from algorist.training.extension import PolicyTrainer
from algorist.training.lm_head import AtHead, OfHead
from algorist.training.log_probs import LogProbs


def place_of(name: str) -> Path | str:
    """Return the folder with the weights of a run, or the name as it is."""
    folder = Path(name).expanduser()
    finals = [folder / stage / "final" for stage in LAST_FIRST if (folder / stage / "final").is_dir()]
    return finals[0] if finals else folder if folder.exists() else name


PART_TOKENS = 2048
"""Most tokens of one forward of the teacher: enough for products at full speed, and few beside what an update keeps."""


@dataclass
class Teacher:
    """A frozen model with the student's tokenizer; ``model`` is None where the student's own base is the teacher."""

    name: str
    model: Any
    device: torch.device
    rows: int = 0
    """Rows of the vocabulary that token ids use."""
    rest: Head = (None, None)
    """The rows of its head that no token id uses."""
    home: torch.device | None = None
    """Device of the student."""
    temperature: float = 1.0
    swaps: bool = False

    @classmethod
    def load(cls, section: TeacherSection, student: Any, tokenizer: Any, *, like: ModelSection) -> Teacher:
        """Load a teacher that computes here (ConfigError: its tokenizer is another one)."""
        home = next(student.parameters()).device
        rows = 1 + max(tokenizer.get_vocab().values())
        temperature = section.temperature or 1.0
        if section.model == BASE:
            return cls(BASE, None, home, rows, home=home, temperature=temperature)
        device = torch.device("cpu") if section.device == "cpu" else home
        place = place_of(section.model)
        changes = {"lora": None, "quantization": section.quantization, "chat_template": None}
        shaped = like.model_copy(update={"name": str(place), **changes})
        if isinstance(place, Path) and (place / "adapter_config.json").is_file():
            policy = load_policy(place, device=device, like=shaped)
        else:
            policy = make_policy(shaped, device=device, seed=0, trained=False)
        check_same_tokenizer(tokenizer, policy.tokenizer, section.model)
        model = policy.model.requires_grad_(False).eval()
        own = model.get_output_embeddings().weight.shape[0]
        if own < rows:
            raise ConfigError(WORDS["few_rows"].format(name=section.model, own=own, last=rows - 1))
        rest = cut_vocabulary(model, rows)
        if swaps := section.device == "swap":
            model.to("cpu")
        return cls(str(place), model, device, rows, rest, home, temperature, swaps)

    def line(self) -> str:
        """Describe the teacher for the log when GRPO begins."""
        if self.model is None:
            return "teacher: the base of the adapter"
        size = sum(p.numel() for p in self.model.parameters())
        line = f"teacher {self.name}: {size / 1e6:.2f} M parameters on {self.device}"
        if self.swaps:
            line += ", in the host's memory while it does not score"
        if self.rest[0] is not None:
            line += f"; {len(self.rest[0])} rows of its vocabulary that no token uses are left out"
        return line

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Have its weights where it computes: with ``swap`` as copies, which go again; those on the host stay."""
        parts = [*self.model.parameters(), *self.model.buffers()] if self.swaps else []
        on_host = [part.data for part in parts]
        try:
            for part in parts:
                part.data = part.data.to(self.device, copy=True)
            yield
        finally:
            for part, data in zip(parts, on_host, strict=True):
                part.data = data

    def log_probs(self, batch: Batch, policy: PolicyTrainer, of_head: OfHead | None = None) -> Tensor:
        """Return log π_teacher (B, T) of the batch's tokens, at its temperature; or what ``of_head`` computes."""
        if self.model is None:
            ask = of_head or (lambda at: top_of(at, 1, self.rows)[:, 1])
            with policy.unwrapped().disable_adapter():  # computes as its base
                return policy.log_probs_of(
                    batch, of_head=lambda at: ask(at._replace(temperature=self.temperature))
                )
        pieces, rows = [], batch.in_group_order(range(len(batch)))
        parts = batch.parts(rows, most_rows=len(rows), most_tokens=PART_TOKENS)
        with self.awake(), torch.no_grad():
            for part in parts:
                piece = batch.take(part).to(self.device)
                values, _ = self.scorer(self.model, piece, of_head=of_head and {NUMBERS: of_head})
                pieces.append((piece.extra[NUMBERS] if of_head else values).to(batch.mask.device))
        numbers = pieces[0].new_zeros(len(batch), batch.width, *pieces[0].shape[2:])
        for part, values in zip(parts, pieces, strict=True):
            numbers[part, : values.shape[1]] = values
        return numbers

    def top(self, batch: Batch, policy: PolicyTrainer, k: int) -> Tensor:
        """Return (B, T, 2 + 2k): the k likeliest tokens, see ``top_of``."""
        return self.log_probs(batch, policy, lambda at: top_of(at, k, self.rows))

    def read(self, batch: Batch, policy: PolicyTrainer, section: TeacherSection) -> Tensor:
        """Return the input of the section's loss: log-probs (B, T), hidden states (B, T, H), or what ``top`` gives."""
        if section.loss == "top_k":
            return self.top(batch, policy, section.top_k)
        return self.log_probs(batch, policy, _states if section.loss == "full" else None)

    def mass_left_out(self, batch: Batch, policy: PolicyTrainer) -> Tensor | None:
        """Return the share of mass (B, T) on the rows that were cut, or None where there are none."""
        if self.rest[0] is None:
            return None
        return self.log_probs(batch, policy, lambda at: mass_beyond(at, self.rest, self.rows))

    @cached_property
    def scorer(self) -> LogProbs:
        """Log-probs of the teacher's forward."""
        return LogProbs(temperature=self.temperature)

    @cached_property
    def head(self) -> Head:
        """Its head where the student computes; nothing for the base of an adapter, whose head is the student's."""
        if self.model is None:
            return None, None
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return head.weight.to(self.home), None if bias is None else bias.to(self.home)


def _states(at: AtHead) -> Tensor:
    if at.weight_VH is None:
        raise ConfigError(WORDS["not_packed"])
    return at.hidden_MH


def check_same_tokenizer(student: Any, teacher: Any, name: str) -> None:
    """Refuse a teacher whose token ids mean other texts (ConfigError)."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    other = [token for token, number in ours.items() if theirs.get(token) != number]
    if other:
        raise ConfigError(WORDS["tokenizer"].format(name=name, other=len(other), all=len(ours), one=other[0]))


def cut_vocabulary(model: Any, rows: int) -> Head:
    """Cut a model's head to the ``rows`` that token ids use, so that no mass lies on padding; return what went, if any.

    Qwen2.5's 0.5B has 151,936 rows and its 7B 152,064 for the same tokenizer.
    """
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    if int(head.weight.shape[0]) <= rows:
        return None, None
    cut = nn.Linear(head.weight.shape[1], rows, bias=bias is not None, device="meta")
    cut.weight = nn.Parameter(head.weight[:rows], requires_grad=False)
    if bias is not None:
        cut.bias = nn.Parameter(bias[:rows], requires_grad=False)
    model.set_output_embeddings(cut)
    return head.weight[rows:], None if bias is None else bias[rows:]
