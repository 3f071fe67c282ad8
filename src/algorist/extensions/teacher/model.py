"""The model that scores: loaded once, frozen, its vocabulary cut to the rows that token ids use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from algorist.config.section import ModelSection
from algorist.errors import ConfigError
from algorist.extensions.teacher import BASE, TeacherSection
from algorist.extensions.teacher.divergence import mass_beyond, top_of
from algorist.models.load import load_policy, make_policy
from algorist.store.stages import LAST_FIRST
from algorist.training.batch import Batch
from algorist.training.extension import Policy
from algorist.training.lm_head import AtHead, OfHead


def place_of(name: str) -> Path | str:
    """Return the folder with the weights of a run, or the name as it is."""
    folder = Path(name).expanduser()
    finals = [folder / stage / "final" for stage in LAST_FIRST if (folder / stage / "final").is_dir()]
    return finals[0] if finals else folder if folder.exists() else name


class Rows(NamedTuple):
    """Rows of a head."""

    weight: Tensor
    bias: Tensor | None


@dataclass
class Teacher:
    """A frozen model with the student's tokenizer; ``model`` is None where the student's own base is the teacher."""

    name: str
    model: Any
    device: torch.device
    rows: int = 0
    """Rows of the vocabulary that token ids use."""
    rest: Rows | None = None
    """The rows of its head that no token id uses."""
    home: torch.device | None = None
    """Where the student computes."""
    temperature: float | None = None
    swaps: bool = False

    @classmethod
    def load(cls, section: TeacherSection, student: Any, tokenizer: Any, *, like: ModelSection) -> Teacher:
        """Load a teacher that computes here (ConfigError: its tokenizer is another one)."""
        home = next(student.parameters()).device
        rows = 1 + max(tokenizer.get_vocab().values())
        if section.model == BASE:
            return cls(BASE, None, home, rows, home=home, temperature=section.temperature)
        device = torch.device("cpu") if section.device == "cpu" else home
        place = place_of(section.model)
        shaped = like.model_copy(
            update={
                "name": str(place),
                "lora": None,
                "quantization": section.quantization,
                "chat_template": None,
            }
        )
        if isinstance(place, Path) and (place / "adapter_config.json").is_file():
            policy = load_policy(place, device=device, like=shaped)
        else:
            policy = make_policy(shaped, device=device, seed=0, trained=False)
        check_same_tokenizer(tokenizer, policy.tokenizer, section.model)
        model = policy.model.requires_grad_(False).eval()
        own = model.get_output_embeddings().weight.shape[0]
        if own < rows:
            raise ConfigError(
                f"grpo.teacher.model={section.model} has {own} rows in its head, but the student's tokens have ids up to {rows - 1}; take "
                "a teacher whose tokenizer and weights belong together"
            )
        rest = cut_vocabulary(model, rows)
        if swaps := section.device == "swap":
            model.to("cpu")
        return cls(str(place), model, device, rows, rest, home, section.temperature, swaps)

    def line(self) -> str:
        """Return what is said of it when GRPO begins."""
        if self.model is None:
            return "teacher: the base of the adapter"
        size = sum(p.numel() for p in self.model.parameters())
        unused = (
            f"; {len(self.rest.weight)} rows of its vocabulary that no token uses are left out"
            if self.rest is not None
            else ""
        )
        swapped = ", in the host's memory while it does not score" if self.swaps else ""
        return f"teacher {self.name}: {size / 1e6:.2f} M parameters on {self.device}{swapped}{unused}"

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

    def log_probs(self, batch: Batch, policy: Policy, of_head: OfHead | None = None) -> Tensor:
        """Return log π_teacher (B, T) of the batch's tokens, at its temperature; or what ``of_head`` computes."""
        if (temperature := self.temperature) is not None:
            compute = of_head or (lambda at: top_of(at, 1, self.rows)[:, 1])

            def of_head(at: AtHead) -> Tensor:
                return compute(at._replace(temperature=temperature))

        if self.model is None:
            with without_adapter(policy.unwrapped()):
                return policy.log_probs_of(batch, of_head=of_head)
        home = batch.mask.device
        with self.awake():
            return policy.log_probs_of(batch.to(self.device), model=self.model, of_head=of_head).to(home)

    def states(self, batch: Batch, policy: Policy) -> Tensor:
        """Return the hidden states (B, T, H) that predict the batch's tokens."""
        return self.log_probs(batch, policy, _states)

    def top(self, batch: Batch, policy: Policy, k: int) -> Tensor:
        """Return (B, T, 2 + 2k): the k likeliest tokens, see ``top_of``."""
        return self.log_probs(batch, policy, lambda at: top_of(at, k, self.rows))

    def mass_left_out(self, batch: Batch, policy: Policy) -> Tensor | None:
        """Return the share of mass (B, T) on the rows that were cut, or None where there are none."""
        if (rest := self.rest) is None:
            return None
        return self.log_probs(batch, policy, lambda at: mass_beyond(at, rest.weight, rest.bias))

    @cached_property
    def head(self) -> Rows | None:
        """Its head where the student computes; None for the base of an adapter, whose head is the student's."""
        if self.model is None:
            return None
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return Rows(head.weight.to(self.home), None if bias is None else bias.to(self.home))


def _states(at: AtHead) -> Tensor:
    if at.weight_VH is None:
        raise ConfigError(
            "grpo.teacher.loss=full needs a model whose completions are computed packed, as the log's line about the packed pass says of "
            "the teacher; otherwise its logits would be held for a whole batch. Take grpo.teacher.loss=top_k"
        )
    return at.hidden_MH


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Let a PEFT model compute as its base."""
    with model.disable_adapter():
        yield


def check_same_tokenizer(student: Any, teacher: Any, name: str) -> None:
    """Refuse a teacher whose token ids mean other texts (ConfigError)."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    other = [token for token, number in ours.items() if theirs.get(token) != number]
    if other:
        raise ConfigError(
            f"grpo.teacher.model={name} has another tokenizer: {len(other)} of the student's {len(ours)} tokens, such as "
            f"{other[0]!r}, have another id there or none, so it cannot score what the student writes. Take a larger model of the "
            "student's own family"
        )


def cut_vocabulary(model: Any, rows: int) -> Rows | None:
    """Cut a model's head to the ``rows`` that token ids use, so that no mass lies on padding; return the rows that went, if any.

    Qwen2.5's 0.5B has 151,936 rows and its 7B 152,064 for the same tokenizer.
    """
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    if int(head.weight.shape[0]) <= rows:
        return None
    cut = nn.Linear(head.weight.shape[1], rows, bias=bias is not None, device="meta")
    cut.weight = nn.Parameter(head.weight[:rows], requires_grad=False)
    if bias is not None:
        cut.bias = nn.Parameter(bias[:rows], requires_grad=False)
    model.set_output_embeddings(cut)
    return Rows(head.weight[rows:], None if bias is None else bias[rows:])
