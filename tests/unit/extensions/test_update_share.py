"""``grpo.update_share``: which completions of a group an update computes, and what that optimises."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorist.extensions.weights import furthest_mask, keep_furthest
from algorist.runs.pipeline import Quiet, run_recipe
from algorist.training.batch import Batch
from tests.tiny import smoke_recipe


@pytest.mark.slow
@given(st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.5]), min_size=2, max_size=7), st.data())
def test_no_other_choice_varies_more(values: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    mask = furthest_mask(torch.tensor([values]), count)[0]
    assert int(mask.sum()) == count

    def variance(rows: Any) -> float:
        part = torch.tensor([values[row] for row in rows], dtype=torch.float64)
        return float(part.var(correction=0))

    most = max(map(variance, itertools.combinations(range(len(values)), count)))
    assert variance(mask.nonzero()[:, 0].tolist()) == pytest.approx(most)


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5])
@pytest.mark.parametrize("rate", [0.03, 0.3, 0.5, 0.9])
def test_what_it_optimises(share: float, rate: float) -> None:
    """Over all groups of eight answers: their expected gradient is that of the pass rate times the factor that the docstring gives."""
    size = 8
    kept = round(share * size)
    section = SimpleNamespace(update_share=share, group_size=size)
    policy: Any = SimpleNamespace(rank=0, everyone=lambda values: values)
    # one parameter: a right answer has probability p, and d log p / dp = 1 / p, d log (1 - p) / dp = -1 / (1 - p)
    slope = {1: 1 / rate, 0: -1 / (1 - rate)}
    gradient = factor = 0.0
    for right in range(size + 1):
        chance = math.comb(size, right) * rate**right * (1 - rate) ** (size - right)
        rewards = torch.tensor([1.0] * right + [0.0] * (size - right))
        advantages = (rewards - rewards.mean())[:, None]
        batch = Batch([[1]], [[1]] * size, [0] * size, advantages, torch.ones(size, 1))
        if share < 1:
            batch = keep_furthest(batch, policy, section)
        factors = torch.ones(size, 1) if batch.counted is None else batch.counted
        slopes = torch.tensor([slope[int(reward)] for reward in rewards])[:, None]
        gradient += chance * float((batch.advantages * factors * slopes).mean())
        q = min(max(kept // 2, kept - (size - right)), right) / kept
        factor += chance * q * (1 - q)
    factor /= rate * (1 - rate)
    assert gradient == pytest.approx(factor, rel=1e-5)
    assert (size - 1) / size - 1e-9 <= factor <= 1 / share


@pytest.mark.slow
def test_a_run_computes_half_of_each_group(tmp_path: Path) -> None:
    """Those left out need no pass, whatever the loss adds for the others."""
    shared = (
        "sft.enabled=false",
        "grpo={group_size: 8, batch_size: 16, gradient_accumulation_steps: 1, max_steps: 1, max_completion_tokens: 8, beta: 0.1}",
        "rewards=[random]",
    )
    computed = {}
    for share in (1.0, 0.5):
        recipe = smoke_recipe(tmp_path, *shared, f"grpo.update_share={share}", f"run_name=share-{share}")
        run = run_recipe(recipe, display=Quiet()).folder.path
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        computed[share] = next(
            line["update/computed_share"] for line in lines if "update/computed_share" in line
        )
    assert computed == {1.0: 1.0, 0.5: 0.5}
