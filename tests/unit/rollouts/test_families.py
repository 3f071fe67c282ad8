"""The families of docs/engine.md, by what engine and update say of a small model: ``python -m tests.unit.rollouts.test_families``."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from algorist.rollouts.native.module_tier import why_no_module_tier
from algorist.rollouts.native.weights import why_no_decoder
from algorist.training.batch import Batch
from algorist.training.log_probs import LogProbs
from tests.unit.rollouts.rollout_models import FAMILIES, build

PAGE = Path(__file__).resolve().parents[3] / "docs" / "engine.md"


def table() -> str:
    """Return the table: each way of sampling and updating with its families."""
    batch = Batch(
        [[5, 6, 7]], [[8, 9], [4]], [0, 0], torch.zeros(2), torch.tensor([[True, True], [True, False]])
    )
    ways: dict[tuple[str, str], list[str]] = {}
    seen: set[str] = set()
    for family in FAMILIES:
        model = build(family)
        name = type(model).__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        if name in seen:
            continue
        seen.add(name)
        assert why_no_module_tier(model) is None
        sampling = "own forward" if why_no_decoder(model) else "by hand"
        update = "alone" if LogProbs().why_plain(model, batch) else "packed"
        ways.setdefault((sampling, update), []).append(name)
    lines = [(line, way) for way, names in ways.items() for line in textwrap.wrap(", ".join(names), 80)]
    rows = [f"| {line.rstrip(',')} | {' | '.join(way)} |" for line, way in lines]
    return "\n".join(["| family | sampling | update |", "|---|---|---|", *rows])


@pytest.mark.slow
def test_the_page_has_the_families() -> None:
    made = table()
    assert made in PAGE.read_text(encoding="utf-8"), f"put into docs/engine.md:\n{made}"


if __name__ == "__main__":
    print(table())
