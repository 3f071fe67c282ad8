"""One SFT or GRPO run under a memory limit that its update does not fit into; run as a process of its own.

``python -m tests.unit.training.out_of_memory_run grpo|sft|wide EXTRA_MB FOLDER [planned]`` saves the final weights in FOLDER. EXTRA_MB is
what the process may take beyond what it has when training begins (0: no limit); the kernel refuses more, as it does when memory is really
full. ``wide`` is GRPO whose gradients alone are 60 MB, limited when it has sampled. The parts of a step are sized before the limit comes,
as if another program took the memory; with ``planned`` they know of it. Started as one of two processes (RANK, WORLD_SIZE), each takes
half of the step, and only the second has the limit.
"""

from __future__ import annotations

import logging
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from algorist.config.schema import GRPOSection, SFTSection
from algorist.models.tiny import tiny_model, train_tokenizer
from algorist.prompts import get_format
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.training.grpo_setup import make_grpo_trainer
from algorist.training.processes import Processes
from algorist.training.sft import AlgoristSFTTrainer
from algorist.types import Problem


class Limit(TrainerCallback):
    """Sets the limit when training begins."""

    def __init__(self, extra_mb: int, planned: bool, after_sampling: bool) -> None:
        self.extra, self.planned, self.after_sampling = extra_mb << 20, planned, after_sampling
        self.trainer: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Limit the address space, or see to it that this is done when the first rollouts are there."""
        if not self.planned:
            _ = self.trainer.passes.part_tokens
        if not self.after_sampling:
            return self.limit()
        generate = self.trainer.engine.generate

        def limited(*args: Any, **kwargs: Any) -> Any:
            groups = generate(*args, **kwargs)
            self.limit()
            return groups

        self.trainer.engine.generate = limited

    def limit(self) -> None:
        """Limit the address space to what is taken now and the extra."""
        if self.extra:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + self.extra
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Varied within the groups."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def main(kind: str, extra_mb: int, folder: Path, planned: str = "") -> None:
    """Train a step (SFT: two) and save the weights."""
    torch.set_num_threads(1)
    processes = Processes.join("cpu")
    if processes.count > 1 and processes.main:
        extra_mb = 0
    texts = [f"what is {n} plus {n + 1}" for n in range(64)]
    tokenizer = train_tokenizer(texts, vocab_size=300)
    model = tiny_model(tokenizer, seed=1, hidden_size=768 if kind == "wide" else 192, layers=2)
    limit = Limit(extra_mb, bool(planned), kind == "wide")
    trainer: Any
    if kind != "sft":
        form = get_format("question_only")
        # One step: a rounding error can turn a token of the second one's rollouts.
        section = GRPOSection(
            max_steps=1, batch_size=32, gradient_accumulation_steps=2 // processes.count, group_size=8, max_completion_tokens=200,
            optim="sgd", learning_rate=0.05, lr_scheduler="linear", save_steps=10**9,
        )  # fmt: skip
        trainer = make_grpo_trainer(
            model=model,
            tokenizer=tokenizer,
            problems=[Problem(str(index), text, "1") for index, text in enumerate(texts)],
            prompt_format=form,
            section=section,
            rewards=build_rewards([length_reward], form),
            engine=make_engine("native", model, tokenizer, token_budget=4000),
            output_dir=folder,
            seed=3,
            device=torch.device("cpu"),
            callbacks=[limit],
        )
    else:
        ids = [tokenizer(t * 12)["input_ids"][:200] for t in texts * 2]
        trainer = AlgoristSFTTrainer(
            rows=[{"input_ids": i, "labels": i} for i in ids],
            model=model,
            tokenizer=tokenizer,
            section=SFTSection(
                max_steps=2, batch_size=32, gradient_accumulation_steps=2, optim="sgd", learning_rate=0.05, lr_scheduler="linear",
                save_steps=10**9,
            ),
            output_dir=folder,
            seed=3,
            device=torch.device("cpu"),
            callbacks=[limit],
        )  # fmt: skip
    limit.trainer = trainer
    trainer.train()
    if not processes.main:
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"weights": model.state_dict(), "log": trainer.state.log_history}, folder / "end.pt")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
