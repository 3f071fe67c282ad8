"""The model that scores: loaded once, frozen, its vocabulary cut to the rows that token ids use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from algorist.config.model_section import ModelSection
from algorist.errors import ConfigError
from algorist.extension import Policy
from algorist.extensions.teacher import BASE, TeacherSection
from algorist.models.load import load_policy, make_policy
from algorist.store.stages import LAST_FIRST
from algorist.training.batch import Batch


def why_no_teacher(recipe: Any) -> str:
    """Return why a recipe's teacher cannot be one, as far as that is known before a model is loaded; or an empty text."""
    section: TeacherSection = recipe.grpo.teacher
    if section.model == BASE and recipe.model.lora is None:
        return (
            "grpo.teacher.model is base, the base of the student's adapter, but model.lora is not set; name a model, or take "
            "model.lora={rank: 16}"
        )
    if section.model == "tiny":
        return "grpo.teacher.model is tiny: made from scratch, it has nothing to teach; name a trained model or a run"
    folder = Path(section.model).expanduser()
    looks_local = (
        folder.is_absolute() or section.model.startswith((".", "runs/")) or section.model.count("/") > 1
    )
    if section.model != BASE and looks_local and not folder.exists():
        return f"grpo.teacher.model: there is no {folder}. Train it first, or name another model"
    return ""


def _place(name: str) -> Path | str:
    """Return the folder with the weights of a run, or the name as it is."""
    folder = Path(name).expanduser()
    finals = [folder / stage / "final" for stage in LAST_FIRST if (folder / stage / "final").is_dir()]
    return finals[0] if finals else folder if folder.exists() else name


@dataclass
class Teacher:
    """A frozen model with the student's tokenizer; ``model`` is None where the student's own base is the teacher."""

    name: str
    model: Any
    device: torch.device
    left_out: int = 0
    """Rows of its head that no token id uses."""

    @classmethod
    def load(cls, section: TeacherSection, student: Any, tokenizer: Any, *, like: ModelSection) -> Teacher:
        """Load the teacher of a section.

        Raises:
            ConfigError: Its tokenizer is another one.
        """
        device = next(student.parameters()).device
        if section.model == BASE:
            return cls(BASE, None, device)
        device = torch.device("cpu") if section.device == "cpu" else device
        place = _place(section.model)
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
        rows = 1 + max(tokenizer.get_vocab().values())
        model = policy.model.requires_grad_(False).eval()
        return cls(str(place), model, device, cut_vocabulary(model, rows))

    def line(self) -> str:
        """Return what is said of it when GRPO begins."""
        if self.model is None:
            return "teacher: the base of the adapter"
        size = sum(p.numel() for p in self.model.parameters())
        unused = (
            f"; {self.left_out} rows of its vocabulary that no token uses are left out"
            if self.left_out
            else ""
        )
        return f"teacher {self.name}: {size / 1e6:.2f} M parameters on {self.device}{unused}"

    def log_probs(self, batch: Batch, policy: Policy) -> Tensor:
        """Return log π_teacher (B, T) of the batch's tokens, at the temperature of the rollouts."""
        if self.model is None:
            with without_adapter(policy.unwrapped()):
                return policy.log_probs_of(batch)
        home = batch.mask.device
        return policy.log_probs_of(batch.to(self.device), model=self.model).to(home)


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


def cut_vocabulary(model: Any, rows: int) -> int:
    """Cut a model's head to the ``rows`` that token ids use, so that no mass lies on padding; return how many rows went.

    Qwen2.5's 0.5B has 151,936 rows and its 7B 152,064 for the same tokenizer.
    """
    head = model.get_output_embeddings()
    left_out = int(head.weight.shape[0]) - rows
    if left_out <= 0:
        return 0
    cut = nn.Linear(head.weight.shape[1], rows, bias=getattr(head, "bias", None) is not None, device="meta")
    cut.weight = nn.Parameter(head.weight[:rows], requires_grad=False)
    if cut.bias is not None:
        cut.bias = nn.Parameter(head.bias[:rows], requires_grad=False)
    model.set_output_embeddings(cut)
    return left_out
