"""One SFT step (forward, loss, backward, clipping, AdamW) of algorist against stock TRL on the same batch.

    python benchmarks/sft.py --size tiny        # 32 demonstrations
    python benchmarks/sft.py --size small       # 8 demonstrations

TRL in its faster setting: no gradient checkpointing, float32. Rates count the tokens that have a label.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch
from datasets import Dataset
from models import LONGEST, make_model, make_tokenizer
from trl import SFTConfig, SFTTrainer

from algorist.config.schema import SFTSection
from algorist.training.sft import AlgoristSFTTrainer

ROWS = {"tiny": 32, "small": 8}


def demonstrations(size: str, seed: int = 0) -> list[dict[str, list[int]]]:
    """Return tokens and labels: prompts of 64–128 tokens, completions of near geometric length."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(ROWS[size]):
        prompt = int(torch.randint(64, 129, (), generator=generator))
        drawn = torch.empty(()).exponential_(1 / 70, generator=generator)
        completion = int(drawn.ceil().clamp(1, LONGEST[size]))
        ids = torch.randint(3, 250, (prompt + completion,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return found


def stock(size: str, folder: str, tokenizer: Any) -> Callable[[], float]:
    """Return what computes the gradient of TRL's step and returns its labelled tokens."""
    trainer = SFTTrainer(
        model=make_model(size, tokenizer),
        args=SFTConfig(
            output_dir=folder, per_device_train_batch_size=ROWS[size], use_cpu=True, bf16=False, report_to=[],
            gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True}, completion_only_loss=False,
        ),
        train_dataset=Dataset.from_list(demonstrations(size)),
        processing_class=tokenizer,
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    items = (batch["labels"][:, 1:] != -100).sum()

    def run() -> float:
        trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=items).backward()
        trainer._metrics["train"].clear()
        return float(items)

    return with_optimizer(trainer.model, run)


def ours(size: str, folder: str, tokenizer: Any) -> Callable[[], float]:
    """Return what computes the gradient of our step and returns its labelled tokens."""
    trainer = AlgoristSFTTrainer(
        rows=demonstrations(size),
        model=make_model(size, tokenizer),
        tokenizer=tokenizer,
        section=SFTSection(batch_size=ROWS[size]),
        output_dir=Path(folder),
        seed=0,
        device=torch.device("cpu"),
    )
    batch = next(iter(trainer.get_train_dataloader()))

    def run() -> float:
        trainer.training_step(trainer.model, batch)
        return trainer.tokens_per_step

    return with_optimizer(trainer.model, run)


def with_optimizer(model: Any, gradient: Callable[[], float]) -> Callable[[], float]:
    """Return ``gradient`` with clipping and AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=True)

    def run() -> float:
        optimizer.zero_grad()
        tokens = gradient()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return tokens

    return run


VARIANTS = {"trl": stock, "algorist": ours}


def main() -> None:
    """Print the ratio and, with ``--save``, write ``baselines/sft-SIZE-THREADSt.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(ROWS), default="tiny")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer()
        runs = {name: make(options.size, folder, tokenizer) for name, make in VARIANTS.items()}
        result = measure.compare(runs, repeats=options.repeats)
    mine, theirs = result["algorist"], result["trl"]
    payload = {
        "size": options.size,
        "threads": options.threads,
        "rows": ROWS[options.size],
        "speed_up": measure.ratio_with_interval(mine["rates"], theirs["rates"]),
        "speed_up_cpu": measure.ratio_with_interval(theirs["cpu_seconds"], mine["cpu_seconds"]),
        "variants": result,
    }
    print(json.dumps({key: value for key, value in payload.items() if key != "variants"}, indent=2))
    if options.save:
        print(measure.save_json(f"sft-{options.size}-{options.threads}t", payload))


if __name__ == "__main__":
    main()
